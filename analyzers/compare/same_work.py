"""Do two runs do the same work? Asked before their times are compared."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc

from chopper.analyzers.compare.result import Check
from chopper.analyzers.compare.steps import events_of, ranks_without_steps
from chopper.analyzers.trace.columns import ints, strings

if TYPE_CHECKING:
    from collections.abc import Callable

    from chopper.analyzers.attributed import Attributed
    from chopper.analyzers.compare.result import Status
    from chopper.analyzers.compare.steps import Steps

    Pair = tuple[Attributed, Attributed]
    Sides = tuple[Steps, Steps]

FLOP_PASS_RATIO = 0.02
"""FLOP per step that differ by less count as the same."""
FLOP_WITHHOLD_RATIO = 0.1
"""FLOP per step that differ by more are another workload."""
_FLOP_KNOWN_RATIO = 0.95
"""Least share of the products' time whose FLOP must be known."""
_OPERATORS_PASS_RATIO = 0.98
_OPERATORS_WITHHOLD_RATIO = 0.5
_DTYPE_SHARE = 0.01
_SPEED_PASS_RATIO = 0.05
_SPEED_KNOWN_RATIO = 0.5
"""Least share of the computing time that kernels of the same name make up."""
_EMBEDDING = "aten::embedding"


def check(runs: Pair, sides: Sides) -> tuple[Check, ...]:
    """All checks, what withholds the verdict first, then what differs, then the rest."""
    flop = _flop(runs, sides)
    checks = [
        _world_size(runs),
        flop,
        _tokens(runs),
        _operators(runs, flop),
        _speed(runs, sides),
        _same(
            "device",
            "Devices",
            runs,
            _devices,
            "other hardware may be the whole difference",
            explains=True,
        ),
        _same("dtype", "Data types", runs, _dtypes, "arithmetic of the products, ≥ 1 % of FLOP"),
        _same("peak", "Peaks known", runs, _peaks, "only known peaks split computing further"),
        _same("torch", "PyTorch", runs, _torch, "as recorded by the run"),
        _same("recording", "Recorded", runs, _recorded, "what is recorded costs the host time"),
        _number(
            "ranks",
            "Ranks in the run",
            len(runs[0].ranks),
            len(runs[1].ranks),
            note="times are means over the ranks that were recorded",
        ),
        _number(
            "steps",
            "Steps compared",
            len(sides[0].numbers),
            len(sides[1].numbers),
            note="times are per step; fewer steps make wider intervals",
        ),
    ]
    order = {"differs": 0, "unknown": 1, "pass": 2}
    return tuple(sorted(checks, key=lambda c: (not c.withholds, order[c.status])))


def device_of(run: Attributed, rank: int) -> str | None:
    """Return the name of a rank's device, or of the host's CPU; None for unknown."""
    summary = next(r for r in run.ranks if r.rank == rank)
    if summary.device is not None:
        return summary.device
    trace = run.joined.get(rank)
    if trace is None or not trace.device_event.num_rows:
        return None
    if trace.device_event["device_id"][0].as_py() < 0:
        return run.recording.part(rank).environment.get("cpu", "CPU")
    return None


def _status(a: object, b: object, *, same: bool) -> Status:
    return "unknown" if a is None or b is None else "pass" if same else "differs"


def _number(
    id: str, label: str, a: int | None, b: int | None, *, withholds: bool = False, note: str
) -> Check:
    status = _status(a, b, same=a == b)
    return Check(id, label, status, a, b, "count", withholds and status == "differs", note)


def _same(
    id: str,
    label: str,
    runs: Pair,
    found: Callable[[Attributed], str | None],
    note: str,
    *,
    explains: bool = False,
) -> Check:
    a, b = found(runs[0]), found(runs[1])
    status = _status(a, b, same=a == b)
    return Check(id, label, status, a, b, "", False, note, explains and status == "differs")


def _world_size(runs: Pair) -> Check:
    sizes = [
        max((p.world_size for p in r.recording.manifest.ranks if p.world_size), default=None)
        or (len(r.ranks) if len(r.ranks) > 1 else None)
        for r in runs
    ]
    note = "a rank's share of the work follows from it"
    return _number("world_size", "World size", sizes[0], sizes[1], withholds=True, note=note)


def _devices(run: Attributed) -> str | None:
    names = [device_of(run, r.rank) for r in run.ranks]
    known = sorted({n for n in names if n})
    return ", ".join(known) if known and None not in names else None


def _dtypes(run: Attributed) -> str | None:
    flop: dict[str, float] = {}
    for work in run.work.values():
        rows = np.flatnonzero(work.math & (work.dtype >= 0) & ~np.isnan(work.work_flop))
        sums = np.bincount(work.dtype[rows], work.work_flop[rows], minlength=len(work.dtypes))
        for name, value in zip(work.dtypes, sums.tolist(), strict=True):
            flop[name] = flop.get(name, 0.0) + value
    total = sum(flop.values())
    return ", ".join(sorted(n for n, v in flop.items() if v >= _DTYPE_SHARE * total > 0)) or None


def _peaks(run: Attributed) -> str | None:
    if not run.ranks:
        return None
    return "yes" if all(r.peak_source for r in run.ranks) else "no"


def _torch(run: Attributed) -> str | None:
    versions = {p.environment.get("torch") for p in run.recording.manifest.ranks}
    known = sorted(v for v in versions if v)
    return ", ".join(known) if known and None not in versions else None


def _recorded(run: Attributed) -> str | None:
    words: dict[str, None] = {}
    for rank, trace in run.joined.items():
        host = trace.host_span
        if not host.num_rows:
            continue
        codes, categories = strings(host, "category")
        present = {categories[i] for i in np.unique(codes) if i >= 0}
        words["operators"] = None
        if host["input_dims"].null_count < host.num_rows:
            words["shapes"] = None
        if "python" in present:
            words["Python stacks"] = None
        if run.recording.table(rank, "memory_event").num_rows:
            words["allocations"] = None
    return ", ".join(words) or None


def _flop(runs: Pair, sides: Sides) -> Check:
    found = [_flop_per_step(r, s) for r, s in zip(runs, sides, strict=True)]
    (a, why_a), (b, why_b) = found
    note = "model math per step of one rank, recomputation left out"
    withholds = False
    same = False
    if a is not None and b is not None and a > 0:
        ratio = b / a - 1
        same = abs(ratio) <= FLOP_PASS_RATIO
        withholds = abs(ratio) > FLOP_WITHHOLD_RATIO
        if not same:
            note += f"; B does {b / a:.3g} times A's"
    else:
        reasons = [f"{n}: {why}" for n, why in (("A", why_a), ("B", why_b)) if why]
        note += "; " + "; ".join(reasons)
    return Check("flop", "FLOP per step", _status(a, b, same=same), a, b, "flop", withholds, note)


def _flop_per_step(run: Attributed, steps: Steps) -> tuple[int | None, str]:
    """(FLOP of model math per rank window, or None; why not)."""
    events, step = events_of(run, steps)
    phase, phases = events.phase
    recompute = phases.index("recompute") if "recompute" in phases else -2
    rows = np.flatnonzero((step >= 0) & events.math & (phase != recompute))
    if not len(rows):
        return None, "no matrix product, convolution or attention was recognised"
    flop, dur = events.work_flop[rows], events.dur_ns[rows]
    known = ~np.isnan(flop)
    share = float(dur[known].sum() / max(dur.sum(), 1))
    if share < _FLOP_KNOWN_RATIO:
        return None, f"the shapes of {1 - share:.0%} of the products' time are not known"
    return round(float(flop[known].sum()) / max(int(steps.windows.sum()), 1)), ""


def _tokens(runs: Pair) -> Check:
    values = [_tokens_per_step(r) for r in runs]
    a, b = values
    same = a is not None and b is not None and abs(b - a) <= FLOP_PASS_RATIO * a
    status = _status(a, b, same=same)
    return Check(
        "tokens",
        "Tokens per step",
        status,
        a,
        b,
        "count",
        status == "differs",
        "indices looked up in the largest embedding, per step of one rank",
    )


def _tokens_per_step(run: Attributed) -> int | None:
    """Indices that a traced step of one rank looks up in its largest table; None without one."""
    counted: dict[int, int] = {}
    windows = 0
    for rank in _ranks(run):
        host = run.joined[rank].host_span
        codes, names = strings(host, "name")
        inside, steps = _inside_steps(run, rank)
        windows += steps
        if _EMBEDDING not in names:
            continue
        dims, texts = strings(host, "input_dims")
        wanted = inside & (codes == names.index(_EMBEDDING))
        kinds, counts = np.unique(dims[wanted], return_counts=True)
        for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
            shape = _lookup(texts[kind]) if kind >= 0 else None
            if shape is not None:
                counted[shape[0]] = counted.get(shape[0], 0) + count * shape[1]
    if not counted:
        return None
    return round(counted[max(counted)] / max(windows, 1))


def _ranks(run: Attributed) -> list[int]:
    """Ranks whose steps are compared."""
    return [r for r in run.joined if r not in ranks_without_steps(run)]


def _inside_steps(run: Attributed, rank: int) -> tuple[np.ndarray, int]:
    """(mask of the host spans that begin in the rank's compared steps, number of these)."""
    host = run.joined[rank].host_span
    step = run.joined[rank].step
    step = step.filter(step["traced"]) if step.num_rows else step
    if not step.num_rows:
        return np.ones(host.num_rows, dtype=bool), 1
    start = ints(host, "start_ns")
    if run.whole is not run:
        step = step.filter(pc.is_in(step["number"], value_set=run.windows["number"]))
        at = np.searchsorted(ints(step, "start_ns"), start, side="right") - 1
        ends = np.append(ints(step, "end_ns"), np.iinfo(np.int64).min)
        return start < ends[at], step.num_rows
    inside: np.ndarray = (start >= ints(step, "start_ns")[0]) & (start < ints(step, "end_ns")[-1])
    return inside, step.num_rows


def _lookup(input_dims: str) -> tuple[int, int] | None:
    """(rows of the table, indices looked up) of one embedding call."""
    try:
        table, indices = json.loads(input_dims)[:2]
        return int(table[0]), int(np.prod(indices, dtype=np.int64))
    except (ValueError, TypeError, IndexError):
        return None


def _operators(runs: Pair, flop: Check) -> Check:
    counts = [_operator_counts(r) for r in runs]
    a, b = counts
    note = "operators by name and calls per step: shared calls over all calls"
    similarity = None
    if a and b:
        names = {*a, *b}
        shared = sum(min(a.get(n, 0.0), b.get(n, 0.0)) for n in names)
        similarity = shared / sum(max(a.get(n, 0.0), b.get(n, 0.0)) for n in names)
        apart = sorted(names, key=lambda n: (-abs(a.get(n, 0.0) - b.get(n, 0.0)), n))[:3]
        if similarity < _OPERATORS_PASS_RATIO:
            said = (f"{n} {a.get(n, 0.0):.4g} and {b.get(n, 0.0):.4g}" for n in apart)
            note += f" ({similarity:.0%}); {', '.join(said)}"
    same = similarity is not None and similarity >= _OPERATORS_PASS_RATIO
    totals = [round(sum(c.values())) if c else None for c in counts]
    withholds = (
        similarity is not None
        and similarity < _OPERATORS_WITHHOLD_RATIO
        and flop.status == "unknown"
    )
    status = _status(totals[0], totals[1], same=same)
    return Check(
        "operators",
        "Operator calls per step",
        status,
        totals[0],
        totals[1],
        "count",
        withholds,
        note,
    )


def _operator_counts(run: Attributed) -> dict[str, float]:
    """Calls of each operator per traced step of one rank, by the host's own steps."""
    found: dict[str, float] = {}
    windows = 0
    for rank in _ranks(run):
        host = run.joined[rank].host_span
        codes, names = strings(host, "name")
        kinds, categories = strings(host, "category")
        if "cpu_op" not in categories:
            continue
        inside, steps = _inside_steps(run, rank)
        inside = inside & (kinds == categories.index("cpu_op"))
        windows += steps
        counts = np.bincount(codes[inside], minlength=len(names))
        for i in np.flatnonzero(counts).tolist():
            if not names[i].startswith("chopper::"):
                found[names[i]] = found.get(names[i], 0.0) + float(counts[i])
    return {name: count / windows for name, count in found.items()}


def _speed(runs: Pair, sides: Sides) -> Check:
    """Compare the times of the same kernels: if all differ, the machine was another."""
    a, b = (_durations(r, s) for r, s in zip(runs, sides, strict=True))
    shared = [n for n in a if n in b]
    weight = np.array([min(a[n][0], b[n][0]) for n in shared], dtype=np.float64)
    known = sum(t for t, _ in a.values()), sum(t for t, _ in b.values())
    note = "mean duration of computing kernels by name, B over A, weighted by time"
    if not shared or not all(known) or weight.sum() < _SPEED_KNOWN_RATIO * min(known):
        return Check(
            "speed", "Time of the same kernels", "unknown", None, None, "ratio", False, note
        )
    ratio = np.array([b[n][1] / max(a[n][1], 1e-9) for n in shared])
    order = np.argsort(ratio)
    place = np.cumsum(weight[order]) / weight.sum()
    at = np.minimum(np.searchsorted(place, [0.25, 0.5, 0.75]), len(order) - 1)
    low, middle, high = ratio[order][at].tolist()
    same = abs(middle - 1) <= _SPEED_PASS_RATIO
    # Three quarters of the time at least half as far from A's as the median.
    nearest = low if middle > 1 else high
    alike = not same and (nearest - 1) * (middle - 1) >= 0.5 * (middle - 1) ** 2
    if not same:
        note += f" (median {middle:.3g}, quartiles {low:.3g} and {high:.3g})"
        note += (
            "; most of them alike: rather clocks, power or neighbours than the program"
            if alike
            else ""
        )
    status = _status(1.0, middle, same=same)
    return Check(
        "speed", "Time of the same kernels", status, 1.0, middle, "ratio", False, note, alike
    )


def _durations(run: Attributed, steps: Steps) -> dict[str, tuple[float, float]]:
    """Computing kernels by name: (total time, mean duration)."""
    events, step = events_of(run, steps)
    classes, names = events.work_class
    codes, kernels = events.kernel
    if "compute" not in names:
        return {}
    mine = (step >= 0) & (codes >= 0) & (classes == names.index("compute"))
    time = np.bincount(codes[mine], weights=events.dur_ns[mine], minlength=len(kernels))
    count = np.bincount(codes[mine], minlength=len(kernels))
    return {
        kernels[i]: (float(time[i]), float(time[i] / count[i]))
        for i in np.flatnonzero(time > 0).tolist()
    }
