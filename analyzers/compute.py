"""Level 2 compute: what each kernel's time was spent on.

For a kernel of model math t = t_ideal · f_roofline · f_rest. The product becomes additive shares
with the logarithmic mean (LMDI): share_i = L(t, t_ideal) · ln f_i with L(a, b) = (a − b)/ln(a/b),
which is exact and independent of order. All other work has causes of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from chopper.analyzers.links import COMPUTE
from chopper.analyzers.work.of_events import WORK_CAUSES, EventWork, main_cause

if TYPE_CHECKING:
    from collections.abc import Callable

    from chopper.analyzers.links import Links
    from chopper.analyzers.states import States

MATH_CAUSES = [
    "compute.ideal",
    "compute.roofline",
    "compute.clock.power_cap",
    "compute.clock.thermal",
    "compute.clock.application",
    "compute.clock.idle_ramp",
    "compute.clock.host_limited",
    "compute.clock.unlabelled",
    "compute.contention",
    "compute.efficiency.wave_quantization",
    "compute.efficiency.instructions",
    "compute.efficiency.tensor_core",
    "compute.efficiency.rest",
]
"""What model math with a known peak is split into."""
COMPUTE_CAUSES = [
    *MATH_CAUSES,
    "compute.no_peak",
    "compute.recompute",
    "compute.optimizer",
    "compute.fsdp_copy",
    "compute.vector.roofline",
    "compute.vector.excess",
    "compute.vector.no_bytes",
    "compute.unmodelled",
]
_IDEAL = COMPUTE_CAUSES.index("compute.ideal")
_ROOFLINE = COMPUTE_CAUSES.index("compute.roofline")
_REST = COMPUTE_CAUSES.index("compute.efficiency.rest")
_VECTOR_ROOFLINE = COMPUTE_CAUSES.index("compute.vector.roofline")
_VECTOR_EXCESS = COMPUTE_CAUSES.index("compute.vector.excess")
_OF_WORK = np.array([COMPUTE_CAUSES.index(cause) for cause in WORK_CAUSES])


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What the device can do at most.

    Attributes:
        flop_per_s: data type (a peak key such as ``bf16``) → FLOP/s, None for unknown.
        memory_bytes_per_s: bandwidth of its memory, None for unknown.
        source: where these come from.
        link_bytes_per_s: bus bandwidth between ranks in one direction, None for unknown.
    """

    flop_per_s: Callable[[str], float | None]
    memory_bytes_per_s: float | None
    source: str
    link_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class ComputeSplit:
    """Rows of (fragment, cause, time); the times of a fragment sum to its share.

    Attributes:
        fragment: index into the fragments of `States`.
        cause: code into COMPUTE_CAUSES.
        time_ns: time.
        too_fast: fragments of kernels that beat their ideal time, which no peak allows.
    """

    fragment: np.ndarray
    cause: np.ndarray
    time_ns: np.ndarray
    too_fast: int


def split_compute(states: States, links: Links, work: EventWork) -> ComputeSplit:
    """Attribute the exclusive compute time of one rank."""
    computing = np.flatnonzero(links.work_class[states.event_row] == COMPUTE)
    event = states.event_row[computing]
    share = states.share_ns[computing]
    cause = _OF_WORK[main_cause(links, work)][event]
    math = cause == _IDEAL
    vector = cause == _VECTOR_ROOFLINE
    plain = ~math & ~vector
    dur = np.maximum(links.events.dur_ns[event], 1)
    # What a kernel had to do does not shrink because others ran beside it: by time run, not shared.
    fraction = states.length_ns[computing] / dur
    ideal = np.where(math, np.nan_to_num(work.ideal_ns[event]) * fraction, 0.0)
    roofline = np.where(math | vector, np.nan_to_num(work.roofline_ns[event]) * fraction, 0.0)
    length = states.length_ns[computing]
    too_fast = int((math & (ideal > length * 1.02 + 1000)).sum())
    ideal_ns = np.minimum(np.floor(ideal), share).astype(np.int64)
    roof_ns = np.minimum(np.floor(np.maximum(roofline, ideal)), share).astype(np.int64)
    roof_part = np.where(math, _lmdi(share, ideal_ns, roof_ns), roof_ns)
    parts = [
        (computing[plain], cause[plain], share[plain]),
        (computing[math], np.full(int(math.sum()), _IDEAL), ideal_ns[math]),
        (computing[math], np.full(int(math.sum()), _ROOFLINE), roof_part[math]),
        (
            computing[math],
            np.full(int(math.sum()), _REST),
            (share - ideal_ns - roof_part)[math],
        ),
        (computing[vector], np.full(int(vector.sum()), _VECTOR_ROOFLINE), roof_ns[vector]),
        (
            computing[vector],
            np.full(int(vector.sum()), _VECTOR_EXCESS),
            (share - roof_ns)[vector],
        ),
    ]
    fragment = np.concatenate([p[0] for p in parts])
    codes = np.concatenate([p[1] for p in parts])
    time_ns = np.concatenate([p[2] for p in parts])
    keep = time_ns > 0
    return ComputeSplit(fragment[keep], codes[keep], time_ns[keep], too_fast)


def _lmdi(total: np.ndarray, ideal: np.ndarray, roofline: np.ndarray) -> np.ndarray:
    """Additive share of the factor roofline/ideal in total − ideal, by the logarithmic mean.

    Where the ideal is zero there is no ratio to split by, and all of roofline − ideal is taken.
    """
    gap = (total - ideal).astype(np.float64)
    usable = (ideal > 0) & (total > ideal) & (roofline > ideal)
    ratio = np.divide(
        np.log(np.divide(roofline, ideal, out=np.ones(len(total)), where=usable)),
        np.log(np.divide(total, ideal, out=np.full(len(total), np.e), where=usable)),
        out=np.zeros(len(total)),
        where=usable,
    )
    share = np.where(usable, gap * ratio, np.where(ideal > 0, 0, roofline - ideal))
    return np.clip(np.floor(share), 0, total - ideal).astype(np.int64)
