"""Wave quantization: blocks come in whole numbers per unit, work does not.

A unit (SM) that is given two of a kernel's blocks takes twice as long as one that is given one.
With g blocks on u units the fullest unit has ⌈g/u⌉ of them where an even spread would have g/u, so
the kernel takes at least ⌈g/u⌉ ÷ (g/u) times as long as its blocks need. Blocks that are resident
on one unit at a time divide its throughput among them, so their number does not enter: where each
block would take as long beside others as alone, the loss is larger, up to ⌈w⌉ ÷ w with w = g ÷ (u ·
resident) waves (NVIDIA, Matrix Multiplication Background, wave quantization; for one resident
block, the usual case of large tiles, both are the same).
"""

from __future__ import annotations

import msgspec
import numpy as np

from chopper.errors import JSON_ERRORS
from chopper.hardware.ceilings import UnitLimits

_WARP = 32
_REGISTERS_ROUNDED_TO = 256
"""Registers are handed out per warp in units of so many."""
_SHARED_MEMORY_TAKEN = 1024
"""Bytes of shared memory that the system takes per block (compute capability 8 and later)."""


def extent(text: str | None) -> int | None:
    """Product of a recorded grid or block (JSON, ``[x, y, z]``), None when it is none."""
    try:
        sides = msgspec.json.decode(text, type=list[int]) if text else []
    except JSON_ERRORS:
        return None
    return int(np.prod(sides)) if sides and all(side > 0 for side in sides) else None


def loss_ratio(blocks: np.ndarray, units: int) -> np.ndarray:
    """⌈g/u⌉ ÷ (g/u); 1 where the grid does not exceed the units.

    A grid of at most one block per unit may be a persistent kernel, whose blocks take their work
    as they go: nothing is claimed.
    """
    even = blocks / units
    return np.where(blocks > units, np.ceil(even) / np.maximum(even, 1e-9), 1.0)


def resident_blocks(
    limits: UnitLimits, threads: np.ndarray, registers: np.ndarray, shared_memory: np.ndarray
) -> np.ndarray:
    """Blocks of a kernel that one unit holds at a time, at least 1.

    Of its threads per block, registers per thread and bytes of shared memory per block.
    """
    warps = np.ceil(threads / _WARP)
    rounded = np.ceil(registers * _WARP / _REGISTERS_ROUNDED_TO) * _REGISTERS_ROUNDED_TO
    fits = np.minimum(limits.threads_count // np.maximum(warps * _WARP, 1), limits.blocks_count)
    fits = np.minimum(fits, limits.registers_count // np.maximum(warps * rounded, 1))
    taken = np.where(shared_memory > 0, shared_memory + _SHARED_MEMORY_TAKEN, 1)
    return np.maximum(np.minimum(fits, limits.shared_memory_bytes // taken), 1)
