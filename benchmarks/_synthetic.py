"""Traces of any size of a data-parallel transformer step, as tables or as Kineto JSON.

Per rank: steps of layers; a forward layer is seven operators (linear layers, attention, norms,
elementwise), a backward layer the same on the autograd thread and the all-reduce of its gradients
on a second stream; the optimizer and a copy close a step. Every operator has its shapes, its
nested operators and its launching call; about four host spans per device event, as in recorded
traces without Python stacks.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from chopper.storage import manifest as m
from chopper.storage.run import Run
from chopper.tables import TABLES

DEVICE = "NVIDIA H100 80GB HBM3"
_BASE_NS = 1_751_410_836_000_000_000
_MAIN, _ENGINE = 4711, 4712
_COMPUTE, _NETWORK = 7, 20
_LAYERS = 48
_LATENCY_NS = 4_000
_TYPE = "c10::BFloat16"
# Outer operator, inner operator, shapes, kernel, nanoseconds.
_FORWARD = (
    ("aten::layer_norm", "aten::native_layer_norm", [[4, 1024, 2048], [2048]], "layer_norm", 9_000),
    ("aten::linear", "aten::mm", [[4096, 2048], [2048, 6144]], "sm90_xmma_gemm_bf16", 140_000),
    (
        "aten::scaled_dot_product_attention",
        "aten::_scaled_dot_product_flash_attention",
        [[4, 16, 1024, 128], [4, 16, 1024, 128], [4, 16, 1024, 128]],
        "flash_fwd_kernel",
        60_000,
    ),
    ("aten::linear", "aten::mm", [[4096, 2048], [2048, 2048]], "sm90_xmma_gemm_bf16", 50_000),
    ("aten::add", "aten::add", [[4, 1024, 2048], [4, 1024, 2048]], "elementwise_add", 12_000),
    ("aten::linear", "aten::mm", [[4096, 2048], [2048, 8192]], "sm90_xmma_gemm_bf16", 190_000),
    ("aten::gelu", "aten::gelu", [[4, 1024, 8192]], "elementwise_gelu", 25_000),
)
_PER_STEP = _LAYERS * (2 * len(_FORWARD) + 1) + 9
_OPTIMIZER: tuple[str, str, list[list[int]], str, int] = (
    "Optimizer.step#AdamW.step",
    "aten::_fused_adamw_",
    [[]],
    "multi_tensor_apply",
    90_000,
)


def tables(events: int, rank: int = 0, ranks: int = 1, seed: int = 0) -> dict[str, pa.Table]:
    """Trace tables of one rank with about this many device events."""
    steps = max(1, round(events / _PER_STEP))
    rng = np.random.default_rng(seed * 1000 + rank)
    template = _template()
    count = len(template)
    host_ns = np.tile(np.array([row["host_ns"] for row in template]), steps)
    host_ns = host_ns + rng.integers(0, 3_000, len(host_ns))
    begin = np.cumsum(host_ns) - host_ns
    launch = begin + host_ns // 2
    stream = np.tile(np.array([row["stream"] for row in template]), steps)
    length = np.tile(np.array([row["device_ns"] for row in template]), steps)
    length = length + rng.integers(0, 1 + length // 20)
    start = np.zeros(len(length), dtype=np.int64)
    for one in (_COMPUTE, _NETWORK):
        mine = stream == one
        start[mine] = _queued(launch[mine] + _LATENCY_NS, length[mine])
    item = np.tile(np.arange(count), steps)
    return {
        "host_span": _host(template, item, begin, host_ns, launch, steps),
        "device_event": _device(template, item, start, length, stream),
        "step": _steps(begin, host_ns, count, steps),
        "collective": _collectives(template, item, start, ranks),
    }


def run(events: int, ranks: int = 1) -> Run:
    """A run in memory: each rank with this many device events."""
    made = {
        (rank, name): table
        for rank in range(ranks)
        for name, table in tables(events, rank, ranks).items()
    }
    parts = [
        m.RankManifest(
            rank=rank,
            world_size=ranks,
            hostname="one",
            status="imported",
            device_id=0,
            devices=[m.Device(device_id=0, name=DEVICE, multiprocessor_count=132)],
        )
        for rank in range(ranks)
    ]
    manifest = m.RunManifest(chopper_version="0", kind="imported", name="synthetic", ranks=parts)
    return Run(manifest, None, made, source="synthetic")


def write_run(path: Path, events: int) -> None:
    """The same as a run directory of one rank, its tables as streams."""
    made = run(events)
    folder = path / "rank-00000"
    folder.mkdir(parents=True)
    part = made.manifest.ranks[0]
    (folder / "manifest.json").write_bytes(msgspec.json.encode(part))
    (path / "manifest.json").write_bytes(msgspec.json.encode(made.manifest))
    for (_, name), table in made.store.items():
        with pa.ipc.new_stream(folder / f"{name}.arrow", table.schema) as stream:
            stream.write_table(table, max_chunksize=1 << 20)


def write_kineto(path: Path, events: int) -> None:
    """The same trace of one rank as PyTorch would have written it, gzip-compressed."""
    made = tables(events)
    with gzip.open(path, "wt", compresslevel=1) as file:
        properties = [{"id": 0, "name": DEVICE, "totalGlobalMem": 85_028_765_696, "numSms": 132}]
        head = {
            "schemaVersion": 1,
            "deviceProperties": properties,
            "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1},
            "baseTimeNanoseconds": _BASE_NS,
        }
        file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
        first = True
        for event in _json_events(made):
            file.write(("" if first else ",\n") + json.dumps(event))
            first = False
        file.write("\n]}\n")


def _template() -> list[dict[str, Any]]:
    """One step: an item per device event."""
    items: list[dict[str, Any]] = []

    def add(outer: str, inner: str, dims: Any, kernel: str, device_ns: int, **more: Any) -> None:
        items.append(
            {
                "outer": outer,
                "inner": inner,
                "dims": dims,
                "kernel": kernel,
                "device_ns": device_ns,
                "host_ns": 14_000,
                "stream": _COMPUTE,
                "tid": _MAIN,
                "kind": "kernel",
                "layer": None,
                "sequence": -1,
                **more,
            }
        )

    add("aten::to", "aten::copy_", [[4, 1024], [4, 1024]], "Memcpy HtoD", 6_000, kind="memcpy")
    for layer in range(_LAYERS):
        for at, op in enumerate(_FORWARD):
            number = layer * len(_FORWARD) + at
            add(*op, layer=f"chopper::layer::layers.{layer}", sequence=number)
    for layer in reversed(range(_LAYERS)):
        for at, (_, inner, dims, kernel, ns) in reversed(list(enumerate(_FORWARD))):
            number = layer * len(_FORWARD) + at
            node = f"autograd::engine::evaluate_function: {inner.removeprefix('aten::')}Backward0"
            add(node, inner, dims, kernel, 2 * ns, tid=_ENGINE, sequence=number)
        add(
            "record_param_comms",
            "nccl:all_reduce",
            [[12_582_912]],
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            350_000,
            stream=_NETWORK,
            tid=_ENGINE,
        )
    for _ in range(8):
        add(*_OPTIMIZER)
    return items


def _queued(ready: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Starts on a stream that runs one after another, each when it is ready or later."""
    before = np.cumsum(length) - length
    starts: np.ndarray = before + np.maximum.accumulate(ready - before)
    return starts


def _host(
    template: list[dict[str, Any]],
    item: np.ndarray,
    begin: np.ndarray,
    host_ns: np.ndarray,
    launch: np.ndarray,
    steps: int,
) -> pa.Table:
    """Step, outer operator, inner operator and launching call of every item, sorted."""
    count = len(item)
    inner_category = ["annotation" if t["inner"].startswith("nccl") else "cpu_op" for t in template]
    step_begin = begin[:: len(template)]
    step_end = np.append(step_begin[1:], begin[-1] + host_ns[-1])
    kinds = {
        "outer": (begin, host_ns, [t["outer"] for t in template], ["cpu_op"] * len(template)),
        "inner": (
            begin + 1_000,
            host_ns - 2_000,
            [t["inner"] for t in template],
            inner_category,
        ),
        "call": (
            launch,
            np.full(count, 2_500),
            ["cudaMemcpyAsync" if t["kind"] == "memcpy" else "cudaLaunchKernel" for t in template],
            ["runtime"] * len(template),
        ),
    }
    tid = np.array([t["tid"] for t in template])[item]
    sequence = np.array([t["sequence"] for t in template])[item]
    sequence = np.where(
        sequence >= 0, sequence + item.max() * (np.arange(count) // len(template)), -1
    )
    dims = [json.dumps(t["dims"]) for t in template]
    types = [json.dumps([_TYPE] * len(t["dims"])) for t in template]
    parts = []
    for name, (start, length, labels, categories) in kinds.items():
        operator = name != "call"
        number = np.arange(count) + 1
        parts.append(
            _columns(
                start_ns=start + _BASE_NS,
                dur_ns=length,
                tid=tid,
                category=_texts(item, categories),
                name=_texts(item, labels),
                correlation_id=None if operator else number,
                external_id=number if operator else None,
                sequence_id=np.where(sequence < 0, -1, sequence) if name == "outer" else None,
                forward_tid=np.where(tid == _ENGINE, 1, 0) if name == "outer" else None,
                input_dims=_texts(item, dims) if operator else None,
                input_types=_texts(item, types) if operator else None,
            )
        )
    numbers = np.arange(steps)
    parts.append(
        _columns(
            start_ns=step_begin + _BASE_NS,
            dur_ns=step_end - step_begin,
            tid=np.full(steps, _MAIN),
            category=_texts(np.zeros(steps, np.int64), ["annotation"]),
            name=_texts(numbers, [f"ProfilerStep#{n}" for n in numbers]),
        )
    )
    layers = sorted({t["layer"] for t in template if t["layer"]})
    for layer in layers:
        members = [i for i, t in enumerate(template) if t["layer"] == layer]
        first, last = (np.arange(steps) * len(template) + i for i in (members[0], members[-1]))
        parts.append(
            _columns(
                start_ns=begin[first] + _BASE_NS,
                dur_ns=begin[last] + host_ns[last] - begin[first],
                tid=np.full(steps, _MAIN),
                category=_texts(np.zeros(steps, np.int64), ["annotation"]),
                name=_texts(np.zeros(steps, np.int64), [layer]),
            )
        )
    table = pa.concat_tables(parts).unify_dictionaries().combine_chunks()
    order = np.lexsort((-table["dur_ns"].to_numpy(), table["start_ns"].to_numpy()))
    return table.take(pa.array(order)).combine_chunks()


def _columns(**given: Any) -> pa.Table:
    """Host spans from the columns that are told; the others are null."""
    declared = TABLES["host_span"]
    count = len(given["start_ns"])
    arrays = []
    for field in declared.arrow:
        value = given.get(field.name)
        if field.name == "pid":
            value = np.full(count, 4711)
        if value is None:
            arrays.append(pa.nulls(count, field.type))
        elif isinstance(value, pa.Array):
            arrays.append(value)
        else:
            arrays.append(pa.array(value.astype(np.int64), mask=value < 0))
    return pa.Table.from_arrays(arrays, schema=declared.arrow)


def _texts(codes: np.ndarray, values: list[str]) -> pa.DictionaryArray:
    distinct = sorted(set(values))
    of = np.array([distinct.index(v) for v in values], dtype=np.int32)
    return pa.DictionaryArray.from_arrays(pa.array(of[codes]), pa.array(distinct))


def _device(
    template: list[dict[str, Any]],
    item: np.ndarray,
    start: np.ndarray,
    length: np.ndarray,
    stream: np.ndarray,
) -> pa.Table:
    declared = TABLES["device_event"]
    order = np.argsort(start, kind="stable")
    count = len(item)
    given: dict[str, Any] = {
        "start_ns": pa.array(start[order] + _BASE_NS),
        "dur_ns": pa.array(length[order]),
        "device_id": pa.array(np.zeros(count, np.int32)),
        "stream_id": pa.array(stream[order]),
        "kind": _texts(item[order], [t["kind"] for t in template]),
        "name": _texts(item[order], [t["kernel"] for t in template]),
        "correlation_id": pa.array(order + 1),
        "external_id": pa.array(order + 1),
        "grid": _texts(np.zeros(count, np.int64), ["[132, 1, 1]"]),
        "block": _texts(np.zeros(count, np.int64), ["[128, 1, 1]"]),
    }
    return pa.Table.from_arrays(
        [given.get(f.name, pa.nulls(count, f.type)) for f in declared.arrow], schema=declared.arrow
    )


def _steps(begin: np.ndarray, host_ns: np.ndarray, count: int, steps: int) -> pa.Table:
    declared = TABLES["step"]
    start = begin[::count]
    end = np.append(start[1:], begin[-1] + host_ns[-1])
    zeros = np.zeros(steps, np.int64)
    given = {
        "number": pa.array(np.arange(steps)),
        "start_ns": pa.array(start + _BASE_NS),
        "end_ns": pa.array(end + _BASE_NS),
        "source": _texts(zeros, ["profiler_step"]),
        "traced": pa.array(np.ones(steps, dtype=bool)),
        "profiled": pa.array(np.ones(steps, dtype=bool)),
    }
    return pa.Table.from_arrays(
        [given.get(f.name, pa.nulls(steps, f.type)) for f in declared.arrow], schema=declared.arrow
    )


def _collectives(
    template: list[dict[str, Any]],
    item: np.ndarray,
    start: np.ndarray,
    ranks: int,
) -> pa.Table:
    declared = TABLES["collective"]
    order = np.argsort(start, kind="stable")
    network = np.array([t["stream"] == _NETWORK for t in template])
    rows = np.flatnonzero(network[item[order]])
    count = len(rows)
    zeros = np.zeros(count, np.int64)
    elements = pa.array(np.full(count, 12_582_912))
    given: dict[str, Any] = {
        "source": _texts(zeros, ["device_event"]),
        "row": pa.array(rows),
        "collective": _texts(zeros, ["allreduce"]),
        "in_elements_count": elements,
        "out_elements_count": elements,
        "dtype": _texts(zeros, ["BFloat16"]),
        "group_size_count": pa.array(np.full(count, ranks)),
        "group_name": _texts(zeros, ["0"]),
        "group_ranks": _texts(zeros, [json.dumps(list(range(ranks)))]),
        "sequence_id": pa.array(np.arange(count)),
    }
    return pa.Table.from_arrays(
        [given.get(f.name, pa.nulls(count, f.type)) for f in declared.arrow], schema=declared.arrow
    )


_CATEGORY = {"cpu_op": "cpu_op", "annotation": "user_annotation", "runtime": "cuda_runtime"}
_DEVICE_CATEGORY = {"kernel": "kernel", "memcpy": "gpu_memcpy"}


def _json_events(made: dict[str, pa.Table]) -> Any:
    """Kineto's events, one after another."""
    for batch in made["host_span"].to_batches(65_536):
        for row in batch.to_pylist():
            args: dict[str, Any] = {}
            for key, name in (
                ("correlation_id", "correlation"),
                ("external_id", "External id"),
                ("sequence_id", "Sequence number"),
                ("forward_tid", "Fwd thread id"),
            ):
                if row[key] is not None:
                    args[name] = row[key]
            if row["input_dims"] is not None:
                args["Input Dims"] = json.loads(row["input_dims"])
                args["Input type"] = json.loads(row["input_types"])
            yield _event(_CATEGORY[row["category"]], row, row["pid"], row["tid"], args)
            if row["category"] == "runtime":
                yield _flow("s", row, row["pid"], row["tid"])
    for batch in made["device_event"].to_batches(65_536):
        for row in batch.to_pylist():
            args = {
                "device": 0,
                "context": 1,
                "stream": row["stream_id"],
                "correlation": row["correlation_id"],
                "External id": row["external_id"],
                "registers per thread": 32,
                "shared memory": 0,
                "grid": [132, 1, 1],
                "block": [128, 1, 1],
            }
            yield _event(_DEVICE_CATEGORY[row["kind"]], row, 0, row["stream_id"], args)
            yield _flow("f", row, 0, row["stream_id"])


def _flow(end: str, row: dict[str, Any], pid: int, tid: int) -> dict[str, Any]:
    """One end of the arrow from a launching call to what it launched."""
    return {
        "ph": end,
        "id": row["correlation_id"],
        "pid": pid,
        "tid": tid,
        "ts": (row["start_ns"] - _BASE_NS) / 1000,
        "cat": "ac2g",
        "name": "ac2g",
        "bp": "e",
    }


def _event(category: str, row: dict[str, Any], pid: int, tid: int, args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": row["name"],
        "pid": pid,
        "tid": tid,
        "ts": (row["start_ns"] - _BASE_NS) / 1000,
        "dur": row["dur_ns"] / 1000,
        "args": args,
    }
