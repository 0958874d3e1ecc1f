"""Changes asked of a replay, as people write them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from chopper import quantities
from chopper.analyzers.jobs.schedules import SCHEDULES
from chopper.causes import CAUSES, LEAVES
from chopper.errors import UsageError
from chopper.quantities import one_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NOT_FIXABLE = {
    "compute.ideal": "it is the model's own math at the device's peak",
    "compute.vector.roofline": "it is the time that its bytes need at the device's bandwidth",
    **dict.fromkeys(
        (c for c in LEAVES if c.startswith("communication.") and c.endswith(".at_peak")),
        "it is the time that its bytes need on the link: use a faster link (--link), or send less",
    ),
    "idle.unlaunched": "no launch was recorded, so what the device waited for is unknown",
    "idle.no_step": "no device event shows what was waited for",
    **dict.fromkeys(
        (c for c in LEAVES if ".pipeline." in c),
        "a schedule is changed, not removed: --schedule, --virtual-stages or --micro-batches",
    ),
    **dict.fromkeys(
        (c for c in LEAVES if c.endswith("_imbalance")),
        "of a part of it, what even stages or sequences save: --fix stages, --fix sequence-lengths",
    ),
}
"""Leaves that nothing takes away, and why."""
_HOST = "idle.preparation."
ALIASES: dict[str, tuple[str, ...]] = {
    "data_wait": (_HOST + "data",),
    "data_loading": (_HOST + "data",),
    "launch_gaps": (
        "idle.call",
        "idle.launch_latency",
        _HOST + "dispatch",
        _HOST + "runtime",
    ),
    "sync": (_HOST + "synchronization",),
    "synchronizations": (_HOST + "synchronization",),
    "item": (_HOST + "synchronization",),
    "straggler": ("communication.wait",),
    "exposed_communication": ("communication",),
    "recomputation": ("compute.recompute",),
    "garbage_collection": (_HOST + "gc",),
    "exposed_copies": ("copy",),
    "core_wait": ("compute.core_wait", _HOST + "core_wait"),
}
"""Plain names of what one wants to be rid of, beside the ids of causes and their last parts."""


UNCOUPLING = frozenset(
    ("communication.wait", "communication.expert.imbalance", "communication.context.imbalance")
)
"""Leaves that go where ranks do not wait for each other, all together."""


def leaves_of(cause: str) -> list[str]:
    """The leaves of a cause, itself if it is one."""
    return [c for c in LEAVES if c == cause or c.startswith(cause + ".")]


def not_fixable(cause: str) -> str | None:
    """Return why nothing takes a cause away; None where something does."""
    leaves = leaves_of(cause)
    return NOT_FIXABLE[leaves[0]] if all(c in NOT_FIXABLE for c in leaves) else None


def causes_named(name: str) -> tuple[str, ...]:
    """The causes that a name means: an id, the end of one, or a plain name.

    Raises:
        UsageError: there is none, or several; or nothing takes that cause away.
    """
    wanted = name.strip().lower().replace("-", "_").replace(" ", "_")
    if not wanted:
        raise UsageError("--fix: no cause named; `chopper analyze RUN` lists them")
    causes = (wanted,) if wanted in CAUSES else ALIASES.get(wanted, ())
    if not causes:
        ends = [c for c in CAUSES if c.endswith("." + wanted)]
        top = [c for c in ends if not any(o != c and c.startswith(o + ".") for o in ends)]
        if len(top) > 1:
            raise UsageError(f"--fix {name!r}: ambiguous, matches several causes: {', '.join(top)}")
        causes = tuple(top)
    if not causes:
        short = {c.rpartition(".")[2]: c for c in CAUSES}
        known = [*CAUSES, *ALIASES, *short]
        near = get_close_matches(wanted, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "`chopper analyze RUN` lists them"
        raise UsageError(f"--fix {name!r}: unknown cause; {hint}")
    for cause in causes:
        why = not_fixable(cause)
        if why:
            raise UsageError(f"--fix {name!r}: {CAUSES[cause].label} cannot be removed: {why}")
    return causes


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Changes between the observed run and the one asked for.

    Attributes:
        fix: ids of causes that take no time.
        clock_hz: of the devices; ``reference_clock`` for that of each peak.
        bandwidth_bytes_per_s, bandwidth_ratio: of the link between ranks; one of both.
        latency_ns, latency_ratio: of that link; one of both.
        faster: (family or regular expression of kernels, how many times faster).
        without: operators that are not called.
        graphs: each step is launched as one graph.
        overlap: nothing but communication, and the end of a step, waits for communication.
        parts: (what, which): operations of a job that take the mean of their peers: ``stage``,
            ``rank`` or ``replica`` and a number, ``op`` and a name, ``all``; ``stages``,
            ``sequence-lengths``: what these differ by is gone.
        schedule: pipeline schedule to run instead.
        virtual_stages: stages per pipeline rank.
        micro_batches, micro_batches_ratio: per step; one of both.
    """

    fix: tuple[str, ...] = ()
    clock_hz: float | None = None
    reference_clock: bool = False
    bandwidth_bytes_per_s: float | None = None
    bandwidth_ratio: float | None = None
    latency_ns: float | None = None
    latency_ratio: float | None = None
    faster: tuple[tuple[str, float], ...] = ()
    without: tuple[str, ...] = ()
    graphs: bool = False
    overlap: bool = False
    parts: tuple[tuple[str, str | int], ...] = ()
    schedule: str | None = None
    virtual_stages: int | None = None
    micro_batches: int | None = None
    micro_batches_ratio: float | None = None

    @property
    def of_shape(self) -> bool:
        """Tell whether the pipeline runs in another shape."""
        shape = self.schedule, self.virtual_stages, self.micro_batches, self.micro_batches_ratio
        return shape != (None,) * 4

    @property
    def of_job(self) -> bool:
        """Tell whether the operations of a job change."""
        return bool(self.parts) or self.of_shape

    def without_job(self, fixed: str | None) -> Changes:
        """Return the changes that are not of a job's operations.

        Args:
            fixed: a cause of ``fix`` that is left out, too.
        """
        fix = tuple(cause for cause in self.fix if cause != fixed)
        return replace(
            self,
            fix=fix,
            parts=(),
            schedule=None,
            virtual_stages=None,
            micro_batches=None,
            micro_batches_ratio=None,
        )

    @property
    def of_link(self) -> bool:
        """Tell whether the link changes."""
        bandwidth = self.bandwidth_bytes_per_s, self.bandwidth_ratio
        return (*bandwidth, self.latency_ns, self.latency_ratio) != (None,) * 4

    @property
    def of_clock(self) -> bool:
        """Tell whether the clock changes."""
        return self.clock_hz is not None or self.reference_clock

    def __bool__(self) -> bool:
        return self != Changes()

    def __post_init__(self) -> None:
        if self.clock_hz is not None and self.reference_clock:
            raise UsageError("--clock: specify a frequency or `reference`, not both")
        gone = [c for c in self.fix if c in ("communication", "communication.transfer")]
        if gone and self.of_link:
            raise UsageError(f"--link with --fix {gone[0]}: nothing would be transferred; drop one")
        clocks = [c for c in self.fix if c == "compute" or c.startswith("compute.clock")]
        if clocks and self.of_clock:
            raise UsageError(f"--clock with --fix {clocks[0]}: both change the clock; drop one")
        names = [what for what, _ in self.faster]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UsageError(f"--faster {twice!r}: specified twice; use one factor")
        if self.overlap and "communication" in self.fix:
            raise UsageError("--overlap with --fix communication: nothing would be left to overlap")


_TIMES = re.compile(r"(?:x\s*([\d.]+)|([\d.]+)\s*[x×])", re.IGNORECASE)


def changes_of(
    *,
    fix: Sequence[str] = (),
    clock: str | None = None,
    link: str | None = None,
    latency: str | None = None,
    faster: Sequence[str] = (),
    without: Sequence[str] = (),
    graphs: bool = False,
    overlap: bool = False,
    schedule: str | None = None,
    virtual_stages: int | None = None,
    micro_batches: str | None = None,
) -> Changes:
    """Changes as people write them, see :func:`chopper.whatif`.

    Raises:
        UsageError: one that is none, or that contradicts another.
    """
    named = [part for text in fix for part in text.split(",")]
    parts = {name: part for name in named if (part := _part(name)) is not None}
    causes = tuple(dict.fromkeys(c for n in named if n not in parts for c in causes_named(n)))
    reference = clock is not None and clock.strip().lower() in ("reference", "ref")
    bandwidth, bandwidth_ratio = _either(link, "--link", quantities.rate_bytes_per_s)
    latency_s, latency_ratio = _either(latency, "--latency", quantities.seconds)
    if schedule is not None:
        schedule = one_of("schedule", schedule, SCHEDULES)
    if virtual_stages is not None and virtual_stages < 1:
        raise UsageError(f"--virtual-stages {virtual_stages}: expected 1 or more")
    batches, batches_ratio = _either(micro_batches, "--micro-batches", quantities.count)
    return Changes(
        fix=causes,
        clock_hz=None if clock is None or reference else quantities.frequency_hz(clock, "--clock"),
        reference_clock=reference,
        bandwidth_bytes_per_s=bandwidth,
        bandwidth_ratio=bandwidth_ratio,
        latency_ns=None if latency_s is None else latency_s * 1e9,
        latency_ratio=latency_ratio,
        faster=tuple(_faster(text) for text in faster),
        without=tuple(without),
        graphs=graphs,
        overlap=overlap,
        parts=tuple(dict.fromkeys(parts.values())),
        schedule=schedule,
        virtual_stages=virtual_stages,
        micro_batches=None if batches is None else int(batches),
        micro_batches_ratio=batches_ratio,
    )


PARTS = ("stage=N", "rank=N", "replica=N", "op=NAME", "stages", "sequence-lengths", "all")
"""Parts of a job that `fix` names beside causes."""
_OF_CAUSES = {"stage_imbalance": "stages", "micro_batch_imbalance": "sequence-lengths"}
"""Last part of a cause -> the part of a job without which it is gone."""


def _part(text: str) -> tuple[str, str | int] | None:
    """Return a part of a job; None for the name of a cause.

    Raises:
        UsageError: it is no part, and no cause's name either.
    """
    what, separator, which = (word.strip() for word in text.lower().partition("="))
    last = what.rpartition(".")[2].replace("-", "_")
    what = _OF_CAUSES.get(last, what)
    if what in ("stages", "sequence-lengths", "all") and not separator:
        return what, ""
    if not separator:
        return None
    if what == "op" and which:
        return what, which
    number = quantities.digits(which)
    if what in ("stage", "rank", "replica") and number is not None:
        return what, number
    raise UsageError(f"--fix {text!r}: expected a cause, or one of {', '.join(PARTS)}")


def _either(
    text: str | None, option: str, quantity: Callable[[str, str], float]
) -> tuple[float | None, float | None]:
    """A quantity, or a factor (``x2``, ``2x``); None for the other."""
    if text is None:
        return None, None
    match = _TIMES.fullmatch(text.strip())
    if match is None:
        return quantity(text, option), None
    return None, _positive(match[1] or match[2], f"{option} {text!r}")


def _positive(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e12:
        raise UsageError(f"{where}: {text!r} is not a factor; expected more than zero, such as x2")
    return value


def _faster(text: str) -> tuple[str, float]:
    what, separator, times = text.rpartition("=")
    match = _TIMES.fullmatch(times.strip())
    if not separator or not what or match is None:
        raise UsageError(f"--faster {text!r}: expected WHAT=FACTOR, such as gemm=2x")
    return what.strip(), _positive(match[1] or match[2], f"--faster {text!r}")
