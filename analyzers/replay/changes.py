"""Changes that a replay can make: causes removed, clocks, links, kernels, operators, launches.

Each function changes a :class:`~chopper.analyzers.replay.scenario.Scenario`; all of them compose.
:class:`Applied` applies those that a user asks for, and says what limits the prediction.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from chopper import wording as fmt
from chopper.analyzers.causes.states import copy_direction
from chopper.analyzers.replay.program import CALL, SYNCHRONIZATION
from chopper.analyzers.replay.whatif_options import UNCOUPLING, Changes, leaves_of
from chopper.analyzers.trace import names
from chopper.analyzers.trace.collectives import link_peaks
from chopper.analyzers.trace.columns import ints, matching, strings
from chopper.analyzers.trace.join import COMMUNICATION, COMPUTE, COPY
from chopper.analyzers.trace.phases import PHASES
from chopper.analyzers.work import family
from chopper.analyzers.work.kernels import kernel_families
from chopper.causes import CAUSES, CODES, LEAVES
from chopper.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa

    from chopper.analyzers.causes.factors import Factors
    from chopper.analyzers.replay.graph import RankNodes
    from chopper.analyzers.replay.scenario import Scenario
    from chopper.storage.manifest import Dimension

_BASES = ("compute.ideal", "compute.vector.roofline")
_FACTORS = ("compute.roofline", "compute.clock.", "compute.contention", "compute.efficiency.")
FAMILIES = ("gemm", "conv", "sdpa", "moe", "vector", "communication", "copy")
"""Kinds of kernels that can be made faster by name."""
_BETWEEN = [CODES[f"idle.preparation.{c}"] for c in ("python", "unobserved")]
_OF_LAUNCHING = [
    *(CODES[f"idle.preparation.{c}"] for c in ("dispatch", "runtime", "profiler")),
    *_BETWEEN,
]
SLOWED = tuple(
    f"idle.preparation.{c}" for c in ("dispatch", "runtime", "profiler", "python", "unobserved")
)
"""Work that tracing slows, besides calls that launch. Data, collections of garbage and compilation
take the time they take."""
_SLOWED = [CALL, *(CODES[cause] for cause in SLOWED)]
_SAID_CLOCK_RATIO = 0.95
_SPREAD = 1.5
"""Sizes of messages must differ by this much to tell a link's latency from its bandwidth."""


@dataclass(frozen=True)
class CauseTimes:
    """Knowledge that a rank's attribution has of its device events.

    Attributes:
        node: the rank in the graph.
        piece: its part of the `piece` table.
        factors: measured factors; None where there are none.
    """

    node: RankNodes
    piece: pa.Table
    factors: Factors | None

    @cached_property
    def _coded(self) -> tuple[np.ndarray, dict[str, int], np.ndarray, np.ndarray]:
        codes, values = strings(self.piece, "cause")
        known = {v: i for i, v in enumerate(values)}
        return codes, known, ints(self.piece, "event_row"), ints(self.piece, "time_ns")

    def of_events(self, cause: str) -> np.ndarray:
        """Time of each device event in a leaf."""
        codes, known, event, time = self._coded
        count = len(self.node.start)
        if cause not in known:
            return np.zeros(count)
        rows = np.flatnonzero((codes == known[cause]) & (event >= 0))
        return np.bincount(event[rows], time[rows], count).astype(np.float64)

    def of_windows(self, cause: str) -> np.ndarray:
        """Time of each window in a leaf."""
        codes, known, _, time = self._coded
        rows = np.flatnonzero(codes == known.get(cause, -1))
        count = len(self.node.joined.windows)
        if not len(rows):
            return np.zeros(count)
        index = ints(self.piece, "step_index")  # of all windows of the rank
        return np.bincount(index[rows] - index.min(), time[rows], count)

    @cached_property
    def computing_ns(self) -> np.ndarray:
        """Time of each device event in all causes of computing."""
        return self._sum([c for c in LEAVES if c.startswith("compute.")])

    @cached_property
    def base_ns(self) -> np.ndarray:
        """Time of each device event that nothing takes away."""
        return self._sum(_BASES)

    def sent_along(self) -> Iterator[tuple[Dimension | None, np.ndarray]]:
        """Yield dimensions of parallelism, None for no known one, and a mask of what is sent."""
        communication, matched = self.node.joined.communication, self.node.matched
        kinds = communication.kinds
        along = [k.dimension for k in kinds] if matched is None else matched.dimensions(kinds)
        for dimension in {*along}:
            of_kind = np.array([*(one == dimension for one in along), False])
            mask = np.zeros(len(self.node.start), dtype=bool)
            mask[communication.event_row] = of_kind[communication.kind]
            yield dimension, mask

    def _sum(self, causes: Sequence[str]) -> np.ndarray:
        return sum(map(self.of_events, causes), np.zeros(len(self.node.start)))

    @cached_property
    def at_peak_ns(self) -> np.ndarray:
        """Time that each transfer takes at link peak, NaN where not known."""
        joined = self.node.joined
        peaks = link_peaks(joined.communication.kinds, joined.link)
        peak = np.full(len(self.node.start), np.nan)
        of_kind = np.array([*(p or np.nan for p in peaks), np.nan])
        peak[joined.communication.event_row] = of_kind[joined.communication.kind]
        return np.asarray(self.bus_bytes / peak * 1e9)

    @cached_property
    def bus_bytes(self) -> np.ndarray:
        """Bytes of each communication event times its bus factor, NaN where not known."""
        communication = self.node.joined.communication
        bus_bytes = np.full(len(self.node.start), np.nan)
        bus_bytes[communication.event_row] = communication.bus_bytes
        return bus_bytes


def remove_causes(scenario: Scenario, facts: list[CauseTimes], causes: Iterable[str]) -> None:
    """Causes, with all below them, take no time."""
    requested = set(causes)
    leaves = {leaf for cause in requested for leaf in leaves_of(cause)}
    scenario.calls |= "idle.call" in leaves
    scenario.latency |= "idle.launch_latency" in leaves
    scenario.dependency |= "idle.dependency" in leaves
    scenario.synchronization |= LEAVES[SYNCHRONIZATION] in leaves
    scenario.uncoupled |= not leaves.isdisjoint(UNCOUPLING)
    scenario.new_clock |= leaves.issuperset(leaves_of("compute.clock"))
    wanted = [CODES[c] for c in leaves if c.startswith("idle.")]
    for rank_index, fact in enumerate(facts):
        node = fact.node
        parts = node.program.parts
        if wanted:
            scenario.without_host(rank_index, np.isin(parts.cause, wanted))
        _remove_computing(scenario, rank_index, fact, leaves)
        if "compute.recompute" in leaves:
            phase = np.append(node.links.span_phase, -1)[parts.span]
            scenario.without_host(rank_index, phase == PHASES.index("recompute"))
        _remove_communication(scenario, rank_index, fact, requested, leaves)
        _remove_copies(scenario, rank_index, node, leaves)
        _remove_core_waits(scenario, rank_index, fact, leaves)


def _remove_core_waits(
    scenario: Scenario, rank_index: int, fact: CauseTimes, leaves: set[str]
) -> None:
    """Shorten host parts by their waits for a core; computing has lost its part already."""
    computing, preparing = "compute.core_wait", "idle.preparation.core_wait"
    waited = np.stack([fact.of_windows(cause) for cause in (computing, preparing)])
    gone = waited * np.array([[computing in leaves], [preparing in leaves]])
    if not gone.any():
        return
    scenario.freed[rank_index] = gone, waited - gone
    if preparing in leaves:
        factor = _without_core_wait(fact.node, fact.of_windows(preparing))
        scenario.part_scale[rank_index] = factor * scenario.part_scale.get(rank_index, 1.0)


def _without_core_wait(node: RankNodes, waited_ns: np.ndarray) -> np.ndarray:
    """Return the factor by which each host part's time changes without these waits of its window.

    All parts of a window lose the same share, because when the thread waited is unknown.
    """
    parts, bounds = node.program.parts, node.joined.windows.bounds_ns
    window = np.searchsorted(bounds, parts.start_ns, side="right") - 1
    window = np.where((window >= 0) & (window < len(waited_ns)), window, len(waited_ns))
    host_ns = np.bincount(window, parts.end_ns - parts.start_ns, len(waited_ns) + 1)
    share = np.append(waited_ns, 0) / np.maximum(host_ns, 1)
    return np.asarray(1 - np.minimum(share, 1.0)[window])


def _remove_computing(
    scenario: Scenario, rank_index: int, fact: CauseTimes, leaves: set[str]
) -> None:
    """Shorten kernels by the factors of these causes, or remove those that are such work.

    A factor f that is removed alone makes a kernel of time t take t ÷ f. The attribution's share of
    it is L(t, base) · ln f, which gives ln f back.
    """
    chosen = [c for c in leaves if c.startswith("compute.") and c not in _BASES]
    total, base = fact.computing_ns, fact.base_ns
    if not chosen or not total.any():
        return
    logarithm = np.zeros(len(total))
    plain = np.zeros(len(total))
    for cause in chosen:
        time = fact.of_events(cause)
        if cause.startswith(_FACTORS) or cause == "compute.vector.excess":
            logarithm += time
        else:
            plain += time
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where((base > 0) & (total > base), (total - base) / np.log(total / base), total)
        known = (base > 0) & (total > base)
        remaining = np.where(
            known, np.exp(-logarithm / mean), 1 - logarithm / np.maximum(total, 1)
        ) * (1 - plain / np.maximum(total, 1))
    factor = np.where(total > 0, np.clip(remaining, 0.0, 1.0), 1.0)
    if (factor < 1).any():
        scenario.scale(rank_index, factor)


def _remove_communication(
    scenario: Scenario, rank_index: int, fact: CauseTimes, requested: set[str], leaves: set[str]
) -> None:
    node = fact.node
    run = np.full(len(node.start), -1, dtype=np.int64)
    for dimension, sent in fact.sent_along():
        own = f"communication.{dimension}" if dimension else "communication"
        transfer = own if dimension else "communication.transfer"
        if requested & {"communication", own, transfer}:
            run[sent & node.coupled] = 0
        elif f"{transfer}.below_peak" in leaves:
            at_peak = fact.at_peak_ns
            known = sent & node.coupled & ~np.isnan(at_peak)
            run[known] = np.minimum(node.transfer_ns[known], at_peak[known].astype(np.int64))
        if f"{transfer}.no_peak" in leaves:
            run[sent & node.coupled & np.isnan(fact.at_peak_ns)] = 0
        if f"{own}.unseparated" in leaves:
            run[sent & ~node.coupled] = 0
    if (run >= 0).any():
        scenario.run_ns[rank_index] = run


def _remove_copies(scenario: Scenario, rank_index: int, node: RankNodes, leaves: set[str]) -> None:
    chosen = [CODES[c] for c in leaves if c.startswith("copy.")]
    if not chosen:
        return
    links = node.links
    hit = (links.work_class == COPY) & np.isin(copy_direction(links.events), chosen)
    if hit.any():
        scenario.scale(rank_index, np.where(hit, 0.0, 1.0))


def set_clock(
    scenario: Scenario,
    facts: list[CauseTimes],
    clock_hz: float | None,
    deviations: float = 0.0,
) -> tuple[int, int]:
    """The device's clock is another: t ∝ clock^(−s), s each kernel's sensitivity.

    Args:
        clock_hz: the clock; None for the reference clock of each kernel's peak.
        deviations: how many standard errors above its estimate every sensitivity is taken.

    Returns:
        Nanoseconds of kernels whose clock is known, and of all.
    """
    scenario.new_clock = True
    changed = concerned = 0
    for rank_index, fact in enumerate(facts):
        links = fact.node.links
        computing = links.work_class == COMPUTE
        concerned += int(links.events.dur_ns[computing].sum())
        factors = fact.factors
        if factors is None:
            continue
        wanted = factors.reference_hz if clock_hz is None else np.full(len(computing), clock_hz)
        off = deviations * factors.sensitivity_error if deviations else 0.0
        sensitivity = np.clip(factors.sensitivity + off, 0.0, 1.0)
        with np.errstate(invalid="ignore", divide="ignore"):
            factor = (factors.clocks.clock_hz / wanted) ** sensitivity
        known = computing & np.isfinite(factor) & factors.clocks.known & np.isfinite(wanted)
        changed += int(links.events.dur_ns[known].sum())
        scenario.scale(rank_index, np.where(known, factor, 1.0))
    return changed, concerned


@dataclass(frozen=True)
class Link:
    """A link as the run's own transfers show it: time = latency + bus bytes ÷ bandwidth.

    Attributes:
        latency_ns: least squares over the median of each size; 0 where one size tells nothing.
        bytes_per_s: of the largest transfers after the latency; None without known sizes.
        separable: whether sizes differ enough to tell latency from bandwidth.
    """

    latency_ns: float
    bytes_per_s: float | None
    separable: bool


def observed_link(facts: list[CauseTimes]) -> Link:
    """The link of the run's matched collectives.

    Where the link's peak is known, the latency leaves each size the time that its bytes need.
    """
    size, time, at_peak = [], [], []
    for fact in facts:
        rows = np.flatnonzero(fact.node.coupled & (fact.bus_bytes > 0))
        size.append(fact.bus_bytes[rows])
        time.append(fact.node.transfer_ns[rows])
        at_peak.append(np.nan_to_num(fact.at_peak_ns[rows]))
    sizes, times, ideal = (np.concatenate(of or [np.zeros(0)]) for of in (size, time, at_peak))
    if not len(sizes):
        return Link(0.0, None, separable=False)
    distinct, number = np.unique(sizes, return_inverse=True)
    middle, least = (
        np.array([np.median(of[number == i]) for i in range(len(distinct))])
        for of in (times, times - ideal)
    )
    if len(distinct) > 1 and distinct[-1] / distinct[0] >= _SPREAD:
        weight = np.sqrt(np.bincount(number))
        matrix = np.stack([np.ones(len(distinct)), distinct], axis=1)
        solution = np.linalg.lstsq(matrix * weight[:, None], middle * weight, rcond=None)[0]
        latency = float(np.clip(solution[0], 0.0, max(least.min(), 0.0)))
        transfer_ns = max(float(middle[-1]) - latency, 1.0)
        return Link(latency, float(distinct[-1]) / transfer_ns * 1e9, separable=True)
    return Link(0.0, float(sizes.sum() / max(times.sum(), 1)) * 1e9, separable=False)


@dataclass(frozen=True)
class LinkChange:
    """A change of the link between the ranks of a job.

    Attributes:
        link: as the job shows it.
        bandwidth_ratio: how many times as fast it becomes.
        latency_ns: its latency then; None for what it is.
    """

    link: Link
    bandwidth_ratio: float
    latency_ns: float | None


def set_link(
    scenario: Scenario,
    facts: list[CauseTimes],
    link: Link,
    bandwidth_ratio: float,
    latency_ns: float | None,
) -> None:
    """Scale the bandwidth of the link, and set its latency.

    What a transfer takes beyond the latency is its bytes' and shrinks with the bandwidth: a link
    that was not used fully stays so. One that was quicker than the latency keeps its lead.
    """
    wanted = link.latency_ns if latency_ns is None else latency_ns
    for rank_index, fact in enumerate(facts):
        node = fact.node
        requested_ns = scenario.run_ns.get(rank_index, np.int64(-1))
        transfer = np.where(requested_ns >= 0, requested_ns, node.transfer_ns)
        fixed = np.minimum(transfer, link.latency_ns)
        latency = fixed * (wanted / link.latency_ns) if link.latency_ns else wanted
        changed = np.where(transfer > 0, latency + (transfer - fixed) / bandwidth_ratio, 0.0)
        run = np.where(node.coupled, np.rint(changed), requested_ns)
        scenario.run_ns[rank_index] = run.astype(np.int64)


def _of_family(node: RankNodes, family_name: str) -> np.ndarray:
    """Mask of the device events of a family: their operator's, else their kernel's."""
    links = node.links
    op_codes, op_values = links.op_names
    codes, values = links.events.names
    of_op = np.array([*map(family, op_values), None])[op_codes]
    of_kernel = np.array([*kernel_families(values), None])[codes]
    families = np.where(np.isin(of_op, FAMILIES), of_op, of_kernel)
    families[links.work_class == COMMUNICATION] = "communication"
    families[links.work_class == COPY] = "copy"
    return np.asarray(families == family_name)


def make_faster(scenario: Scenario, facts: list[CauseTimes], what: str, times: float) -> int:
    """Divide the time of a family's kernels, or of those whose name matches, by a factor.

    Returns:
        Number of these device events.
    """
    count = 0
    for rank_index, fact in enumerate(facts):
        node = fact.node
        if what in FAMILIES:
            hit = _of_family(node, what)
        else:
            links = node.links
            search = re.compile(what).search
            hit = matching(*links.events.names, search) | matching(*links.op_names, search)
        count += int(hit.sum())
        scenario.scale(rank_index, np.where(hit, 1 / times, 1.0))
    return count


def remove_operator(scenario: Scenario, facts: list[CauseTimes], name: str) -> int:
    """An operator is not called: neither its kernels nor its time on the host are there.

    Args:
        name: of the operator, without ``aten::`` if one likes; or a regular expression of names.

    Returns:
        How many device events are gone.
    """
    count = 0
    pattern = re.compile(f"(?:aten::)?(?:{name})")
    for rank_index, fact in enumerate(facts):
        node = fact.node
        links = node.links
        host = links.host
        if not len(host):
            continue
        called = host.of("cpu_op", "annotation") & host.named(
            lambda n: n == name or pattern.fullmatch(n)
        )
        inside = np.append(host.nesting.nearest(called) >= 0, np.array([False]))
        row = np.where(links.launch_row >= 0, links.launch_row, links.op_row)
        gone = inside[row]
        count += int(gone.sum()) + int(called.sum())
        scenario.without_events(rank_index, gone)
        parts = node.program.parts
        left_out = inside[parts.span]
        # What lies between two such calls and is no operator is the loop that made them.
        between = np.zeros(len(left_out), dtype=bool)
        between[1:-1] = left_out[:-2] & left_out[2:]
        left_out |= between & np.isin(parts.cause, _BETWEEN)
        scenario.without_host(rank_index, left_out)
        program = node.program
        calls = (program.waits_for >= 0) | program.waits_for_all
        still = calls & inside[np.where(calls & (program.row >= 0), program.row, -1)]
        scenario.calm[rank_index] = still | scenario.calm.get(rank_index, False)
    return count


def set_pace(scenario: Scenario, ratio: float) -> None:
    """Work of the host that tracing slowed takes so much of its traced time."""
    for rank_index, node in enumerate(scenario.ranks):
        if not node.joined.host_only:
            slowed = np.isin(node.program.parts.cause, _SLOWED)
            scenario.part_scale[rank_index] = np.where(slowed, ratio, 1.0)


def launch_graphs(scenario: Scenario, facts: list[CauseTimes]) -> None:
    """Each step is one graph: the host's operators, calls and Python between them take no time.

    Data loading, synchronization, the allocator and garbage collection stay.
    """
    scenario.calls = True
    for rank_index, fact in enumerate(facts):
        scenario.without_host(rank_index, np.isin(fact.node.program.parts.cause, _OF_LAUNCHING))


def change_rank(
    scenario: Scenario,
    fact: CauseTimes,
    changes: Changes,
    link: LinkChange | None = None,
    deviations: float = 0.0,
) -> None:
    """Apply to one rank of a job the changes that the whole of it has data for.

    Args:
        scenario: of this rank alone.
        fact: of the rank.
        changes: what is changed.
        link: the change of the link, where that changes.
        deviations: how many standard errors off the sensitivities to the clock are taken.
    """
    facts = [fact]
    remove_causes(scenario, facts, changes.fix)
    if changes.of_clock:
        set_clock(scenario, facts, changes.clock_hz, deviations)
    if link is not None:
        set_link(scenario, facts, link.link, link.bandwidth_ratio, link.latency_ns)
    for what, times in changes.faster:
        make_faster(scenario, facts, what, times)
    for name in changes.without:
        remove_operator(scenario, facts, name)
    if changes.graphs:
        launch_graphs(scenario, facts)
    scenario.overlap = changes.overlap


def operator_names(facts: list[CauseTimes]) -> list[str]:
    """Names of the operators of the run."""
    operators: set[str] = set()
    for fact in facts:
        host = fact.node.links.host
        if len(host):
            codes, values = host.names
            used = np.unique(codes[host.of("cpu_op") & ~host.named(names.is_wrapper)])
            operators |= {values[i] for i in used}
    return sorted(operators)


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
        link_change: of the link; None where it stays.
        link_facts: of the ranks whose transfers show the link; None for those of ``facts``.
    """

    scenario: Scenario
    facts: list[CauseTimes]
    coupled_ratio: float | None
    spent: set[str]
    deviations: float = 0.0
    described: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    link_change: LinkChange | None = None
    link_facts: list[CauseTimes] | None = None

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
        if not UNCOUPLING.isdisjoint(causes) and not self.coupled_ratio:
            raise UsageError(
                "--fix straggler: no collective was seen on all ranks of its group; pass the "
                "traces of all ranks, and of a large run name those of a group with --ranks"
            )
        remove_causes(self.scenario, self.facts, causes)
        for cause in causes:
            self.described.append(f"without {fmt.inside(CAUSES[cause].label)} ({cause})")
            if cause not in self.spent:
                self.notes.append(f"{cause}: takes no time in this run")

    def clock(self, clock_hz: float | None) -> None:
        """The device's clock; None for that of each peak."""
        changed_ns, concerned_ns = set_clock(self.scenario, self.facts, clock_hz, self.deviations)
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
        link = observed_link(self.link_facts or self.facts)
        if link.bytes_per_s is None:
            raise UsageError(
                "--link: no collective of known size was seen on all ranks of its group"
            )
        links = [fact.node.joined.link for fact in self.facts]
        peaks = {None if one.ranks else one.bytes_per_s for one in links}
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
        set_link(self.scenario, self.facts, link, ratio, latency)
        self.link_change = LinkChange(link, ratio, latency)
        if ratio != 1.0:
            self.described.append(f"link bandwidth {fmt.factor(ratio)}")
        if latency is not None:
            before = fmt.duration(link.latency_ns)
            self.described.append(f"link latency {fmt.duration(latency)} (now {before})")

    def faster(self, what: str, times: float) -> None:
        """Divide the time of a family's kernels, or of those whose name matches, by a factor."""
        families = ", ".join(FAMILIES)
        try:
            count = make_faster(self.scenario, self.facts, what, times)
        except re.error as exc:
            raise UsageError(
                f"--faster {what!r}: neither a family ({families}) nor a regular expression ({exc})"
            ) from exc
        if not count:
            hint = _hint(what, [*FAMILIES, *operator_names(self.facts)])
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
            count = remove_operator(self.scenario, self.facts, name)
        except re.error as exc:
            raise UsageError(
                f"--without {name!r}: no operator and no regular expression ({exc})"
            ) from exc
        if not count:
            hint = _hint(name, operator_names(self.facts))
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
        launch_graphs(self.scenario, self.facts)
        self.described.append("each step launched as one graph")


def _hint(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ""
