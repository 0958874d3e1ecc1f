"""Results of injections, shared by the synthetic and the real suite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from chopper import wording as fmt

MAGNITUDES = ("small", "medium", "large")

Status = Literal["ok", "missed", "refused", "skipped"]


class Bar(msgspec.Struct, kw_only=True, frozen=True):
    """Limits that a case has to reach."""

    recovered_ratio: float
    """At least this much of the injected time in its own cause, and at most as much too much."""
    leaked_ratio: float
    """At most this much of the injected time in any other cause."""


ALONE = Bar(recovered_ratio=0.98, leaked_ratio=0.01)
MIXED = Bar(recovered_ratio=0.95, leaked_ratio=0.05)
REAL = Bar(recovered_ratio=0.90, leaked_ratio=0.10)


class Case(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One injection of one magnitude: what was put in, and what came out."""

    suite: Literal["synthetic", "real"]
    injection: str
    cause: str
    magnitude: str
    flavour: str
    """``cuda`` or ``rocm`` traces, ``cpu`` for real ones."""
    injected_ns: int = 0
    """Truth with the injection less truth without it, summed over ranks and steps."""
    recovered_ns: int = 0
    """The cause's attributed time with the injection less that without it."""
    ci95_ns: tuple[int, int] | None = None
    leaked_ns: dict[str, int] = {}
    """Other cause → by how much its attributed change exceeds its true change."""
    scale_ns: int | None = None
    """Unit of errors, where it is not ``injected_ns``: a stall that costs nothing."""
    leak_scale_ns: int | None = None
    """Unit of leaks, where it is another: all that is injected together."""
    mixed: bool = False
    bar: Bar = ALONE
    status: Status = "ok"
    reason: str | None = None

    @property
    def unit_ns(self) -> int:
        """Unit of errors."""
        return max(abs(self.injected_ns if self.scale_ns is None else self.scale_ns), 1)

    @property
    def leak_unit_ns(self) -> int:
        """Unit of leaks."""
        return self.unit_ns if self.leak_scale_ns is None else max(abs(self.leak_scale_ns), 1)

    @property
    def recovered_ratio(self) -> float | None:
        """Share of the injected time that its cause got; None where nothing was to be found."""
        return self.recovered_ns / self.injected_ns if self.injected_ns else None

    @property
    def error_ratio(self) -> float:
        """Distance of the recovered from the injected time."""
        return abs(self.recovered_ns - self.injected_ns) / self.unit_ns

    @property
    def worst_leak(self) -> tuple[str, int] | None:
        """The other cause with the largest error, with its sign."""
        return max(self.leaked_ns.items(), key=lambda item: abs(item[1]), default=None)

    @property
    def leaked_ratio(self) -> float:
        """The largest error of any other cause."""
        return abs(self.worst_leak[1]) / self.leak_unit_ns if self.worst_leak else 0.0


def judged(case: Case) -> Case:
    """The case with its status by its bar, or by its interval; none of what was not scored."""
    if case.status in ("refused", "skipped"):
        return case
    missed = []
    allowed = 1 - case.bar.recovered_ratio
    within = case.ci95_ns is not None and case.ci95_ns[0] <= case.injected_ns <= case.ci95_ns[1]
    if case.error_ratio > allowed + 1e-12 and not within:
        ratio = case.recovered_ratio
        missed.append(
            f"found {case.recovered_ns} ns where nothing was injected"
            if ratio is None
            else f"recovered {fmt.ratio(ratio)}, bar {fmt.percent(case.bar.recovered_ratio, '.0f')}"
        )
    if case.worst_leak and case.leaked_ratio > case.bar.leaked_ratio + 1e-12:
        missed.append(
            f"{fmt.ratio(case.leaked_ratio)} leaked into {case.worst_leak[0]}, "
            f"bar {fmt.percent(case.bar.leaked_ratio, '.0f')}"
        )
    return msgspec.structs.replace(
        case, status="missed" if missed else "ok", reason="; ".join(missed) or None
    )


class Score(msgspec.Struct, kw_only=True, frozen=True):
    """All cases in a few numbers."""

    ok: int
    missed: int
    refused: int
    skipped: int
    recovered_ratio: float | None
    """1 less the absolute errors over the injected time, of all cases that were scored."""
    worst_error_ratio: float | None
    worst_leaked_ratio: float | None


def score(cases: Sequence[Case]) -> Score:
    """The overall score; ratios are None where no case was scored."""
    scored = [c for c in cases if c.status in ("ok", "missed")]
    count = {s: sum(c.status == s for c in cases) for s in ("ok", "missed", "refused", "skipped")}
    unit = sum(c.unit_ns for c in scored)
    errors = sum(abs(c.recovered_ns - c.injected_ns) for c in scored)
    return Score(
        **count,
        recovered_ratio=1 - errors / unit if unit else None,
        worst_error_ratio=max((c.error_ratio for c in scored), default=None),
        worst_leaked_ratio=max((c.leaked_ratio for c in scored), default=None),
    )
