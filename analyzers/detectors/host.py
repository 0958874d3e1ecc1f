"""Patterns of the host: what it waits for, and what the device waits for while it works."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec
import numpy as np

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.causes.idle import Waiting
from chopper.analyzers.detectors import Sighting, limits_of, spent_in
from chopper.analyzers.events.device import Events
from chopper.analyzers.events.steps import spans_in_steps
from chopper.analyzers.replay.whatif_options import Changes
from chopper.analyzers.trace import names
from chopper.analyzers.trace.columns import ints, strings, union
from chopper.analyzers.trace.join import Links
from chopper.analyzers.trace.names import is_data_loading, is_program_frame, is_synchronizing_call
from chopper.analyzers.trace.tables import HostSpans
from chopper.wording import duration

_REMOVED = ("idle.call", "idle.preparation.dispatch", "idle.preparation.runtime")
_LAUNCHING = (*_REMOVED, "idle.launch_latency")
"""Launches that wait in a graph on the device have no latency: the replay shows it."""


def launch_bound(run: Attribution, events: Events) -> Iterator[Sighting]:
    """PIECE -> at most one sighting."""
    if any(joined.host_only for joined in run.joined.values()):
        return
    limits = limits_of("launch_bound")
    if len(events) < max(limits["fewest"] * run.windows.num_rows, 1):
        return
    time_ns, rows = spent_in(run, _LAUNCHING)
    if time_ns < limits["least_ratio"] * run.observed_ns:
        return
    yield Sighting(
        events=rows,
        changes=Changes(fix=_REMOVED),
        evidence={
            "kernels": len(events),
            "median_ns": int(np.median(events.dur_ns)),
            "idle_ratio": time_ns / run.observed_ns,
        },
    )


_STEPPING = "Optimizer.step#"


def optimizer_loops(
    run: Attribution, events: Events, links: Mapping[int, Links]
) -> Iterator[Sighting]:
    """HOST_SPAN, EVENT_LINK -> one sighting for each kind of optimizer."""
    fewest = limits_of("optimizer_loops")["fewest"]
    by_optimizer: dict[str, dict[str, dict[int, np.ndarray]]] = {}
    counts: dict[str, np.ndarray] = {}
    for rank, link in links.items():
        host = link.host
        if run.joined[rank].host_only or not len(host):
            continue
        stepping = host.named(lambda name: name.startswith(_STEPPING)) & host.of("annotation")
        outer = host.nesting.topmost(stepping)
        rows = np.sort(events.row[events.rank == rank])
        rows = rows[link.has_launch[rows]]
        inside = outer[link.launch_row[rows]]
        codes, values = host.names
        ops, op_values = link.op_names
        one = np.array([_on_one(v) for v in op_values] + [False])[ops]
        for code in np.unique(codes[outer[stepping]]).tolist():
            name = values[code].removeprefix(_STEPPING).partition(".")[0]
            mine = rows[(inside >= 0) & (codes[np.maximum(inside, 0)] == code)]
            single = mine[one[mine]]
            steps = len(np.unique(outer[link.launch_row[mine]]))
            if len(single) <= max(fewest * steps, len(mine) / 2):
                continue
            parts = by_optimizer.setdefault(name, {"events": {}, "host": {}, "calls": {}})
            parts["events"][rank] = mine
            parts["host"][rank] = (outer >= 0) & (codes[np.maximum(outer, 0)] == code)
            parts["calls"][rank] = np.unique(outer[link.launch_row[mine]])
            counts[name] = counts.get(name, 0) + np.array([len(mine), steps, len(single)])
    for name, parts in by_optimizer.items():
        evidence = dict(zip(("kernels", "steps", "tensors"), counts[name].tolist(), strict=True))
        yield Sighting(
            events=parts["events"],
            calls=parts["calls"],
            host_gone=parts["host"],
            evidence={"optimizer": name, **evidence},
        )


def _on_one(op: str) -> bool:
    """Tell whether an operator is PyTorch's and takes no lists of tensors.

    What others launch (apex, a compiled step) may be for many tensors, and is not counted.
    """
    return op.startswith("aten::") and not op.startswith(
        ("aten::_foreach", "aten::_fused", "aten::_amp_foreach")
    )


_MOST_READS = 3


def blocking_reads(
    events: Events, links: Mapping[int, Links], waiting: Mapping[int, Waiting]
) -> Iterator[Sighting]:
    """HOST_SPAN, DEVICE_EVENT -> a sighting for each reading operator, most waiting first."""
    calls: dict[str, dict[int, np.ndarray]] = {}
    copies: dict[str, dict[int, np.ndarray]] = {}
    waited: dict[str, int] = {}
    for rank, calls_of in waiting.items():
        link = links[rank]
        codes, values = link.host.names
        code = np.where(calls_of.to_device, -1, codes[calls_of.operator])
        mine = np.sort(events.row[events.rank == rank])
        for one in np.unique(code[code >= 0]).tolist():
            op, chosen = values[one], code == one
            rows = calls_of.rows[chosen]
            calls.setdefault(op, {})[rank] = rows
            copies.setdefault(op, {})[rank] = mine[np.isin(link.launch_row[mine], rows)]
            waited[op] = waited.get(op, 0) + int(link.host.dur_ns[rows].sum())
    for op in sorted(calls, key=lambda op: -waited[op])[:_MOST_READS]:
        evidence = {"op": op, "calls": sum(map(len, calls[op].values())), "waited_ns": waited[op]}
        yield Sighting(
            events=copies[op],
            calls=calls[op],
            calm=calls[op],
            evidence=evidence,
        )


def pageable_copies(
    events: Events, links: Mapping[int, Links], waiting: Mapping[int, Waiting]
) -> Iterator[Sighting]:
    """DEVICE_EVENT, HOST_SPAN -> at most one sighting."""
    copies, calls = {}, {}
    pageable = waited_ns = 0
    for rank, calls_of in waiting.items():
        link = links[rank]
        rows = calls_of.rows[calls_of.to_device]
        mine = np.sort(events.row[events.rank == rank])
        mine = mine[link.events.named(names.is_copy_to_device)[mine] & link.has_launch[mine]]
        from_pageable = link.events.named(lambda name: "Pageable" in name)[mine]
        chosen = mine[from_pageable | np.isin(link.launch_row[mine], rows)]
        if not len(chosen):
            continue
        copies[rank], calls[rank] = chosen, rows
        pageable += int(from_pageable.sum())
        waited_ns += int(link.host.dur_ns[rows].sum())
    if copies:
        yield Sighting(
            events=copies,
            calls=calls,
            calm=calls,
            evidence={
                "copies": sum(map(len, copies.values())),
                "pageable": pageable,
                "waited_ns": waited_ns,
            },
        )


_CALLS = re.compile(r"(?:cuda|hip)(Malloc|Free)$")


def allocator_retries(run: Attribution, links: Mapping[int, Links]) -> Iterator[Sighting]:
    """HOST_SPAN -> at most one sighting."""
    calls, gone, about = {}, {}, {}
    counts = {"Malloc": 0, "Free": 0}
    host_ns = 0
    for rank, link in links.items():
        host, windows = link.host, run.joined[rank].windows
        if not len(host):
            continue
        named = host.where(lambda c, name: c in ("runtime", "driver") and _CALLS.match(name))
        inside = named & spans_in_steps(run, rank)[0]
        if windows.numbers[0] < 0:
            bounds = windows.bounds_ns
            inside &= (host.start_ns >= bounds[0]) & (host.end_ns <= bounds[-1])
        rows = np.flatnonzero(inside)
        if not len(rows):
            continue
        calls[rank], gone[rank], about[rank] = rows, inside, np.zeros(0, np.int64)
        host_ns += int(host.dur_ns[rows].sum())
        codes, values = host.names
        for code in codes[rows].tolist():
            kind = _CALLS.match(values[code])
            counts[kind[1] if kind else "Free"] += 1
    if calls:
        yield Sighting(
            events=about,
            calls=calls,
            calm=calls,
            host_gone=gone,
            evidence={
                "allocations": counts["Malloc"],
                "frees": counts["Free"],
                "host_ns": host_ns,
            },
        )


_FOR_DATA = "idle.preparation.data"
_LOADERS = {
    "MultiProcessing": "in its worker processes, which a trace does not show",
    "SingleProcess": "in the training process itself (num_workers=0)",
}
_RAISE = "Raise num_workers, set pin_memory=True and persistent_workers=True"
_AHEAD = (
    "Prepare batches ahead of the step: in a DataLoader with num_workers, or in a thread or "
    "process that keeps several ready"
)
_NO_STACKS = "; Python stacks (with_stack=True) would name the function"


def data_loading(run: Attribution, links: Mapping[int, Links]) -> Iterator[Sighting]:
    """PIECE, HOST_SPAN -> at most one sighting."""
    stall_ns, rows = spent_in(run, (_FOR_DATA,))
    if not stall_ns:
        return
    spent: Counter[str] = Counter()
    loaders: set[str] = set()
    loading_ns = 0
    has_stacks = False
    for rank, link in links.items():
        host = link.host
        if not len(host):
            continue
        loading = host.named(is_data_loading) & ~host.of("python")
        loading &= host.nesting.topmost(loading) == np.arange(len(host))
        loading &= spans_in_steps(run, rank)[0]
        codes, values = host.names
        names = (values[code] for code in np.unique(codes[loading]).tolist())
        loaders.update(name for name in names if name.startswith("enumerate("))
        loading_ns += int(host.dur_ns[loading].sum())
        has_stacks |= bool((host.of("python") & host.nesting.within(loading)).any())
        spent.update(_spent(host, loading, by_library=not loaders))
    function, function_ns = max(spent.items(), key=lambda item: item[1], default=("", 0))
    if 2 * function_ns > loading_ns:
        where = f"most of it in {function}"
    else:
        function = ""
        kind = next((kind for kind in _LOADERS if kind in str(loaders)), None)
        where = "in code that was not recorded" if kind is None else _LOADERS[kind]
        where += _NO_STACKS if kind == "SingleProcess" and not has_stacks else ""
    yield Sighting(
        events={rank: row[:0] for rank, row in rows.items()},
        changes=Changes(fix=(_FOR_DATA,)),
        phase="data",
        line=function if is_program_frame(function) else None,
        evidence={
            "stall_ns": stall_ns // max(run.windows.num_rows, 1),
            "function": function or None,
            "where": where,
            "ahead": _RAISE if loaders else _AHEAD,
        },
    )


def _spent(host: HostSpans, loading: np.ndarray, *, by_library: bool) -> Counter[str]:
    """Return the time in a loader by the program's function, else by the outermost operator.

    What libraries do is the time of the program's function that called them, or of
    their own ``by_library``.
    """
    nesting = host.nesting
    inside = nesting.within(loading)
    child = np.flatnonzero(inside & (nesting.parent >= 0))
    nested_ns = np.bincount(nesting.parent[child], host.dur_ns[child], minlength=len(host))
    frames = nesting.nearest(inside & host.of("python") & host.named(is_program_frame))
    libraries = nesting.topmost(inside & host.of("python") & by_library)
    operators = nesting.topmost(inside & ~loading & host.of("cpu_op"))
    owner = np.where(frames >= 0, frames, np.where(libraries >= 0, libraries, operators))
    known = np.flatnonzero(inside & (owner >= 0))
    codes, values = host.names
    own_ns = (host.dur_ns - nested_ns)[known]
    time_ns = np.bincount(codes[owner[known]], own_ns, minlength=len(values)).tolist()
    return Counter({name: int(t) for name, t in zip(values, time_ns, strict=True) if t > 0})


_FEWEST_ALIKE = 3
_DRIVER = re.compile(r"cuda|cu[A-Z]|hip|hsa_|ze[A-Z]")


class Initialization(msgspec.Struct, frozen=True):
    """Calls that initialize, of all ranks.

    Attributes:
        rows: rank → rows of `host_span`.
        idle_ns: leaf cause → time of the device's gaps during the calls.
        name: of the longest call.
        longest_ns, host_ns: its duration; that of all.
    """

    rows: dict[int, np.ndarray]
    idle_ns: dict[str, int]
    name: str
    longest_ns: int
    host_ns: int

    @property
    def description(self) -> str:
        """The calls in words: ``one cudaFree call of 6.01 s``."""
        count, longest = sum(map(len, self.rows.values())), duration(self.longest_ns)
        if count == 1:
            return f"one {self.name} call of {longest}"
        return f"{count} calls, the longest {self.name} of {longest}"


def initialization_of(run: Attribution, links: Mapping[int, Links]) -> Initialization | None:
    """Find the calls that initialize; None if there are none. HOST_SPAN, GAP -> Initialization."""
    run, limits = run.detail, limits_of("initialization")
    rows_of: dict[int, np.ndarray] = {}
    idle_ns: dict[str, int] = {}
    name, longest_ns, host_ns = "", 0, 0
    for rank, link in links.items():
        host = link.host
        mine = run.windows.filter(ints(run.windows, "rank") == rank)
        start, end = ints(mine, "start_ns"), ints(mine, "end_ns")
        calls = host.of("runtime", "driver") & host.named(_sets_up)
        candidates = np.flatnonzero(
            calls & (host.dur_ns > limits["least_ratio"] * (end - start).sum())
        )
        candidates = candidates[
            union(start, end).within(host.start_ns[candidates], host.ends(candidates)) > 0
        ]
        codes, names = host.names
        alike = [calls & (codes == codes[row]) for row in candidates]
        usual = (np.median(host.dur_ns[a if a.sum() >= _FEWEST_ALIKE else calls]) for a in alike)
        is_long = host.dur_ns[candidates] > limits["factor"] * np.array([*usual])
        once = [
            not _recurs(link, row, same)
            for row, same in zip(candidates.tolist(), alike, strict=True)
        ]
        rows = candidates[is_long & np.array(once, dtype=bool)]
        if not len(rows):
            continue
        rows_of[rank] = rows
        host_ns += int(host.dur_ns[rows].sum())
        at = rows[host.dur_ns[rows].argmax()]
        if host.dur_ns[at] > longest_ns:
            name, longest_ns = names[codes[at]], int(host.dur_ns[at])
        gaps = run.gaps.filter(ints(run.gaps, "rank") == rank)
        during = union(host.start_ns[rows], host.ends(rows)).within(
            ints(gaps, "start_ns"), ints(gaps, "end_ns")
        )
        cause, causes = strings(gaps, "cause")
        for code in np.unique(cause[during > 0]).tolist():
            time_ns = int(during[cause == code].sum())
            idle_ns[causes[code]] = idle_ns.get(causes[code], 0) + time_ns
    return Initialization(rows_of, idle_ns, name, longest_ns, host_ns) if rows_of else None


def _sets_up(name: str) -> bool:
    """Return whether a span is a call of the driver that does not wait for the device."""
    return _DRIVER.match(name) is not None and not is_synchronizing_call(name)


def _recurs(links: Links, row: int, alike: np.ndarray) -> bool:
    """Return whether calls of this length recur after the first two steps."""
    host, start_ns, limits = links.host, links.steps.start_ns, limits_of("initialization")
    long = host.start_ns[alike & (host.dur_ns >= limits["alike_ratio"] * host.dur_ns[row])]
    step = np.maximum(np.searchsorted(start_ns, long, side="right") - 1, 0)
    return bool(step.max() > step.min() and (len(start_ns) < limits["enough"] or step.max() > 1))


def initialization(run: Attribution, links: Mapping[int, Links]) -> Iterator[Sighting]:
    """HOST_SPAN, GAP -> at most one sighting."""
    slow_start = initialization_of(run, links)
    if slow_start is None:
        return
    yield Sighting(
        events={rank: np.zeros(0, np.int64) for rank in slow_start.rows},
        calls=slow_start.rows,
        saved_ns=sum(slow_start.idle_ns.values()) // len(run.joined),
        evidence={
            "what": slow_start.description,
            "name": slow_start.name,
            "longest_ns": slow_start.longest_ns,
            "calls": sum(map(len, slow_start.rows.values())),
            "host_ns": slow_start.host_ns,
        },
    )


_PHASE_REMEDIES = {
    "evaluation": "Evaluate less often or on fewer samples, in larger batches under "
    "torch.inference_mode(), or in a job of its own.",
    "checkpoint": "Save less often, or while the training goes on "
    "(torch.distributed.checkpoint.async_save, a copy to the host and a thread that writes it).",
}
_RUN_LESS = "Run it less often, or beside the training."


def loop_phases(run: Attribution) -> Iterator[Sighting]:
    """STEP, PROGRAM_PHASE -> a sighting for each phase."""
    step, least_ratio = run.step_time(), limits_of("loop_phases")["least_ratio"]
    for phase, time_ns in step.loop_phases_ns.items():
        if time_ns > least_ratio * step.loop_ns:
            yield Sighting(
                events={},
                phase=phase,
                saved_ns=time_ns,
                of="loop",
                evidence={
                    "phase": phase.capitalize(),
                    "share_ratio": time_ns / step.loop_ns,
                    "total_ns": time_ns,
                    "loop_ns": step.loop_ns,
                    "remedy": _PHASE_REMEDIES.get(phase, _RUN_LESS),
                },
            )
