"""The result of comparing two runs: where the difference between their steps lies.

Differences are B − A, per step: the mean over the step windows of all ranks. Both sides are cut
into whole nanoseconds so that the leaf causes' differences sum exactly to that of the step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from chopper import wording as fmt
from chopper.causes import CAUSES, LEAVES
from chopper.notebook import as_cell
from chopper.tables import Table as Declaration
from chopper.tables import column, optional
from chopper.tables.frames import Table

if TYPE_CHECKING:
    from chopper.analyzers.attribution import Attribution
    from chopper.storage.manifest import Finding

SCHEMA = "chopper.comparison/2"
Interval = tuple[int, int]
Status = Literal["pass", "differs", "unknown"]
_LARGE_RATIO = 0.1
"""A cause is named in the verdict when it makes this share of the difference."""
_NAMED = 3
_SURE_RATIO = 0.01
_SURE_WIDTH = 1.5
"""Three standard errors instead of two: of a dozen causes at 95 %, one is told by chance."""


@dataclass(frozen=True, slots=True)
class Check:
    """One property in which two runs of the same workload agree."""

    id: str
    label: str
    status: Status
    a: float | int | str | None
    b: float | int | str | None
    """Values of both runs; None for unknown."""
    unit: str
    """Suffix of the values' unit (``flop``, ``count``, ``ratio``), empty for words."""
    withholds: bool
    """The runs do not do the same work: no verdict without ``allow_different``."""
    note: str
    """Meaning of the values, and their origin."""
    explains: bool = False
    """The difference alone may explain a difference in time, whatever the program does."""

    def shown(self, side: Literal["a", "b"]) -> str:
        """Return a side's value, formatted."""
        value = self.a if side == "a" else self.b
        if value is None:
            return fmt.UNKNOWN
        return fmt.cell(f"value_{self.unit}" if self.unit else "value", value)


@dataclass(frozen=True, slots=True)
class Total:
    """A time of the whole step in both runs, in nanoseconds per step."""

    a_ns: int
    b_ns: int
    ci95_ns: Interval | None
    """95 % interval of the difference; None with fewer than three steps in a run."""
    ci95_ratio: tuple[float, float] | None
    """95 % interval of the difference over A; None without one, or where A spent nothing."""

    @property
    def difference_ns(self) -> int:
        """B less A."""
        return self.b_ns - self.a_ns

    @property
    def ratio(self) -> float | None:
        """Difference over A."""
        return self.b_ns / self.a_ns - 1 if self.a_ns else None

    @property
    def told(self) -> bool | None:
        """True when the difference is told from noise; None without an interval."""
        return None if self.ci95_ns is None else self.ci95_ns[0] > 0 or self.ci95_ns[1] < 0


@dataclass(frozen=True, slots=True)
class Change(Total):
    """One cause in both runs, leaf or parent; nanoseconds per step."""

    id: str
    parent: str | None
    label: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """A measure of a step, such as its energy, in both runs.

    Attributes:
        id: its name with the unit as suffix (``loss`` has none).
        a, b: of each run; None where not known.
        ci95_ratio: 95 % interval of the change over A; None without one.
        reason: why a value is None.
        note: what is measured.
    """

    id: str
    label: str
    a: float | None
    b: float | None
    ci95_ratio: tuple[float, float] | None
    reason: str | None
    note: str

    @property
    def ratio(self) -> float | None:
        """Change over the size of A, which a loss may have below zero."""
        return None if self.b is None or not self.a else (self.b - self.a) / abs(self.a)

    @property
    def told(self) -> bool | None:
        """True when the change is told from noise; None without an interval."""
        return self.ci95_ratio and (self.ci95_ratio[0] > 0 or self.ci95_ratio[1] < 0)


@dataclass(frozen=True, slots=True)
class Item:
    """One kernel or operator in both runs, per step of one rank.

    Times are those of its device events, overlapped time too. The difference is cut in two:
    ``by_count_ns`` (it ran more or less often, at the mean duration of both runs) and
    ``by_duration_ns`` (it took longer or shorter, at the mean count of both).
    """

    name: str
    status: Literal["both", "appeared", "vanished"]
    a_count: float
    b_count: float
    a_ns: int
    b_ns: int
    difference_ns: int
    by_count_ns: int
    by_duration_ns: int
    ci95_ns: Interval | None
    told: bool | None
    """Whether it is beyond noise (at most 5 % false discoveries); None: too few steps."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two runs."""

    source: str
    name: str
    devices: tuple[str, ...]
    ranks: int
    steps: int
    """Steps that are compared."""
    windows: int
    """Step windows over all ranks."""
    left_out: tuple[int, ...]
    """Numbers of leading steps that were left out as warm-up."""
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Comparison:
    """Comparison of two runs.

    Attributes:
        a, b: the runs.
        runs: A and B, restricted to the compared steps.
        checks: workload parity, what differs first.
        step: the mean step, the reference of all causes.
        median: the median step, which single slow steps do not affect.
        untraced: the step time of untraced steps; None where a run has none.
        outcomes: step time, throughput, energy and loss.
        changes: all causes with time in either run, parents before their leaves.
        kernels, operations: sorted by the size of their difference.
        notes: caveats of the figures.
        allow_different: give a verdict whatever the checks say.
    """

    a: Side
    b: Side
    runs: tuple[Attribution, Attribution]
    checks: tuple[Check, ...]
    step: Total
    median: Total
    untraced: Total | None
    outcomes: tuple[Outcome, ...]
    changes: tuple[Change, ...]
    kernels: tuple[Item, ...]
    operations: tuple[Item, ...]
    notes: tuple[str, ...]
    allow_different: bool

    @property
    def refused(self) -> tuple[Check, ...]:
        """Checks that withhold the verdict."""
        return () if self.allow_different else tuple(c for c in self.checks if c.withholds)

    def leaves(self) -> list[Change]:
        """Leaf causes, largest difference first; they sum to the difference of the step."""
        rows = [c for c in self.changes if c.id in _LEAF_SET]
        return sorted(rows, key=lambda c: -abs(c.difference_ns))

    @property
    def unit(self) -> str:
        """Unit of the causes: ``traced step`` where the step time is of untraced ones."""
        untraced = [run.step_time().untraced for run in self.runs]
        return "step" if untraced == [None, None] else "traced step"

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        step = self.step
        if self.refused:
            differences = "; ".join(
                f"{c.label}: {c.shown('a')} and {c.shown('b')}" for c in self.refused
            )
            return f"No verdict: A and B do not do the same work ({differences})."
        if not step.a_ns or not step.b_ns:
            return f"No verdict: nothing ran on the device in {'B' if step.a_ns else 'A'}."
        if step.ci95_ratio is None:
            few = " and ".join(
                f"{name} has {fmt.plural(side.steps, 'step')}"
                for name, side in (("A", self.a), ("B", self.b))
                if side.steps < 3
            )
            return f"No verdict: {few}, and fewer than 3 give no interval."
        times = f"{fmt.duration(step.a_ns)} to {fmt.duration(step.b_ns)} per {self.unit}"
        low, high = step.ci95_ratio
        if not step.told:
            least = _SURE_RATIO * max(step.a_ns, step.b_ns)
            sure = [c for c in self._told(_SURE_WIDTH) if abs(c.difference_ns) >= least]
            though = "; ".join(_sentence(c) for c in sure[:_NAMED])
            interval = f"95 %: {signed(low)[:-2]} … {signed(high)}"
            return f"No significant difference: {times} ({interval})" + (
                f"; yet {though}." if though else "."
            )
        faster = step.difference_ns < 0
        word = "faster" if faster else "slower"
        interval = f"{signed(low)[:-2]} … {signed(high)}"
        if faster:
            interval = f"{percent(-high)[:-2]} … {percent(-low)}"
        text = f"B is {percent(abs(step.ratio or 0.0))} {word} (95 %: {interval}): {times}"
        text += self._because(faster)
        explain = [c for c in self.checks if c.explains]
        other = "; ".join(
            f"{fmt.inside(c.label)} {c.shown('a')} and {c.shown('b')}" for c in explain
        )
        return f"{text}." + (f" Other possible reasons: {other}." if other else "")

    def _because(self, faster: bool) -> str:
        least = _LARGE_RATIO * abs(self.step.difference_ns)
        named = [c for c in self._told() if abs(c.difference_ns) >= least]
        along = [_sentence(c) for c in named if (c.difference_ns < 0) == faster][:_NAMED]
        against = [_sentence(c) for c in named if (c.difference_ns < 0) != faster][:_NAMED]
        both = "; ".join(along) + (f"; against it, {'; '.join(against)}" if against else "")
        return f", because {both}" if along else ""

    def _told(self, width: float = 1.0) -> list[Change]:
        """Causes whose difference exceeds ``width`` times their interval, largest first."""
        significant = [
            c
            for c in self._explaining(None)
            if c.ci95_ns is not None
            and (
                c.difference_ns > width * (c.difference_ns - c.ci95_ns[0])
                or -c.difference_ns > width * (c.ci95_ns[1] - c.difference_ns)
            )
        ]
        return sorted(significant, key=lambda c: -abs(c.difference_ns))

    def _explaining(self, parent: str | None) -> list[Change]:
        """Causes that tell most of the difference with the fewest words."""
        explaining: list[Change] = []
        for change in (c for c in self.changes if c.parent == parent):
            below = self._explaining(change.id)
            # One child that makes nearly all of it says more than its parent.
            alike = [
                c
                for c in below
                if c.told
                and (c.difference_ns < 0) == (change.difference_ns < 0)
                and abs(c.difference_ns) >= 0.7 * abs(change.difference_ns)
            ]
            other = sum(abs(c.difference_ns) for c in below if c not in alike)
            precise = alike and other <= 0.5 * abs(change.difference_ns)
            split = not change.told and any(c.told for c in below)
            explaining += below if split else alike[:1] if precise else [change]
        return explaining

    def to_dict(self) -> dict[str, Any]:
        """The documented JSON form, schema ``chopper.comparison/2``."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "comparable": not self.refused,
            "a": _side_dict(self.a),
            "b": _side_dict(self.b),
            "checks": [asdict(c) for c in self.checks],
            **{name: _total_dict(getattr(self, name)) for name in ("step", "median", "untraced")},
            "outcomes": [asdict(o) | {"ratio": o.ratio, "told": o.told} for o in self.outcomes],
            "causes": [_change_dict(change) for change in self.changes],
            "kernels": [asdict(i) for i in self.kernels],
            "operations": [asdict(i) for i in self.operations],
            "notes": list(self.notes),
        }

    @property
    def causes(self) -> Table:
        """All causes with time in either run, per step, in the order of the tree."""
        rows = [
            {
                "id": c.id,
                "parent": c.parent,
                "label": c.label,
                "is_leaf": c.id in _LEAF_SET,
                "a_step_ns": c.a_ns,
                "b_step_ns": c.b_ns,
                "difference_step_ns": c.difference_ns,
                "difference_ratio": c.ratio,
                "difference_ci95_low_ns": c.ci95_ns[0] if c.ci95_ns else None,
                "difference_ci95_high_ns": c.ci95_ns[1] if c.ci95_ns else None,
                "is_beyond_noise": c.told,
            }
            for c in self.changes
        ]
        return Table.declared(_CAUSES.of_rows(rows), _CAUSES)

    def _repr_html_(self) -> str:
        return as_cell(self, "chopper.reports.comparison:page")

    def __repr__(self) -> str:
        return f"<chopper.Comparison of {self.a.source!r} and {self.b.source!r}: {self.verdict}>"


_LEAF_SET = frozenset(LEAVES)
_CAUSES = Declaration(
    "compared causes",
    "All causes with time in either run, per step, in the order of the tree.",
    (
        column("id", "Id of the cause."),
        optional("parent", "Id of its parent; null at the top."),
        column("label", "Name for people."),
        column("is_leaf", "True for a leaf. A parent is the sum of its leaves.", "bool"),
        column("a_step_ns", "Time per step in run A."),
        column("b_step_ns", "Time per step in run B."),
        column("difference_step_ns", "B less A. The leaves sum to the difference of the step."),
        optional("difference_ratio", "Difference over A; null where A spent nothing."),
        optional("difference_ci95_low_ns", "Low end of the difference's 95 % interval."),
        optional("difference_ci95_high_ns", "High end; null with fewer than three steps in a run."),
        optional("is_beyond_noise", "True if the interval excludes 0; null without one.", "bool"),
    ),
)


def percent(ratio: float) -> str:
    """A change for people: ``12.3 %``, ``4.20 %``; a real minus sign."""
    return fmt.percent(ratio, ".1f" if abs(ratio) >= 0.0995 else ".2f").replace("−0.00", "0.00")


def signed(ratio: float | None) -> str:
    """A change with its sign: ``+3.1 %``; unknown is a dash."""
    if ratio is None:
        return fmt.UNKNOWN
    text = percent(ratio)
    return text if text.startswith(("−", "0.00", ">", "<")) else f"+{text}"


def signed_duration(time_ns: float | None) -> str:
    """A difference of times with its sign: ``+4.10 ms``, ``−12.3 µs``."""
    if time_ns is None:
        return fmt.UNKNOWN
    return f"+{fmt.duration(time_ns)}" if time_ns > 0 else fmt.duration(time_ns)


# Labels that are no nouns.
_NOUNS = {
    "idle.preparation": "Host-bound idle time",
    "compute.efficiency": "Time below peak",
    "idle.no_step": "Time without any event",
}


def _sentence(change: Change) -> str:
    label = _NOUNS.get(change.id, CAUSES[change.id].label)
    parent = CAUSES[change.parent].label if change.parent in _CONTEXT else ""
    words = f"{parent}: {fmt.inside(label)}" if parent else label
    verb = "fell" if change.difference_ns < 0 else "rose"
    return f"{fmt.inside(words)} {verb} by {fmt.duration(abs(change.difference_ns))}"


# Parents without which their leaves' labels say too little.
_CONTEXT = frozenset({"compute.vector", "communication.transfer", "compute.efficiency"})


def _total_dict(total: Total | None) -> dict[str, Any] | None:
    return None if total is None else _change_dict(total) | {"ratio": total.ratio}


def _change_dict(change: Total) -> dict[str, Any]:
    return {**asdict(change), "difference_ns": change.difference_ns, "told": change.told}


def _side_dict(side: Side) -> dict[str, Any]:
    values = asdict(side)
    findings = values.pop("findings")
    return values | {"quality": [msgspec.structs.asdict(finding) for finding in findings]}
