"""Changes applied to a run: what its recording has data for, and what limits the prediction."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING

from chopper import wording as fmt
from chopper.analyzers.replay import changes as change
from chopper.causes import CAUSES
from chopper.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chopper.analyzers.replay.changes import RankFacts
    from chopper.analyzers.replay.scenario import Scenario
    from chopper.analyzers.replay.whatif_options import Changes

_SAID_CLOCK_RATIO = 0.95


@dataclass
class Applied:
    """A scenario while changes are applied to it.

    Attributes:
        scenario: what is changed.
        facts: of the ranks.
        coupled_ratio: share of the communication that is matched on all ranks; None without any.
        spent: causes with time in them.
        described: the changes in words.
        notes: what limits the prediction.
        deviations: how many standard errors off the sensitivities to the clock are taken.
    """

    scenario: Scenario
    facts: list[RankFacts]
    coupled_ratio: float | None
    spent: set[str]
    deviations: float = 0.0
    described: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def apply(self, changes: Changes) -> None:
        """Apply changes to the scenario.

        Raises:
            UsageError: a change that this run has no data for, or that names nothing in it.
        """
        if changes.fix:
            self.fix(changes.fix)
        if changes.clock_hz is not None or changes.reference_clock:
            self.clock(changes.clock_hz)
        if changes.of_link:
            self.link(changes)
        for what, times in changes.faster:
            self.faster(what, times)
        for name in changes.without:
            self.without(name)
        if changes.graphs:
            self.graphs()
        if changes.overlap:
            self.scenario.overlap = True
            self.described.append("communication overlaps perfectly")

    def fix(self, causes: Sequence[str]) -> None:
        """Causes take no time."""
        if "communication.wait" in causes and not self.coupled_ratio:
            raise UsageError(
                "--fix straggler: no collective was seen on all ranks of its group; pass the "
                "traces of all ranks, and of a large run name those of a group with --ranks"
            )
        change.remove_causes(self.scenario, self.facts, causes)
        for cause in causes:
            self.described.append(f"without {fmt.inside(CAUSES[cause].label)} ({cause})")
            if cause not in self.spent:
                self.notes.append(f"{cause}: takes no time in this run")

    def clock(self, clock_hz: float | None) -> None:
        """The device's clock; None for that of each peak."""
        changed_ns, concerned_ns = change.set_clock(
            self.scenario, self.facts, clock_hz, self.deviations
        )
        if not changed_ns:
            raise UsageError(
                "--clock: the device's clock was not sampled in this run, or nothing shows how "
                "its kernels depend on it"
            )
        wanted = "the reference" if clock_hz is None else fmt.hertz(clock_hz)
        self.described.append(f"device clock at {wanted}")
        if changed_ns < _SAID_CLOCK_RATIO * concerned_ns:
            self.notes.append(
                f"the clock is known for {fmt.ratio(changed_ns / concerned_ns)} of the kernels' "
                "time; the rest stays as observed"
            )

    def link(self, changes: Changes) -> None:
        """Bandwidth and latency between ranks."""
        link = change.observed_link(self.facts)
        if link.bytes_per_s is None:
            raise UsageError(
                "--link: no collective of known size was seen on all ranks of its group"
            )
        ceilings = [f.node.joined.ceiling for f in self.facts]
        peaks = {c.link_bytes_per_s for c in ceilings if c is not None}
        peak = next(iter(peaks)) if len(peaks) == 1 else None
        ratio = changes.bandwidth_ratio or 1.0
        if changes.bandwidth_bytes_per_s is not None:
            now = peak or link.bytes_per_s
            ratio = changes.bandwidth_bytes_per_s / now
            self.notes.append(
                f"the current link: {fmt.rate(now)}, "
                + ("its peak" if peak else "what the largest transfers reached")
            )
        latency = changes.latency_ns
        if changes.latency_ratio is not None:
            latency = link.latency_ns * changes.latency_ratio
        if latency is not None and not link.separable:
            raise UsageError(
                "--latency: the run's messages all have about the same size, so latency and "
                "bandwidth of the link cannot be separated"
            )
        change.set_link(self.scenario, self.facts, link, ratio, latency)
        if ratio != 1.0:
            self.described.append(f"link bandwidth {fmt.factor(ratio)}")
        if latency is not None:
            before = fmt.duration(link.latency_ns)
            self.described.append(f"link latency {fmt.duration(latency)} (now {before})")

    def faster(self, what: str, times: float) -> None:
        """Divide the time of a family's kernels, or of those whose name matches, by a factor."""
        families = ", ".join(change.FAMILIES)
        try:
            count = change.make_faster(self.scenario, self.facts, what, times)
        except re.error as exc:
            raise UsageError(
                f"--faster {what!r}: neither a family ({families}) nor a regular expression ({exc})"
            ) from exc
        if not count:
            hint = _hint(what, [*change.FAMILIES, *change.operator_names(self.facts)])
            raise UsageError(
                f"--faster {what!r}: matches no kernel and no operator; expected a family "
                f"({families}) or a regular expression of names{hint}"
            )
        self.described.append(
            f"{what} {fmt.factor(times)} as fast ({fmt.plural(count, 'device event')})"
        )

    def without(self, name: str) -> None:
        """An operator is not called."""
        try:
            count = change.remove_operator(self.scenario, self.facts, name)
        except re.error as exc:
            raise UsageError(
                f"--without {name!r}: no operator and no regular expression ({exc})"
            ) from exc
        if not count:
            hint = _hint(name, change.operator_names(self.facts))
            raise UsageError(f"--without {name!r}: the run has no operator of this name{hint}")
        for rank_index, gone in self.scenario.gone.items():
            node = self.scenario.ranks[rank_index]
            step, steps = node.links.step, len(node.links.steps.start_ns)
            inside = (step >= 0) & (step < steps)
            if gone[inside if inside.any() else slice(None)].all():
                raise UsageError(
                    f"--without {name!r}: nothing that rank {node.rank} ran would be left; name "
                    "fewer operators"
                )
        self.described.append(f"without operator {name}")

    def graphs(self) -> None:
        """Each step is launched as one graph."""
        if any(f.node.joined.host_only for f in self.facts):
            raise UsageError("--graphs: there is no device, so nothing is launched")
        change.launch_graphs(self.scenario, self.facts)
        self.described.append("each step launched as one graph")


def _hint(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ""
