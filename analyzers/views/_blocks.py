"""Blocks of an allocator's snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chopper.analyzers.trace.columns import matching, strings

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa


def is_held(blocks: pa.Table) -> np.ndarray:
    """Return the mask of the blocks that tensors hold, or that wait for a stream."""
    return matching(*strings(blocks, "state"), lambda state: state.startswith("active"))
