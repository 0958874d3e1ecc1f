"""A synthetic run with its attribution, exact by construction, for tests of the reports.

Every rank runs the same program. A step is a row of slots that tile its window: a kernel on the
compute stream, then what followed it alone on the device (exposed communication, an exposed copy,
an idle gap, or nothing). Pieces are cut from the slots, so they close to the nanosecond whatever
the numbers; no analyzer has a part in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from chopper.analyzers.attribution import Attribution, Basis, RankSummary
from chopper.storage import manifest as m
from chopper.storage.run import Run
from chopper.tables import TABLES
from tests.attributing import assembled
from tests.made_runs import put_table

T0_NS = 1_760_000_000_000_000_000
_COMPUTE_STREAM, _COMM_STREAM, _COPY_STREAM = 7, 20, 24

GEMM = (
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>"
    "(cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8::Params)"
)
FLASH = (
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, "
    "cutlass::bfloat16_t, Flash_kernel_traits<128, 128, 64, 4, cutlass::bfloat16_t> >, false, "
    "true, false, false, false, true, false, false>(pytorch_flash::Flash_fwd_params)"
)
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, "
    "at::detail::Array<char*, 3> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, "
    "at::detail::Array<char*, 3>)"
)
MUL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<c10::BFloat16, "
    "c10::BFloat16, c10::BFloat16, at::native::binary_internal::MulFunctor<float> >, "
    "at::detail::Array<char*, 3> >(int, at::native::BinaryFunctor<c10::BFloat16, c10::BFloat16, "
    "c10::BFloat16, at::native::binary_internal::MulFunctor<float> >, at::detail::Array<char*, 3>)"
)
NORM = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, "
    "at::native::MeanOps<float, float, float, float>, unsigned int, float, 4, 4> >"
    "(at::native::ReduceOp<float, at::native::MeanOps<float, float, float, float>, unsigned int, "
    "float, 4, 4>)"
)
ADAM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
    "namespace)::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::"
    "FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1, false>, float const*, double>"
    "(at::native::(anonymous namespace)::FusedOptimizerTensorListMetadata<4>)"
)
NCCL = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
HOSTILE = (
    "<script>window.__pwned = 1</script>",
    "</script><script>window.__pwned = 2</script>",
    '"><img src=x onerror="window.__pwned = 3">',
    "<a href='javascript:window.__pwned=4'>aten::mm</a>",
    "{{ 7 * 7 }}<b>bold</b>&amp;\u2028",
)

# kernel, operator, weight of its duration, share at peak, share of roofline excess
_LAYER_KERNELS: tuple[tuple[str, str, float, float, float], ...] = (
    (NORM, "aten::mean", 0.3, 0, 0),
    (MUL, "aten::mul", 0.2, 0, 0),
    (GEMM, "aten::mm", 2.0, 0.62, 0.06),
    (FLASH, "aten::_scaled_dot_product_flash_attention", 2.2, 0.48, 0.0),
    (GEMM, "aten::mm", 1.2, 0.58, 0.1),
    (ADD, "aten::add", 0.2, 0, 0),
    (GEMM, "aten::mm", 3.1, 0.66, 0.04),
    (MUL, "aten::mul", 0.25, 0, 0),
)
_PHASES = ("forward", "recompute", "backward", "optimizer", "data", "other")


@dataclass(frozen=True)
class Shape:
    """How large the synthetic run is and what it holds."""

    ranks: int = 2
    steps: int = 4
    layers: int = 6
    repeat: int = 1
    """Times that a layer's kernels are repeated: the dial for the number of events."""
    host: bool = True
    telemetry: bool = True
    peak: bool = True
    """Whether the device's peak is known."""
    hostile: bool = False
    seed: int = 0


def strings(codes: np.ndarray, names: list[str]) -> pa.Array:
    """A dictionary-encoded string column; code -1 is null."""
    indices = pa.array(codes.astype(np.int32), mask=codes < 0)
    return pa.DictionaryArray.from_arrays(indices, pa.array(names, pa.string()))


def table(name: str, /, **columns: Any) -> pa.Table:
    """A declared table; columns that are not given are null."""
    schema = TABLES[name].arrow
    rows = len(next(iter(columns.values())))
    arrays = []
    for column in schema:
        if column.name not in columns:
            arrays.append(
                pa.nulls(rows, column.type)
                if column.nullable
                else pa.array([_DEFAULTS[column.name]] * rows, column.type)
            )
            continue
        value = columns[column.name]
        arrays.append(
            value.cast(column.type)
            if isinstance(value, pa.Array)
            else pa.array(value, type=column.type, from_pandas=False)
        )
    return TABLES[name].validate(pa.Table.from_arrays(arrays, schema=schema))


_DEFAULTS = {"span_ns": 10_000_000}


def put(run: Run, rank: int, name: str, /, **columns: Any) -> None:
    """Give a rank a declared table of these columns."""
    put_table(run, rank, name, table(name, **columns))


class _Program:
    """The slots of one step: what runs, in which layer and phase."""

    def __init__(self, shape: Shape) -> None:
        kernels = list(_LAYER_KERNELS) * shape.repeat
        if shape.hostile:
            kernels += [(name, name, 0.4, 0, 0) for name in HOSTILE]
        rows: list[tuple[str, str, str | None, str, float, float, float]] = []
        layers = [f"model.layers.{i}" for i in range(shape.layers)]
        if shape.hostile:
            layers[0] = HOSTILE[0]
        rows.append((ADD, "aten::embedding", "model.tok_embeddings", "forward", 0.4, 0, 0))
        for phase, factor, order in (("forward", 1.0, layers), ("backward", 2.0, layers[::-1])):
            for layer in order:
                rows += [
                    (
                        k,
                        op if phase == "forward" else op + "_backward",
                        layer,
                        phase,
                        w * factor,
                        a,
                        b,
                    )
                    for k, op, w, a, b in kernels
                ]
        rows += [(ADAM, "Optimizer.step#AdamW.step", None, "optimizer", 1.5, 0, 0)] * max(
            shape.layers, 1
        )
        self.kernel_names = sorted({r[0] for r in rows} | {NCCL, "Memcpy HtoD (Pinned -> Device)"})
        self.op_names = sorted({r[1] for r in rows} | {"c10d::allgather", "aten::copy_"})
        self.layer_names = sorted({r[2] for r in rows if r[2]})
        self.phase_names = list(_PHASES)
        index = {n: i for i, n in enumerate(self.kernel_names)}
        ops = {n: i for i, n in enumerate(self.op_names)}
        layer_index = {n: i for i, n in enumerate(self.layer_names)}
        self.kernel = np.array([index[r[0]] for r in rows])
        self.op = np.array([ops[r[1]] for r in rows])
        self.layer = np.array([layer_index[r[2]] if r[2] else -1 for r in rows])
        self.phase = np.array([_PHASES.index(r[3]) for r in rows])
        self.weight = np.array([r[4] for r in rows])
        self.at_peak = np.array([r[5] for r in rows], dtype=float)
        self.roofline = np.array([r[6] for r in rows], dtype=float)
        self.nccl = index[NCCL]
        self.memcpy = index["Memcpy HtoD (Pinned -> Device)"]
        self.allgather = ops["c10d::allgather"]
        self.copy_op = ops["aten::copy_"]
        self.size = len(rows)


def make(shape: Shape | None = None, source: str = "runs/synthetic") -> Attribution:
    """Build the run and its attribution."""
    shape = shape or Shape()
    program = _Program(shape)
    run = Run(_manifest(shape), None, {}, source=source)
    pieces, windows, gaps = [], [], []
    links: dict[int, pa.Table] = {}
    summaries = []
    for rank in range(shape.ranks):
        made = _rank(run, rank, shape, program)
        pieces.append(made.pieces)
        windows.append(made.windows)
        gaps.append(made.gaps)
        links[rank] = made.links
        summaries.append(made.summary)
    model = Basis("FLOP from recorded shapes, peak from the datasheet", False)
    return assembled(
        run,
        pieces=pa.concat_tables(pieces).unify_dictionaries(),
        windows=pa.concat_tables(windows),
        gaps=pa.concat_tables(gaps).unify_dictionaries(),
        links=links,
        ranks=summaries,
        findings=[
            m.Finding(
                code="trace.kernels_without_launch",
                severity="warning",
                message="12 of 4 310 kernels have no launch in the trace; gaps before them "
                "have no cause",
                count=12,
                rank=0,
            ),
            m.Finding(
                code="telemetry.clock_missing",
                severity="info",
                message="no clock samples: frequency cannot be told from efficiency",
                withholds=("compute.clock",),
            ),
        ],
        coverage={"kernels_modelled": 0.91, "kernels_linked": 0.997, "clock": None},
        bases={
            "compute.ideal": model,
            "compute.roofline": model,
            "compute.efficiency.rest": model,
            "communication.transfer.at_peak": Basis("message bytes, link peak calibrated", False),
            "communication.transfer.below_peak": Basis(
                "message bytes, link peak calibrated", False
            ),
        },
    )


@dataclass
class _Made:
    pieces: pa.Table
    windows: pa.Table
    gaps: pa.Table
    links: pa.Table
    summary: RankSummary


_TAILS = (
    # share of slots, cause, mean ns
    (0.86, None, 0),
    (0.03, "idle.launch_latency", 2_500),
    (0.02, "idle.call", 6_000),
    (0.015, "idle.preparation.dispatch", 14_000),
    (0.008, "idle.preparation.python", 22_000),
    (0.003, "idle.preparation.synchronization", 90_000),
    (0.002, "idle.preparation.allocator", 60_000),
    (0.05, "communication", 160_000),
    (0.012, "copy.host_to_device", 30_000),
)


def _rank(run: Run, rank: int, shape: Shape, program: _Program) -> _Made:
    rng = np.random.default_rng(shape.seed * 1000 + rank)
    n = program.size * shape.steps
    step = np.repeat(np.arange(shape.steps), program.size)
    kernel, op, layer, phase, weight, at_peak, roofline = (
        np.tile(v, shape.steps)
        for v in (
            program.kernel,
            program.op,
            program.layer,
            program.phase,
            program.weight,
            program.at_peak,
            program.roofline,
        )
    )
    dur = (weight * 40_000 * rng.normal(1, 0.03, n).clip(0.8, 1.3)).astype(np.int64) + 1_000
    tail_kind = rng.choice(len(_TAILS), n, p=[t[0] for t in _TAILS])
    mean = np.array([t[2] for t in _TAILS])[tail_kind]
    slow = 1.6 if rank == shape.ranks - 1 and shape.ranks > 1 else 1.0
    tail = (mean * rng.gamma(4, 0.25, n) * np.where(step % 3 == 2, slow, 1.0)).astype(np.int64)
    # The first slot of a step waits for the loader.
    first = np.arange(n) % program.size == 0
    tail_kind = np.where(first, len(_TAILS), tail_kind)
    tail = np.where(first, (1_500_000 * rng.gamma(3, 0.4, n)).astype(np.int64), tail)
    causes = [t[1] for t in _TAILS] + ["idle.preparation.data"]

    ends = np.cumsum(dur + tail) + T0_NS + 2_000_000_000
    kernel_start = ends - dur - tail
    tail_start = ends - tail
    is_comm = np.array([c == "communication" for c in causes])[tail_kind]
    is_copy = np.array([bool(c and c.startswith("copy")) for c in causes])[tail_kind]
    is_idle = np.array([bool(c and c.startswith("idle")) for c in causes])[tail_kind] & (tail > 0)
    is_comm &= tail > 0
    is_copy &= tail > 0

    # Device events: a kernel per slot, a collective that began under it, a copy that is alone.
    comm, copy = np.flatnonzero(is_comm), np.flatnonzero(is_copy)
    ev_start = np.concatenate([kernel_start, kernel_start[comm] + dur[comm] // 3, tail_start[copy]])
    ev_dur = np.concatenate([dur, ends[comm] - kernel_start[comm] - dur[comm] // 3, tail[copy]])
    slot = np.concatenate([np.arange(n), comm, copy])
    what = np.concatenate([np.zeros(n, int), np.ones(len(comm), int), np.full(len(copy), 2)])
    order = np.lexsort((-ev_dur, ev_start))
    row_of = np.empty(len(order), dtype=np.int64)
    row_of[order] = np.arange(len(order))
    ev_start, ev_dur, slot, what = ev_start[order], ev_dur[order], slot[order], what[order]
    ev_kernel = np.select(
        [what == 1, what == 2],
        [np.full(len(slot), program.nccl), np.full(len(slot), program.memcpy)],
        kernel[slot],
    )
    ev_op = np.select(
        [what == 1, what == 2],
        [np.full(len(slot), program.allgather), np.full(len(slot), program.copy_op)],
        op[slot],
    )
    kernel_row, comm_row, copy_row = row_of[:n], row_of[n : n + len(comm)], row_of[n + len(comm) :]

    put(
        run,
        rank,
        "device_event",
        start_ns=ev_start,
        dur_ns=ev_dur,
        device_id=np.full(len(slot), rank, np.int32),
        stream_id=np.array([_COMPUTE_STREAM, _COMM_STREAM, _COPY_STREAM])[what],
        kind=strings(np.array([0, 0, 1])[what], ["kernel", "memcpy"]),
        name=strings(ev_kernel, program.kernel_names),
        correlation_id=np.arange(len(slot)),
    )
    links = table(
        "event_link",
        launch_row=pa.nulls(len(slot), pa.int64()),
        op=strings(ev_op, program.op_names),
        layer=strings(layer[slot], program.layer_names),
        phase=strings(phase[slot], program.phase_names),
        step_index=step[slot].astype(np.int32),
        work_class=strings(what, ["compute", "communication", "copy"]),
    )

    # Pieces.
    cause_names: list[str] = []
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, int]] = []

    def add(cause: str, slots: np.ndarray, rows: np.ndarray, time_ns: np.ndarray) -> None:
        cause_names.append(cause)
        parts.append((slots, rows, time_ns, len(cause_names) - 1))

    gemm = np.flatnonzero(at_peak > 0)
    if shape.peak:
        ideal = (dur[gemm] * at_peak[gemm]).astype(np.int64)
        roof = (dur[gemm] * roofline[gemm]).astype(np.int64)
        add("compute.ideal", gemm, kernel_row[gemm], ideal)
        some = roof > 0
        add("compute.roofline", gemm[some], kernel_row[gemm][some], roof[some])
        add("compute.efficiency.rest", gemm, kernel_row[gemm], dur[gemm] - ideal - roof)
    else:
        add("compute.no_peak", gemm, kernel_row[gemm], dur[gemm])
    optimizer = np.flatnonzero(phase == _PHASES.index("optimizer"))
    add("compute.optimizer", optimizer, kernel_row[optimizer], dur[optimizer])
    vector = np.flatnonzero((at_peak == 0) & (phase != _PHASES.index("optimizer")))
    half = dur[vector] * 3 // 5
    add("compute.vector.roofline", vector, kernel_row[vector], half)
    add("compute.vector.excess", vector, kernel_row[vector], dur[vector] - half)
    wait = tail[comm] * 2 // 5 if shape.ranks > 1 else np.zeros(len(comm), np.int64)
    at = (tail[comm] - wait) // 2
    if shape.ranks > 1:
        add("communication.wait", comm, comm_row, wait)
        add("communication.transfer.at_peak", comm, comm_row, at)
        add("communication.transfer.below_peak", comm, comm_row, tail[comm] - wait - at)
    else:
        add("communication.unseparated", comm, comm_row, tail[comm])
    add("copy.host_to_device", copy, copy_row, tail[copy])
    gap_rows = []
    for code, name in enumerate(causes):
        if name is None or not name.startswith("idle"):
            continue
        at_gap = np.flatnonzero((tail_kind == code) & is_idle)
        following = np.minimum(at_gap + 1, n - 1)
        add(name, at_gap, kernel_row[following], tail[at_gap])
        gap_rows.append((at_gap, np.full(len(at_gap), code)))
    slots = np.concatenate([p[0] for p in parts])
    rows = np.concatenate([p[1] for p in parts])
    time_ns = np.concatenate([p[2] for p in parts])
    cause_code = np.concatenate([np.full(len(p[0]), p[3]) for p in parts])
    pieces = table(
        "piece",
        rank=np.full(len(slots), rank, np.int32),
        step_index=step[slots].astype(np.int32),
        cause=strings(cause_code, cause_names),
        event_row=rows,
        phase=strings(phase[slots], program.phase_names),
        layer=strings(layer[slots], program.layer_names),
        op=strings(ev_op[rows], program.op_names),
        kernel=strings(ev_kernel[rows], program.kernel_names),
        time_ns=time_ns,
    )
    gap_slots = np.concatenate([g[0] for g in gap_rows])
    gap_codes = np.concatenate([g[1] for g in gap_rows])
    sort = np.argsort(gap_slots)
    gap_slots, gap_codes = gap_slots[sort], gap_codes[sort]
    gaps = table(
        "gap",
        rank=np.full(len(gap_slots), rank, np.int32),
        step_index=step[gap_slots].astype(np.int32),
        start_ns=tail_start[gap_slots],
        end_ns=ends[gap_slots],
        cause=strings(gap_codes, [c or "" for c in causes]),
        event_row=kernel_row[np.minimum(gap_slots + 1, n - 1)],
    )
    last = np.arange(shape.steps) * program.size + program.size - 1
    window_end = ends[last]
    window_start = np.concatenate([[kernel_start[0]], window_end[:-1]])
    numbers = np.arange(shape.steps) + 10
    windows = table(
        "window",
        rank=np.full(shape.steps, rank, np.int32),
        step_index=np.arange(shape.steps, dtype=np.int32),
        number=numbers,
        start_ns=window_start,
        end_ns=window_end,
    )
    put(
        run,
        rank,
        "step",
        number=numbers,
        start_ns=window_start - 500_000,
        end_ns=window_end - 500_000,
        source=strings(np.zeros(shape.steps, int), ["mark"]),
        traced=np.ones(shape.steps, bool),
        profiled=np.ones(shape.steps, bool),
        micro_steps=pa.nulls(shape.steps, pa.int64()),
    )
    if shape.host:
        _host(
            run, rank, program, step, kernel_start, dur, tail, op, layer, window_start, window_end
        )
    if shape.telemetry:
        _telemetry(run, rank, int(window_start[0]), int(window_end[-1]), rng)
    observed = int(window_end[-1] - window_start[0])
    assert int(time_ns.sum()) == observed
    ideal_ns = int((dur[gemm] * at_peak[gemm]).astype(np.int64).sum()) if shape.peak else 0
    summary = RankSummary(
        rank=rank,
        label=f"rank {rank}",
        device="NVIDIA H100 80GB HBM3" if shape.peak else "Unheard-of Device",
        peak_source="NVIDIA H100 Tensor Core GPU datasheet, 989.4 TFLOP/s bf16 dense"
        if shape.peak
        else None,
        observed_ns=observed,
        ideal_ns=ideal_ns,
        steps=shape.steps,
    )
    return _Made(pieces, windows, gaps, links, summary)


def _host(
    run: Run,
    rank: int,
    program: _Program,
    step: np.ndarray,
    start: np.ndarray,
    dur: np.ndarray,
    tail: np.ndarray,
    op: np.ndarray,
    layer: np.ndarray,
    window_start: np.ndarray,
    window_end: np.ndarray,
) -> None:
    """Operators with a launch inside, one thread, a little ahead of the device."""
    ahead = 400_000
    ops_start, ops_dur = start - ahead, (dur + tail) * 9 // 10
    names = [*program.op_names, "cudaLaunchKernel"]
    numbers = [f"ProfilerStep#{10 + i}" for i in range(len(window_start))]
    base = len(names)
    names += numbers
    starts = np.concatenate([window_start - ahead, ops_start, ops_start + ops_dur // 4])
    durs = np.concatenate([window_end - window_start, ops_dur, ops_dur // 2])
    codes = np.concatenate(
        [base + np.arange(len(numbers)), op, np.full(len(op), len(program.op_names))]
    )
    category = np.concatenate(
        [np.zeros(len(numbers), int), np.ones(len(op), int), np.full(len(op), 2)]
    )
    order = np.lexsort((-durs, starts))
    put(
        run,
        rank,
        "host_span",
        start_ns=starts[order],
        dur_ns=durs[order],
        pid=np.full(len(order), 4000 + rank),
        tid=np.full(len(order), 4000 + rank),
        category=strings(category[order], ["annotation", "cpu_op", "runtime"]),
        name=strings(codes[order], names),
    )
    put(
        run,
        rank,
        "thread",
        pid=[4000 + rank],
        tid=[4000 + rank],
        process_name=strings(np.zeros(1, int), ["python"]),
        thread_name=strings(np.zeros(1, int), ["MainThread"]),
    )


def _telemetry(run: Run, rank: int, start: int, end: int, rng: np.random.Generator) -> None:
    times = np.arange(start - 1_000_000_000, end + 500_000_000, 10_000_000)
    n = len(times)
    put(
        run,
        rank,
        "process",
        time_ns=times,
        rank=np.full(n, rank, np.int32),
        pid=np.full(n, 4000 + rank),
        cpu_ratio=1.0 + 0.2 * rng.standard_normal(n).clip(-2, 2),
        rss_bytes=np.linspace(2e9, 3.5e9, n).astype(np.int64),
        thread_count=np.full(n, 40, np.int32),
    )
    allocated = (30e9 + 12e9 * np.abs(np.sin(np.arange(n) / 3))).astype(np.int64)
    put(
        run,
        rank,
        "device_memory",
        time_ns=times,
        device_id=np.full(n, rank, np.int32),
        allocated_bytes=allocated,
        reserved_bytes=np.full(n, 48_000_000_000),
        max_allocated_bytes=np.maximum.accumulate(allocated),
    )
    if rank:
        return
    cores = 4
    put(
        run,
        rank,
        "cpu_core",
        time_ns=np.repeat(times, cores),
        core_id=np.tile(np.arange(cores, dtype=np.int32), n),
        busy_ratio=rng.random(n * cores),
        system_ratio=rng.random(n * cores) * 0.1,
        steal_ratio=np.zeros(n * cores),
    )
    put(
        run,
        rank,
        "nic",
        time_ns=times,
        interface=strings(np.zeros(n, int), ["eth0"]),
        rx_bytes=np.cumsum(rng.integers(0, 4_000_000, n)),
        tx_bytes=np.cumsum(rng.integers(0, 4_000_000, n)),
    )
    put(
        run,
        rank,
        "host",
        time_ns=times,
        memory_available_bytes=np.linspace(20e9, 16e9, n).astype(np.int64),
        pressure_cpu_some_ns=np.cumsum(rng.integers(0, 2_000_000, n)),
    )


def _manifest(shape: Shape) -> m.RunManifest:
    ranks = []
    for rank in range(shape.ranks):
        ranks.append(
            m.RankManifest(
                rank=rank,
                chopper_version="0.1.0",
                world_size=shape.ranks,
                local_rank=rank,
                hostname="node-a",
                pid=4000 + rank,
                start_ns=T0_NS,
                end_ns=T0_NS + 8_000_000_000,
                status="complete",
                backend="nccl",
                environment={
                    "python": "3.12.4",
                    "torch": "2.13.0+cu130",
                    "platform": "Linux 6.8 x86_64",
                    "cpu": "AMD EPYC 9554 64-Core Processor",
                },
                devices=[
                    m.Device(
                        device_id=rank,
                        name="NVIDIA H100 80GB HBM3",
                        memory_bytes=85_520_809_984,
                        multiprocessor_count=132,
                    )
                ],
                device_id=rank,
                collectors=[
                    m.CollectorReport(name="torch", status="obtained", samples_count=4310),
                    m.CollectorReport(
                        name="host",
                        status="obtained",
                        requested_hz=100.0,
                        achieved_hz=99.8,
                        samples_count=800,
                        dropped_count=0,
                        late_count=3,
                        jitter_p50_ns=40_000,
                        jitter_p99_ns=310_000,
                        call_p50_ns=210_000,
                        call_p99_ns=900_000,
                        cpu_ratio=0.012,
                    ),
                    m.CollectorReport(
                        name="nvml",
                        status="refused",
                        reason="libnvidia-ml.so.1: cannot open shared object file",
                        remedy="install the NVIDIA driver, or pass --collect without nvml",
                    ),
                ],
                steps_source="mark",
                overhead=m.Overhead(
                    setup_ns=120_000_000,
                    per_step_ns=180_000,
                    export_ns=900_000_000,
                    traced_step_ns=12_400_000,
                    untraced_step_ns=12_100_000,
                ),
            )
        )
    return m.RunManifest(
        chopper_version="0.1.0",
        kind="recorded",
        name="synthetic",
        command=(
            "torchrun",
            "--nproc-per-node",
            str(shape.ranks),
            "train.py",
            "--lr",
            "<b>3e-4</b>",
        ),
        workload="fsdp2",
        created_ns=T0_NS,
        exit_code=0,
        ranks=ranks,
        findings=[],
    )
