"""Injections written as traces by hand, without the model: what was put in comes out, exactly.

Each trace exists with and without the injection; what differs between the two attributions is the
injection's time where nothing hid it, worked out in the comments.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from chopper.views import view
from tests.kineto_writer import Trace

US, MS = 1_000, 1_000_000
GEMM = "sm80_xmma_gemm_f32f32_f32f32"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
SQUARE = [[2048, 2048], [2048, 2048]]


def product(trace: Trace, host: int, start: int, length: int, tid: int | None = None) -> int:
    """A matrix product called at ``host`` that runs from ``start``; returns its end."""
    op = trace.op("aten::mm", host, 60 * US, shapes=SQUARE, tid=tid)
    trace.launch(GEMM, host + 10 * US, 10 * US, kernel_at=start, kernel_for=length, op=op)
    if tid is not None:
        trace.events[-2]["tid"] = tid
    return start + length


def attributed(path: Path, *traces: Trace) -> Attribution:
    path.mkdir()
    for i, trace in enumerate(traces):
        (path / f"rank{i}.json").write_bytes(trace.encode())
    return pipeline.attribute(path)


def sums(attribution: Attribution, rank: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in attribution.pieces.select(["rank", "cause", "time_ns"]).to_pylist():
        if row["rank"] == rank:
            found[row["cause"]] = found.get(row["cause"], 0) + row["time_ns"]
    return found


def more(injected: Attribution, plain: Attribution, rank: int = 0) -> dict[str, int]:
    a, b = sums(injected, rank), sums(plain, rank)
    return {c: a.get(c, 0) - b.get(c, 0) for c in {*a, *b} if a.get(c, 0) != b.get(c, 0)}


def prefetching(stall: int) -> Trace:
    """Two products; the next batch is fetched while they run, and its copy is what follows."""
    trace, begin = Trace(rank=0, world=1), 0
    for step in range(4):
        end = product(trace, begin + 100 * US, begin + 500 * US, 1 * MS)
        end = product(trace, begin + 200 * US, end, 1 * MS)
        host = begin + 400 * US
        wait = 200 * US + (stall if step == 2 else 0)
        trace.annotation(
            "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", host, wait
        )
        host += wait
        copy = max(end, host + 20 * US)
        trace.launch(
            "Memcpy HtoD (Pinned -> Device)",
            *(host, 20 * US),
            kernel_at=copy,
            kernel_for=300 * US,
            kind="memcpy",
            stream=20,
            args={"bytes": 4 << 20},
        )
        begin_next = copy + 300 * US + 200 * US
        trace.step(step, begin, begin_next - begin)
        begin = begin_next
    return trace


def test_a_stall_within_a_prefetch_counts_where_no_product_hides_it(tmp_path: Path) -> None:
    # The loader stalls for 6 ms from 0.6 ms on; the products run until 2.5 ms and hide 1.9 ms of
    # it, the copy's launch call, which was hidden before, takes 20 µs more.
    with_it = attributed(tmp_path / "a", prefetching(6 * MS))
    without = attributed(tmp_path / "b", prefetching(0))
    assert more(with_it, without) == {
        "idle.preparation.data": 6 * MS - 1_900 * US,
        "idle.call": 20 * US,
    }


def collecting(rank: int, gc: int) -> Trace:
    """Rank 1 collects garbage before its second product; both meet in an all-reduce."""
    trace, begin = Trace(rank=rank, world=2, pid=100 + rank), 0
    for step in range(4):
        mine, late = (gc if rank == 1 else 0), gc
        end = product(trace, begin + 100 * US, begin + 200 * US, 1 * MS)
        host = begin + 200 * US
        if mine:
            trace.annotation("chopper::gc", host, mine)
        host += mine
        end = product(trace, host, max(end, host + 20 * US), 1 * MS)
        last = max(begin + 1_200 * US, begin + 220 * US + late) + 1 * MS
        told = {
            "Collective name": "allreduce",
            "In msg nelems": 1 << 20,
            "Out msg nelems": 1 << 20,
            "Group size": 2,
            "dtype": "Float",
            "Process Group Name": "0",
            "Process Group Ranks": "[0, 1]",
            "Seq": step,
        }
        op = trace.op("record_param_comms", host + 70 * US, 50 * US, collective=told)
        trace.launch(
            ALL_REDUCE,
            *(host + 80 * US, 10 * US),
            kernel_at=end,
            kernel_for=last + 2 * MS - end,
            op=op,
            stream=13,
            args=told,
        )
        trace.step(step, begin, last + 2 * MS + 100 * US - begin)
        begin = last + 2 * MS + 100 * US
    return trace


def test_lateness_by_garbage_collection_is_the_other_ranks_wait_and_is_named(
    tmp_path: Path,
) -> None:
    # 5 ms in each of 4 steps, of which the first product hides 1 ms, but for the 20 µs that the
    # launch after it takes.
    with_it = attributed(tmp_path / "a", *(collecting(r, 5 * MS) for r in (0, 1)))
    without = attributed(tmp_path / "b", *(collecting(r, 0) for r in (0, 1)))
    exposed = 4 * (5 * MS - 1 * MS)
    assert more(with_it, without, 0) == {"communication.wait": exposed + 4 * 20 * US}
    late = more(with_it, without, 1)
    assert late["idle.preparation.gc"] == exposed
    assert sum(late.values()) == exposed + 4 * 20 * US
    first: dict[str, Any] = view(with_it, "stragglers").to_pylist()[0]
    assert (first["straggler_rank"], first["cause"]) == (1, "idle.preparation.gc")
    assert first["waiting_ns"] == pytest.approx(exposed, rel=0.01)


def reading_back(sync: bool) -> Trace:
    """Two products forward, two backward; a hook of backward reads a value after the first."""
    trace, begin, engine = Trace(rank=0, world=1), 0, 99
    for step in range(3):
        end = product(trace, begin + 100 * US, begin + 200 * US, 2 * MS)
        host = begin + 300 * US
        for node in range(2):
            opened = host
            end = product(trace, host, max(end, host + 20 * US), 2 * MS, tid=engine)
            host += 100 * US
            if sync and node == 0:
                item = trace.op("aten::item", host, end + 50 * US - host, tid=engine)
                trace.launch(
                    "Memcpy DtoH (Device -> Pageable)",
                    *(host + 10 * US, 10 * US),
                    kernel_at=end,
                    kernel_for=5 * US,
                    op=item,
                    kind="memcpy",
                    args={"bytes": 4},
                )
                trace.events[-2]["tid"] = engine
                trace.call("cudaStreamSynchronize", host + 25 * US, end + 40 * US - host - 25 * US)
                trace.events[-1]["tid"] = engine
                host = end + 50 * US
            name = "autograd::engine::evaluate_function: MmBackward0"
            trace.op(name, opened, host - opened, tid=engine, sequence=node, forward_tid=trace.tid)
        trace.step(step, begin, end + 200 * US - begin)
        begin = end + 200 * US
    return trace


def test_reading_a_value_within_backward_is_synchronization(tmp_path: Path) -> None:
    # Per step, after the first backward product: 5 µs of copy, 45 µs until .item() returns, 10 µs
    # until the next product's call and 10 µs of that call.
    with_it = attributed(tmp_path / "a", reading_back(True))
    without = attributed(tmp_path / "b", reading_back(False))
    found = more(with_it, without)
    assert found == {
        "copy.device_to_host": 3 * 5 * US,
        "idle.preparation.synchronization": 3 * 45 * US,
        "idle.preparation.dispatch": 3 * 10 * US,
        "idle.call": 3 * 10 * US,
    }
    phases = {
        row["phase"]
        for row in with_it.pieces.select(["cause", "phase"]).to_pylist()
        if row["cause"] == "idle.preparation.synchronization"
    }
    assert phases == {"backward"}
