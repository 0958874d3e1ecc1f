"""Patterns of kernels: those that could be one, take a quicker path, or not run at all."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.detectors import Sighting, declared, limits_of, pieces_in, spent_in
from chopper.analyzers.detectors.remedies import remedy
from chopper.analyzers.events.device import Events, arguments
from chopper.analyzers.replay.whatif_options import Changes
from chopper.analyzers.trace.columns import ints, matching
from chopper.analyzers.trace.join import Links
from chopper.analyzers.views.memory import memory
from chopper.analyzers.views.snapshots import determinism_advice
from chopper.causes import CAUSES
from chopper.hardware.ceilings import device_of

_ENDS_FUSION = re.compile(
    r"aten::(_foreach_|_fused_|_amp_foreach|(fill_|zero_|copy_)$)"
    r"|Torch-Compiled|CompiledFunction|## Call"
)
_SHAPE = re.compile(r"\[([\d,\s]+)\]")
_MOVING = ("compute.vector.roofline", "compute.vector.excess", "compute.vector.no_bytes")


def fusible_kernels(run: Attribution, events: Events) -> Iterator[Sighting]:
    """PIECE, DEVICE_EVENT -> at most one sighting."""
    yield from _fused("fusible_kernels", run, events, _MOVING, _ENDS_FUSION)


def _fused(
    name: str, run: Attribution, events: Events, causes: tuple[str, ...], alone: re.Pattern[str]
) -> Iterator[Sighting]:
    """See the kernels of some causes that follow each other on tensors of one shape.

    Args:
        name: of the detector.
        run: the attributed run.
        events: its device events.
        causes: leaf causes of the kernels' time.
        alone: operators that end a sequence.
    """
    pieces = pieces_in(run, causes)
    rank_of, row_of = ints(pieces, "rank"), ints(pieces, "event_row")
    run_ns: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    kernels = chains = time_ns = 0
    for rank in np.unique(rank_of).tolist():
        mine = np.flatnonzero(events.rank == rank)
        keys = (events.device_id[mine], events.stream_id[mine])
        mine = mine[np.lexsort((events.start_ns[mine], *keys))]
        moves = np.isin(events.row[mine], row_of[rank_of == rank])
        moves &= ~matching(*events.op, lambda op: bool(alone.match(op)))[mine]
        shape, tensors = _shapes(run, events, mine)
        moves &= shape > -2
        linked = moves[1:] & moves[:-1]
        linked &= (shape[1:] == shape[:-1]) | (shape[1:] < 0) | (shape[:-1] < 0)
        for key in (events.device_id, events.stream_id, events.phase[0], events.step):
            linked &= key[mine][1:] == key[mine][:-1]
        # What one kernel writes and the next one reads stays in registers.
        tensors_left = tensors - np.append(False, linked) - np.append(linked, False)
        inside = tensors_left < tensors
        if inside.any():
            left_ns = events.dur_ns[mine] * tensors_left // tensors
            order = np.flatnonzero(inside)[np.argsort(events.row[mine[inside]])]
            run_ns[rank] = (events.row[mine[order]], left_ns[order])
        kernels += int(inside.sum())
        chains += int((inside & ~np.append(False, linked)).sum())
        chained = (rank_of == rank) & np.isin(row_of, events.row[mine[inside]])
        time_ns += int(ints(pieces, "time_ns")[chained].sum())
    if run_ns and time_ns >= limits_of(name)["least_ratio"] * run.observed_ns:
        yield Sighting(
            events={rank: rows for rank, (rows, _) in run_ns.items()},
            run_ns=run_ns,
            evidence={
                "kernels": kernels,
                "chains": chains,
                "share_ratio": time_ns / run.observed_ns,
            },
        )


def _shapes(run: Attribution, events: Events, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what each event's operator reads and writes.

    Returns:
        A number for the shape of its largest tensor, -1 where none was recorded, -2 for numbers
        alone; how many tensors of that shape it reads and writes, three if none was recorded.
    """
    codes, values = arguments(run, events, rows, "input_dims")
    parsed = [[tuple(map(int, shape.split(","))) for shape in _SHAPE.findall(v)] for v in values]
    largest = [max(tensors, key=math.prod, default=()) for tensors in parsed]
    number = {shape: i for i, shape in enumerate(dict.fromkeys(filter(None, largest)))}
    shapes = [
        number.get(one, -2 if value else -1) for one, value in zip(largest, values, strict=True)
    ]
    counts = [ts.count(one) + 1 if ts else 3 for ts, one in zip(parsed, largest, strict=True)]
    return np.array([*shapes, -1])[codes], np.array([*counts, 3])[codes]


_ENDS_OPTIMIZER = re.compile(r"aten::(_foreach_|_fused_)")


def unfused_optimizer(run: Attribution, events: Events) -> Iterator[Sighting]:
    """PIECE, DEVICE_EVENT -> at most one sighting."""
    yield from _fused("unfused_optimizer", run, events, ("compute.optimizer",), _ENDS_OPTIMIZER)


_PRODUCTS = frozenset({"aten::bmm", "aten::baddbmm", "aten::matmul"})
_SOFTMAX = frozenset({"aten::_softmax", "aten::_safe_softmax", "aten::_masked_softmax"})
_BETWEEN = 8
"""Kernels between a product and the softmax, at most."""


def unfused_attention(events: Events, links: Mapping[int, Links]) -> Iterator[Sighting]:
    """DEVICE_EVENT, HOST_SPAN -> at most one sighting: all forward calls of the run."""
    gone, about, largest, calls = {}, {}, (0, ""), 0
    for rank, link in links.items():
        rows = np.sort(events.row[events.rank == rank])
        between, around, most = _attention(link, rows)
        if between:
            gone[rank], about[rank] = np.unique(between), np.unique([*between, *around])
            calls += len(around) // 2
            largest = max(largest, most)
    if gone:
        kernels = sum(map(len, gone.values()))
        evidence = {"calls": calls, "kernels": kernels, "dims": largest[1]}
        yield Sighting(events=about, gone=gone, evidence=evidence)


def _attention(links: Links, rows: np.ndarray) -> tuple[list[int], list[int], tuple[int, str]]:
    """Return the events between products, the products, and the largest scores of one rank."""
    between: list[int] = []
    around: list[int] = []
    largest = (0, "")
    if not len(links.host):
        return between, around, largest
    codes, values = links.op_names
    dims_of, texts = links.host.input_dims
    stream = links.events.stream_key
    softmax = np.array([name in _SOFTMAX for name in values] + [False])
    if not softmax.any():
        return between, around, largest
    for lane in np.unique(stream[rows]):
        mine = rows[(stream[rows] == lane) & (links.op_row[rows] >= 0)]
        op, shapes = codes[mine], dims_of[links.op_row[mine]]
        for at in np.flatnonzero(softmax[op]).tolist():
            # Few kernels stand around a softmax: what is not near one is never read.
            first = max(at - _BETWEEN, 0)
            near = slice(first, at + _BETWEEN + 1)
            ops = [values[c] for c in op[near].tolist()]
            dims = [_recorded_dims(texts, code) for code in shapes[near].tolist()]
            middle = at - first
            if not dims[middle]:
                continue
            scores = dims[middle][0]
            before = _product(ops, dims, middle, -1, math.prod(scores))
            after = _product(ops, dims, middle, 1, math.prod(scores))
            if before is None or after is None:
                continue
            if _written(dims[before]) != math.prod(scores):
                continue
            between += mine[first + before + 1 : first + after].tolist()
            around += [int(mine[first + before]), int(mine[first + after])]
            largest = max(largest, (math.prod(scores), " × ".join(map(str, scores))))
    return between, around, largest


def _product(
    ops: list[str], dims: list[list[list[int]]], at: int, direction: int, count: int
) -> int | None:
    """Return the next product before or after a softmax; None where something else comes first."""
    for step in range(1, _BETWEEN + 1):
        i = at + direction * step
        if not 0 <= i < len(ops):
            return None
        if ops[i] in _PRODUCTS:
            return i
        if all(math.prod(shape) != count for shape in dims[i] if shape):
            return None
    return None


def _written(dims: list[list[int]]) -> int | None:
    """Return the elements that a batched product writes."""
    matrices = [shape for shape in dims if len(shape) >= 2][-2:]
    if len(matrices) < 2:
        return None
    return math.prod(matrices[0][:-1]) * matrices[1][-1]


def _recorded_dims(texts: list[str], code: int) -> list[list[int]]:
    """Return the recorded shapes of an operator's inputs; empty where there are none."""
    if code < 0:
        return []
    try:
        value = json.loads(texts[code])
    except (ValueError, RecursionError):
        return []
    if not isinstance(value, list):
        return []
    return [s for s in value if isinstance(s, list) and all(isinstance(n, int) for n in s)]


_MISALIGNED = re.compile(r"align[12](?!\d)")


def misaligned_products(events: Events) -> Iterator[Sighting]:
    """DEVICE_EVENT -> a sighting for each data type."""
    fewest = limits_of("misaligned_products")["fewest"]
    codes, names = events.kernel
    small = np.array([is_misaligned(name) for name in names] + [False])[codes]
    known = events.math & (events.ideal_ns > 0) & (events.dur_ns > 0)
    reached = np.where(known, events.ideal_ns / np.maximum(events.dur_ns, 1), np.nan)
    for code in range(len(events.dtype[1])):
        alike = known & (events.dtype[0] == code)
        bad, good = alike & small, alike & ~small
        if not bad.any() or good.sum() < fewest:
            continue
        usual = float(np.median(reached[good]))
        chosen = bad & (reached < usual)
        if not chosen.any():
            continue
        quick = np.rint(events.ideal_ns[chosen] / usual).astype(np.int64)
        ranks = events.rank[chosen]
        rows = {int(r): events.row[chosen][ranks == r] for r in np.unique(ranks)}
        yield Sighting(
            events=rows,
            run_ns={rank: (rank_rows, quick[ranks == rank]) for rank, rank_rows in rows.items()},
            evidence={
                "kernels": int(chosen.sum()),
                "now_ratio": float(np.median(reached[chosen])),
                "other_ratio": usual,
            },
        )


def is_misaligned(kernel: str) -> bool:
    """Tell whether a name says so; kernels without matrix units (simt) always take single elements.

    The ``1x1x1`` in a name is the shape of a cluster.
    """
    return "simt" not in kernel and bool(_MISALIGNED.search(kernel))


_FASTER_TYPES = {"fp32": ("tf32", "bf16", "fp16"), "tf32": ("bf16", "fp16")}


def reduced_precision(run: Attribution, events: Events) -> Iterator[Sighting]:
    """DEVICE_EVENT, CEILINGS -> a sighting for each data type."""
    codes, names = events.dtype
    for now, wanted in _FASTER_TYPES.items():
        rows, run_ns, time_ns, kernels = {}, {}, 0, 0
        factors: dict[str, float] = {}
        for rank, ceilings in run.ceilings.items():
            peaks = ceilings.theoretical
            if peaks is None or now not in names or now not in peaks.flop_per_s:
                continue
            other = next((t for t in wanted if t in peaks.flop_per_s), "")
            ratio = peaks.flop_per_s[other] / peaks.flop_per_s[now] if other else 1.0
            chosen = (events.rank == rank) & events.math & (codes == names.index(now))
            if ratio <= 1 or not chosen.any():
                continue
            least = events.work_bytes[chosen] / (peaks.memory_bytes_per_s or np.inf) * 1e9
            faster = np.fmax(events.dur_ns[chosen] / ratio, least)
            quick = np.minimum(np.rint(faster), events.dur_ns[chosen]).astype(np.int64)
            rows[rank], run_ns[rank] = events.row[chosen], (events.row[chosen], quick)
            time_ns += int(events.dur_ns[chosen].sum())
            kernels += int(chosen.sum())
            factors.setdefault(other, ratio)
        if rows:
            other, factor = next(iter(factors.items()))
            yield Sighting(
                events=rows,
                run_ns=run_ns,
                evidence={
                    "now": now,
                    "other": other,
                    "factor": factor,
                    "kernels": kernels,
                    "time_ns": time_ns,
                    "how": declared()["reduced_precision"].remedies[other],
                },
            )


def reduced_clock(run: Attribution) -> Iterator[Sighting]:
    """PIECE -> a sighting for each reason."""
    for name in ("compute.clock.power_cap", "compute.clock.thermal"):
        time_ns, rows = spent_in(run, (name,))
        if not time_ns or run.withholds(name):
            continue
        how = remedy(run, name)
        if name == "compute.clock.power_cap" and (advice := determinism_advice(run)) is not None:
            how = f"{how} {advice}"
        yield Sighting(
            events=rows,
            changes=Changes(fix=(name,)),
            evidence={
                "cause": CAUSES[name].label,
                "kernels": sum(map(len, rows.values())),
                "time_ns": time_ns,
                "how": how,
            },
        )


def unneeded_recomputation(run: Attribution, events: Events) -> Iterator[Sighting]:
    """MEMORY, DEVICE_EVENT -> at most one sighting."""
    codes, phases = events.phase
    if "recompute" not in phases:
        return
    again = codes == phases.index("recompute")
    if not again.any():
        return
    peaks = {
        row["rank"]: row["peak_reserved_bytes"]
        for row in memory(run).to_pylist()
        if row["phase"] == "all" and row["device"].startswith("device")
    }
    rows, worst = {}, (1.0, 0, 0, 0)
    for rank in np.unique(events.rank[again]).tolist():
        mine = again & (events.rank == rank)
        device = device_of(run.recording.part(rank))
        capacity = None if device is None else device.memory_bytes
        peak = peaks.get(rank)
        if not capacity or peak is None or np.isnan(events.work_bytes[mine]).any():
            return
        steps = len(np.unique(events.step[mine]))
        activations = int(events.work_bytes[mine].sum() / steps)
        free = 1 - (peak + activations) / capacity
        if free < limits_of("unneeded_recomputation")["least_free_ratio"]:
            return
        rows[rank] = events.row[mine]
        worst = min(worst, (free, peak, capacity, activations))
    if rows:
        _, peak, capacity, activations = worst
        yield Sighting(
            events=rows,
            changes=Changes(fix=("compute.recompute",)),
            evidence={"peak": peak, "capacity": capacity, "activations": activations},
        )
