"""Replays of a run: what it would take with something changed, and what each cause gives back."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Any

from chopper.causes import CAUSES, LEAVES
from chopper.errors import InputError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from chopper.analyzers.replay.changes import RankFacts
    from chopper.analyzers.replay.path import Path as CriticalPath
    from chopper.analyzers.replay.scenario import Base, Outcome, Scenario
    from chopper.attribution import Attribution, CauseRow

SCHEMA = "chopper.whatif/1"
ERROR_RATIO = 0.01
"""An unmodified replay that is further from the observed time says nothing about changes."""
_LAUNCHED_RATIO = 0.5
_SAID_LAUNCHED_RATIO = 0.99
_LAG_RATIO = 0.1
_COUPLED_RATIO = 0.5
_FREE_RATIO = 0.01
_CONTRADICTED_RATIO = 0.1
_RESAMPLES = 4000
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
}
"""Plain names of what one wants to be rid of, beside the ids of causes and their last parts."""


def causes_named(name: str) -> tuple[str, ...]:
    """The causes that a name means: an id, the end of one, or a plain name.

    Raises:
        UsageError: there is none, or several; or nothing takes that cause away.
    """
    from chopper.analyzers.replay.changes import not_fixable

    asked = name.strip().lower().replace("-", "_").replace(" ", "_")
    found = (asked,) if asked in CAUSES else ALIASES.get(asked, ())
    if not found:
        ends = [c for c in CAUSES if c.endswith("." + asked)]
        top = [c for c in ends if not any(o != c and c.startswith(o + ".") for o in ends)]
        if len(top) > 1:
            raise UsageError(f"--fix {name!r}: several causes are called so: {', '.join(top)}")
        found = tuple(top)
    if not found:
        short = {c.rpartition(".")[2]: c for c in CAUSES}
        known = [*CAUSES, *ALIASES, *short]
        near = get_close_matches(asked, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "`chopper analyze RUN` lists them"
        raise UsageError(f"--fix {name!r}: no cause is called so; {hint}")
    for cause in found:
        why = not_fixable(cause)
        if why:
            raise UsageError(f"--fix {name!r}: {CAUSES[cause].label} cannot be taken away: {why}")
    return found


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What is different.

    Attributes:
        fix: ids of causes that take no time.
        clock_hz: of the devices; ``reference_clock`` for that of each peak.
        bandwidth_bytes_per_s, bandwidth_ratio: of the link between ranks; one of both.
        latency_ns, latency_ratio: of that link; one of both.
        faster: (family or regular expression of kernels, how many times faster).
        without: operators that are not called.
        graphs: each step is launched as one graph.
        overlap: nothing but communication waits for communication.
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

    @property
    def of_link(self) -> bool:
        """Whether the link changes."""
        return any(
            v is not None
            for v in (
                self.bandwidth_bytes_per_s,
                self.bandwidth_ratio,
                self.latency_ns,
                self.latency_ratio,
            )
        )

    def __bool__(self) -> bool:
        return self != Changes()

    def __post_init__(self) -> None:
        if self.clock_hz is not None and self.reference_clock:
            raise UsageError("--clock: give a frequency or `reference`, not both")
        gone = [c for c in self.fix if c in ("communication", "communication.transfer")]
        if gone and self.of_link:
            raise UsageError(f"--link with --fix {gone[0]}: nothing is transferred then; drop one")
        if self.overlap and "communication" in self.fix:
            raise UsageError("--overlap with --fix communication: nothing is left to overlap")


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
) -> Changes:
    """Changes as people write them, see :func:`chopper.whatif`.

    Raises:
        UsageError: one that is none, or that contradicts another.
    """
    from chopper import quantities

    named = [part for text in fix for part in text.split(",") if part.strip()]
    causes = tuple(dict.fromkeys(c for name in named for c in causes_named(name)))
    reference = clock is not None and clock.strip().lower() in ("reference", "ref")
    bandwidth_ratio = None if link is None else _ratio(link, "--link")
    latency_ratio = None if latency is None else _ratio(latency, "--latency")
    return Changes(
        fix=causes,
        clock_hz=None if clock is None or reference else quantities.frequency_hz(clock, "--clock"),
        reference_clock=reference,
        bandwidth_bytes_per_s=None
        if link is None or bandwidth_ratio is not None
        else quantities.rate_bytes_per_s(link, "--link"),
        bandwidth_ratio=bandwidth_ratio,
        latency_ns=None
        if latency is None or latency_ratio is not None
        else quantities.seconds(latency, "--latency") * 1e9,
        latency_ratio=latency_ratio,
        faster=tuple(_faster(text) for text in faster),
        without=tuple(without),
        graphs=graphs,
        overlap=overlap,
    )


def _ratio(text: str, option: str) -> float | None:
    """``x2``, ``2x``: a factor; None for what is written as a quantity."""
    match = _TIMES.fullmatch(text.strip())
    if match is None:
        return None
    return _positive(match[1] or match[2], f"{option} {text!r}")


def _positive(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e12:
        raise UsageError(f"{where}: {text!r} is no factor; expected more than zero, such as x2")
    return value


def _faster(text: str) -> tuple[str, float]:
    what, separator, times = text.rpartition("=")
    match = _TIMES.fullmatch(times.strip())
    if not separator or not what or match is None:
        raise UsageError(f"--faster {text!r}: expected WHAT=FACTOR, such as gemm=2x")
    return what.strip(), _positive(match[1] or match[2], f"--faster {text!r}")


@dataclass(frozen=True)
class Recoverable:
    """What removing one cause gives back.

    Attributes:
        time_ns: summed over ranks and steps, as the cause's own time; None where not known.
        reason: why it is not known.
    """

    time_ns: int | None
    reason: str | None = None


@dataclass
class WhatIf:
    """A changed run beside the observed one.

    Attributes:
        changes: what is different, in words.
        observed_step_ns, predicted_step_ns: mean over steps of the longest window of all ranks.
        predicted_ci95_ns, saved_ci95_ns: 95 % intervals of the predicted step time and of what is
            saved, resampling steps; None with fewer than two.
        steps: number → (observed, predicted) nanoseconds.
        error_ratio: how far the unmodified replay is from what was observed.
        notes: what limits the prediction.
        attribution: of the replayed schedule.
        reference_rank: rank that all are taken to be like, where stragglers are removed.
        path: nanoseconds of the critical path by (leaf cause, what it was), largest first.
    """

    source: str
    changes: list[str]
    observed_step_ns: float
    predicted_step_ns: float
    predicted_ci95_ns: tuple[float, float] | None
    saved_ci95_ns: tuple[float, float] | None
    steps: dict[int | None, tuple[int, int]]
    error_ratio: float
    notes: list[str]
    attribution: Attribution
    observed: Attribution
    reference_rank: int | None = None
    path: list[tuple[str, str, float]] = field(default_factory=list)

    @property
    def saved_ratio(self) -> float:
        """Share of the step that is saved."""
        return 1 - self.predicted_step_ns / self.observed_step_ns if self.observed_step_ns else 0.0

    @property
    def next_bottleneck(self) -> CauseRow | None:
        """The largest cause of the changed run that something could take away."""
        from chopper.analyzers.replay.changes import NOT_FIXABLE

        return next((c for c in self.attribution.leaves() if c.id not in NOT_FIXABLE), None)

    def to_dict(self) -> dict[str, Any]:
        """The documented JSON form, schema ``chopper.whatif/1``."""
        following = self.next_bottleneck
        total = sum(time for _, _, time in self.path)
        return {
            "schema": SCHEMA,
            "run": self.source,
            "changes": self.changes,
            "observed_step_ns": round(self.observed_step_ns),
            "predicted_step_ns": round(self.predicted_step_ns),
            "predicted_ci95_ns": _rounded(self.predicted_ci95_ns),
            "saved_step_ns": round(self.observed_step_ns - self.predicted_step_ns),
            "saved_ratio": self.saved_ratio,
            "saved_ci95_ns": _rounded(self.saved_ci95_ns),
            "steps": [
                {"number": n, "observed_ns": a, "predicted_ns": b}
                for n, (a, b) in self.steps.items()
            ],
            "unmodified_error_ratio": self.error_ratio,
            "reference_rank": self.reference_rank,
            "notes": self.notes,
            "next_bottleneck": None
            if following is None
            else {"id": following.id, "label": following.label, "time_ns": following.time_ns},
            "causes": [
                {
                    "id": c.id,
                    "parent": c.parent,
                    "label": c.label,
                    "time_ns": c.time_ns,
                    "share_ratio": c.share_ratio,
                }
                for c in self.attribution.causes()
            ],
            "critical_path": [
                {
                    "cause": cause,
                    "name": name,
                    "time_ns": round(time),
                    "share_ratio": time / total if total else None,
                }
                for cause, name, time in self.path
            ],
        }


def _rounded(interval: tuple[float, float] | None) -> list[int] | None:
    return None if interval is None else [round(v) for v in interval]


class Replay:
    """The dependency graph of an attributed run, to be run again with changes.

    Raises:
        InputError: the run cannot be replayed: what it lacks.
    """

    def __init__(self, attribution: Attribution) -> None:
        from chopper import api
        from chopper.analyzers.replay.changes import RankFacts
        from chopper.analyzers.replay.graph import build
        from chopper.analyzers.replay.scenario import Base, Scenario

        run = attribution.run
        joined, _ = api._join(run)
        matched = api._match(run, joined)
        usable = [j for j in joined if len(j.windows)]
        source = run.source
        if not usable:
            raise InputError(
                f"{source}: cannot be replayed: no device event and no operator was recorded"
            )
        _check_launches(source, usable)
        self.attribution = attribution
        self.base: Base = Base(build([(j, matched.get(j.given.rank)) for j in usable]))
        self.unmodified: Outcome = Scenario(self.base).solve()
        ranks = attribution.pieces["rank"].to_numpy()
        alone = len(attribution.ranks) == 1
        self.facts: list[RankFacts] = [
            RankFacts(
                node,
                attribution.pieces if alone else attribution.pieces.filter(ranks == node.rank),
                attribution.factors.get(node.rank),
            )
            for node in self.base.graph.ranks
        ]
        self.error_ratio = self._error()
        if self.error_ratio > ERROR_RATIO:
            raise InputError(
                f"{source}: cannot be replayed: unchanged, the replay is {self.error_ratio:.1%} off "
                f"(bar {ERROR_RATIO:.0%}); the order of its events contradicts what they depend on"
            )

    def scenario(self) -> Scenario:
        """A scenario without changes."""
        from chopper.analyzers.replay.scenario import Scenario

        return Scenario(self.base)

    def _error(self) -> float:
        """How far the unmodified replay is from the observed time."""
        observed = sum(
            int(n.joined.windows.bounds_ns[-1] - n.joined.windows.bounds_ns[0])
            for n in self.base.graph.ranks
        )
        found = self.totals(self.unmodified)
        return abs(sum(found) - observed) / max(observed, 1)

    @cached_property
    def coupled_ratio(self) -> float | None:
        """Share of the communication events that are matched on all ranks; None without any."""
        sent = coupled = 0
        for node in self.base.graph.ranks:
            rows = node.joined.communication.event_row
            sent += len(rows)
            coupled += int(node.coupled[rows].sum())
        return coupled / sent if sent else None

    @cached_property
    def notes(self) -> list[str]:
        """What limits every prediction for this run."""
        graph = self.base.graph
        notes = []
        events = self.base.events
        if graph.free > _FREE_RATIO * events:
            notes.append(
                f"{graph.free / events:.1%} of the device events wait for nothing that was recorded: "
                "they stay where they were"
            )
        edges = len(graph.source) + graph.contradicted
        if graph.contradicted > _CONTRADICTED_RATIO * edges:
            notes.append(
                f"{graph.contradicted / edges:.1%} of the dependencies were observed in another order "
                "and are left out"
            )
        beside = [n.joined.links for n in graph.ranks if not n.joined.host_only]
        count = sum(len(links.events) for links in beside)
        launched = sum(int(links.has_launch.sum()) for links in beside)
        if launched < _SAID_LAUNCHED_RATIO * count:
            notes.append(
                f"{1 - launched / count:.0%} of the device events have no recorded launch: they follow "
                "what ran before them, or what the host did last"
            )
        lag_ratio = self._lag_ratio()
        if lag_ratio > _LAG_RATIO:
            notes.append(
                f"{lag_ratio:.0%} of the critical path is waiting that no recorded dependency explains: "
                "it is taken to last as long whatever changes"
            )
        if self.coupled_ratio is not None and self.coupled_ratio < _COUPLED_RATIO:
            notes.append(
                "collectives are not matched on all their ranks: each takes as long as observed, "
                "whenever it begins"
            )
        return notes

    def _lag_ratio(self) -> float:
        """Share of the critical path on which nothing recorded was waited for."""
        from chopper.analyzers.replay.path import LAG, path_of

        path = path_of(self.unmodified)
        length = path.length_ns
        return float(length[path.kind == LAG].sum() / max(length.sum(), 1))

    def totals(self, outcome: Outcome) -> list[int]:
        """Time of all windows of each rank."""
        found = []
        for place in range(len(self.base.graph.ranks)):
            bounds = outcome.windows(place)
            found.append(int(bounds[-1] - bounds[0]) if len(bounds) else 0)
        return found

    def reference(self, outcome: Outcome) -> int | None:
        """Place of the rank that all are taken to be like; None unless ranks are uncoupled.

        Without stragglers every rank takes as long as the middle one does on its own: of two, the
        quicker.
        """
        if not outcome.scenario.uncoupled:
            return None
        totals = self.totals(outcome)
        order = sorted(range(len(totals)), key=totals.__getitem__)
        return order[(len(order) - 1) // 2]

    def step_times(self, outcome: Outcome) -> dict[int | None, int]:
        """Number of each step → the longest window of all ranks."""
        import numpy as np

        alike = self.reference(outcome)
        longest: dict[int | None, int] = {}
        for place, node in enumerate(self.base.graph.ranks):
            if alike is not None and place != alike:
                continue
            lengths = np.diff(outcome.windows(place)).tolist()
            for number, length in zip(node.joined.windows.numbers.tolist(), lengths, strict=True):
                key = None if number < 0 else int(number)
                longest[key] = max(longest.get(key, 0), int(length))
        return dict(sorted(longest.items(), key=lambda item: -1 if item[0] is None else item[0]))

    def gives_back(self, causes: Sequence[str]) -> int:
        """What removing causes gives back, summed over ranks and steps."""
        from chopper.analyzers.replay.changes import remove_causes

        scenario = self.scenario()
        remove_causes(scenario, self.facts, causes)
        outcome = scenario.solve()
        before = self.totals(self.unmodified)
        after = self.totals(outcome)
        alike = self.reference(outcome)
        if alike is not None:
            after = [after[alike]] * len(after)
        return max(sum(before) - sum(after), 0)

    def recoverable(self) -> dict[str, Recoverable]:
        """What each cause with time in it would give back if it were gone."""
        from chopper.analyzers.replay.changes import not_fixable

        found: dict[str, Recoverable] = {}
        # A parent whose only leaf with time is its child gives back the same.
        by_leaves: dict[frozenset[str], int] = {}
        rows = self.attribution.causes()
        spent = {row.id for row in rows if row.time_ns}
        for row in rows:
            why = row.withheld or not_fixable(row.id) or self._needs_all_ranks(row.id)
            if why:
                found[row.id] = Recoverable(None, why)
                continue
            whole = row.id in ("communication", "communication.transfer")
            leaves = frozenset(
                [c for c in LEAVES if c in spent and (c == row.id or c.startswith(row.id + "."))]
                + ([row.id] if whole else [])
            )
            if leaves not in by_leaves:
                by_leaves[leaves] = self.gives_back([row.id] if whole else sorted(leaves))
            found[row.id] = Recoverable(by_leaves[leaves])
        return found

    def _needs_all_ranks(self, cause: str) -> str | None:
        if cause == "communication.wait" and not self.coupled_ratio:
            return "no collective was seen on all ranks of its group"
        return None

    def apply(self, changes: Changes) -> tuple[Scenario, list[str], list[str]]:
        """A scenario with these changes; the changes, and what limits them, in words.

        Raises:
            UsageError: a change that this run has no data for, or that names nothing in it.
        """
        from chopper import _format as fmt
        from chopper.analyzers.replay import changes as change

        scenario, facts = self.scenario(), self.facts
        said: list[str] = []
        notes: list[str] = []
        on_host = any(f.node.joined.host_only for f in facts)
        if changes.fix:
            change.remove_causes(scenario, facts, changes.fix)
            said += [f"without {CAUSES[c].label.lower()} ({c})" for c in changes.fix]
            if "communication.wait" in changes.fix and not self.coupled_ratio:
                raise UsageError(
                    "--fix straggler: no collective was seen on all ranks of its group; give the "
                    "traces of all ranks"
                )
        if changes.clock_hz is not None or changes.reference_clock:
            reached = change.set_clock(scenario, facts, changes.clock_hz)
            if not reached.changed_ns:
                raise UsageError(
                    "--clock: no clock of the device was sampled in this run, or nothing tells how "
                    "its kernels depend on it"
                )
            wanted = "the reference" if changes.clock_hz is None else fmt.hertz(changes.clock_hz)
            said.append(f"device clock at {wanted}")
            if reached.ratio is not None and reached.ratio < 0.95:
                notes.append(
                    f"the clock is known for {reached.ratio:.0%} of the kernels' time; the rest "
                    "stays as observed"
                )
        if changes.of_link:
            self._set_link(scenario, changes, said, notes)
        for what, times in changes.faster:
            try:
                count = change.make_faster(scenario, facts, what, times)
            except re.error as exc:
                raise UsageError(
                    f"--faster {what!r}: neither a family ({', '.join(change.FAMILIES)}) nor a "
                    f"regular expression ({exc})"
                ) from exc
            if not count:
                near = get_close_matches(
                    what, [*change.FAMILIES, *change.operator_names(facts)], n=3
                )
                hint = f"; did you mean {' or '.join(near)}?" if near else ""
                raise UsageError(
                    f"--faster {what!r}: finds no kernel and no operator; expected a family "
                    f"({', '.join(change.FAMILIES)}) or a regular expression of names{hint}"
                )
            said.append(f"{what} {fmt.factor(times)} as fast ({fmt.plural(count, 'device event')})")
        for name in changes.without:
            try:
                count = change.remove_operator(scenario, facts, name)
            except re.error as exc:
                raise UsageError(
                    f"--without {name!r}: no operator and no regular expression ({exc})"
                ) from exc
            if not count:
                near = get_close_matches(name, change.operator_names(facts), n=3, cutoff=0.5)
                hint = f"; did you mean {' or '.join(near)}?" if near else ""
                raise UsageError(f"--without {name!r}: no operator of this run is called so{hint}")
            said.append(f"without operator {name}")
        if changes.graphs:
            if on_host:
                raise UsageError("--graphs: there is no device, so nothing is launched")
            change.launch_graphs(scenario, facts)
            said.append("each step launched as one graph")
        if changes.overlap:
            scenario.overlap = True
            said.append("communication overlaps perfectly")
        return scenario, said, notes

    def _set_link(
        self, scenario: Scenario, changes: Changes, said: list[str], notes: list[str]
    ) -> None:
        from chopper import _format as fmt
        from chopper.analyzers.replay import changes as change

        link = change.observed_link(self.facts)
        if link.bytes_per_s is None:
            raise UsageError(
                "--link: no collective whose size is known was seen on all ranks of its group"
            )
        peaks = {
            f.node.joined.ceiling.link_bytes_per_s for f in self.facts if f.node.joined.ceiling
        }
        peak = next(iter(peaks)) if len(peaks) == 1 else None
        ratio = changes.bandwidth_ratio or 1.0
        if changes.bandwidth_bytes_per_s is not None:
            now = peak or link.bytes_per_s
            ratio = changes.bandwidth_bytes_per_s / now
            notes.append(
                f"the link now: {fmt.rate(now)}, "
                + ("its peak" if peak else "what the largest transfers reached")
            )
        latency = changes.latency_ns
        if changes.latency_ratio is not None:
            latency = link.latency_ns * changes.latency_ratio
        if latency is not None and not link.told:
            raise UsageError(
                "--latency: the run's messages are all of about one size, which does not tell a "
                "link's latency from its bandwidth"
            )
        change.set_link(scenario, self.facts, link, ratio, latency)
        if ratio != 1.0:
            said.append(f"link bandwidth {fmt.factor(ratio)}")
        if latency is not None:
            said.append(
                f"link latency {fmt.duration(latency)} (now {fmt.duration(link.latency_ns)})"
            )

    def whatif(self, changes: Changes) -> WhatIf:
        """The run with changes, beside what was observed."""
        from chopper.analyzers.replay.path import causes_of, path_of
        from chopper.api import attribute

        scenario, said, notes = self.apply(changes)
        outcome = scenario.solve()
        observed = self.step_times(self.unmodified)
        predicted = self.step_times(outcome)
        pairs = {n: (observed[n], predicted.get(n, 0)) for n in observed}
        mean_observed, mean_predicted, interval, saved = _summary(list(pairs.values()))
        alike = self.reference(outcome)
        run = self.attribution.run
        replayed = attribute(_replayed(self, outcome, alike))
        closed = sum(replayed.step_time_ns()) / max(len(pairs), 1)
        if abs(closed - mean_predicted) > ERROR_RATIO * max(mean_predicted, 1.0):
            notes.append(
                "the causes of the changed run cut its steps a little elsewhere: events without a "
                "launch are placed by their time"
            )
        path = causes_of(outcome, path_of(outcome, alike), self.facts)
        rows = sorted(((c, n, t) for (c, n), t in path.items()), key=lambda row: -row[2])
        return WhatIf(
            source=run.source,
            changes=said,
            observed_step_ns=mean_observed,
            predicted_step_ns=mean_predicted,
            predicted_ci95_ns=interval,
            saved_ci95_ns=saved,
            steps=pairs,
            error_ratio=self.error_ratio,
            notes=[*self.notes, *notes],
            attribution=replayed,
            observed=self.attribution,
            reference_rank=None if alike is None else self.base.graph.ranks[alike].rank,
            path=rows,
        )

    def critical_path(self) -> CriticalPath:
        """The critical path of the run as it was."""
        from chopper.analyzers.replay.path import path_of

        return path_of(self.unmodified)


def _check_launches(source: str, joined: Sequence[Any]) -> None:
    """Refuse traces whose device events hang on nothing."""
    import numpy as np

    from chopper.analyzers import names

    beside = [j for j in joined if not j.host_only]
    events = sum(len(j.links.events) for j in beside)
    launched = sum(int(j.links.has_launch.sum()) for j in beside)
    if events and launched < _LAUNCHED_RATIO * events:
        raise InputError(
            f"{source}: cannot be replayed: {launched} of {events} device events have a recorded "
            "launch; record the host's runtime calls too (CPU activities)"
        )
    for j in beside:
        host = j.links.host
        if not len(host):
            continue
        graphs = np.flatnonzero(host.named(names.is_graph_launch))
        empty = np.setdiff1d(graphs, j.links.launch_row)
        # The last launches of a trace may have run after it.
        if len(empty) > 0.1 * max(len(graphs), 1) and len(empty) > 1:
            raise InputError(
                f"{source}: cannot be replayed: {len(empty)} of {len(graphs)} graph launches of rank "
                f"{j.given.rank} have no kernels in the trace; record graphs node by node"
            )


def _summary(
    pairs: list[tuple[int, int]],
) -> tuple[float, float, tuple[float, float] | None, tuple[float, float] | None]:
    """Means of observed and predicted steps; 95 % intervals of the predicted mean and the saving."""
    import numpy as np

    values = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    if not len(values):
        return 0.0, 0.0, None, None
    observed, predicted = (float(v) for v in values.mean(axis=0))
    if len(values) < 2:
        return observed, predicted, None, None
    rng = np.random.default_rng(0)
    drawn = values[rng.integers(len(values), size=(_RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.percentile(drawn[:, 1], [2.5, 97.5])
    less, more = np.percentile(drawn[:, 0] - drawn[:, 1], [2.5, 97.5])
    return observed, predicted, (float(low), float(high)), (float(less), float(more))


def _replayed(replay: Replay, outcome: Outcome, alike: int | None) -> Any:
    """The replayed schedule as a run in memory."""
    import msgspec

    from chopper.analyzers.replay.schedule import tables
    from chopper.run import Run

    run = replay.attribution.run
    ranks = replay.base.graph.ranks
    parts = {part.rank: part for part in run.manifest.ranks}
    manifest = msgspec.structs.replace(
        run.manifest,
        ranks=[msgspec.structs.replace(parts[node.rank], findings=[]) for node in ranks],
        findings=[],
    )
    found: dict[tuple[int, str], pa.Table] = {}
    made: dict[int, dict[str, pa.Table]] = {}
    for place, node in enumerate(ranks):
        source = place if alike is None else alike
        if source not in made:
            made[source] = tables(outcome, source)
        for name, table in made[source].items():
            found[node.rank, name] = table
        counters = run.table(node.rank, "kernel_counter")
        if counters.num_rows:
            found[node.rank, "kernel_counter"] = counters
    return Run(manifest, None, found, source=f"{run.source} (replayed)")


def replay_of(attribution: Attribution) -> Replay:
    """The replay of an attribution, made once.

    Raises:
        InputError: the run cannot be replayed.
    """
    cache = attribution._cache
    if "replay" not in cache:
        cache["replay"] = Replay(attribution)
    found: Replay = cache["replay"]
    return found


def critical_path(attribution: Attribution) -> pa.Table:
    """The critical path of a run by cause and name. -> CRITICAL_PATH."""
    import pyarrow as pa

    from chopper.analyzers.replay.path import causes_of, path_of
    from chopper.tables import TABLES

    declared = TABLES["critical_path"]
    try:
        replay = replay_of(attribution)
    except InputError:
        return declared.empty()
    found = causes_of(replay.unmodified, path_of(replay.unmodified), replay.facts)
    rows = sorted(((c, n, round(t)) for (c, n), t in found.items()), key=lambda row: -row[2])
    total = sum(time for _, _, time in rows)
    return declared.validate(
        pa.table(
            {
                "cause": pa.array([r[0] for r in rows], pa.string()).dictionary_encode(),
                "name": pa.array([r[1] for r in rows], pa.string()).dictionary_encode(),
                "time_ns": pa.array([r[2] for r in rows], pa.int64()),
                "share_ratio": pa.array([r[2] / max(total, 1) for r in rows], pa.float64()),
            }
        )
    )


def recoverable(attribution: Attribution) -> dict[str, Recoverable]:
    """What each cause would give back if it were gone; null with the reason where not known."""
    cache = attribution._cache
    if "recoverable" not in cache:
        try:
            cache["recoverable"] = replay_of(attribution).recoverable()
        except InputError as exc:
            reason = str(exc).partition(": ")[2]
            cache["recoverable"] = {
                row.id: Recoverable(None, reason) for row in attribution.causes()
            }
    found: dict[str, Recoverable] = cache["recoverable"]
    return found


__all__ = [
    "ALIASES",
    "SCHEMA",
    "Changes",
    "Recoverable",
    "Replay",
    "WhatIf",
    "causes_named",
    "changes_of",
    "recoverable",
    "replay_of",
]
