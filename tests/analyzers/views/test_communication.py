"""Views of communication on runs worked out by hand. Times in nanoseconds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.views.ranks import worst
from chopper.storage import manifest as m
from chopper.storage.run import Run
from chopper.tables import TABLES
from chopper.views import view
from tests.analyzers.make import answered, kernel, kernels, span, spans, steps, table

GEMM = "sm90_gemm"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32"


def attributed(
    ranks: list[dict[str, pa.Table]], *, device: str | None = None, hosts: list[str] | None = None
) -> Attribution:
    """Attribute ranks given as tables; all on one host, and on devices of a name with peaks."""
    devices = (
        [] if device is None else [m.Device(device_id=i, name=device) for i in range(len(ranks))]
    )
    parts = [
        m.RankManifest(
            rank=rank,
            world_size=len(ranks),
            hostname="one" if hosts is None else hosts[rank],
            status="imported",
            device_id=0,
            devices=devices,
        )
        for rank in range(len(ranks))
    ]
    made = {(rank, name): t for rank, tables in enumerate(ranks) for name, t in tables.items()}
    manifest = m.RunManifest(chopper_version="0", kind="imported", name="by hand", ranks=parts)
    return pipeline.attribute(Run(manifest, None, made, source="by hand"))


def recorded(
    row: int, *, sequence: int | None = None, size: int = 2, **more: Any
) -> dict[str, Any]:
    return {
        "source": "device_event",
        "row": row,
        "collective": "allreduce",
        "in_elements_count": 1000,
        "out_elements_count": 1000,
        "dtype": "Float",
        "group_size_count": size,
        "group_name": "0",
        "group_ranks": str(list(range(size))),
        "sequence_id": sequence,
        **more,
    }


def tables(
    host: pa.Table, device: pa.Table, step: pa.Table, collective: list[dict[str, Any]]
) -> dict[str, pa.Table]:
    return {
        "host_span": host,
        "device_event": device,
        "step": step,
        "collective": table("collective", collective),
    }


def loading_rank(late: int) -> dict[str, pa.Table]:
    """Two steps: load a batch (``late`` longer), compute 100, all-reduce until 1000·(step + 1)."""
    host, device, collective = [], [], []
    for step in range(2):
        t = 1000 * step
        ready = t + 200 + late
        host += [
            span(t, t + 1000, f"ProfilerStep#{step}", "annotation"),
            span(t + 10, ready, "enumerate(DataLoader)#_BaseDataLoaderIter.__next__"),
            span(ready, ready + 4, "cudaLaunchKernel", "runtime", correlation_id=2 * step + 1),
            span(ready + 5, ready + 9, "cudaLaunchKernel", "runtime", correlation_id=2 * step + 2),
        ]
        device += [
            kernel(ready + 10, ready + 110, GEMM, correlation_id=2 * step + 1),
            kernel(ready + 110, t + 1000, ALL_REDUCE, stream=20, correlation_id=2 * step + 2),
        ]
        collective.append(recorded(2 * step + 1, sequence=step))
    return tables(spans(*host), kernels(*device), steps((0, 1000), (1000, 2000)), collective)


def test_a_late_loader_is_named_with_what_it_cost() -> None:
    # Rank 1 loads 300 ns longer in both steps: rank 0 waits 300 ns twice.
    attribution = attributed([loading_rank(0), loading_rank(300)])
    rows = view(attribution, "collectives").to_pylist()
    assert [(r["step"], r["straggler_rank"], r["waiting_ns"]) for r in rows] == [
        (0, 1, 300),
        (1, 1, 300),
    ]
    late = view(attribution, "stragglers").to_pylist()
    assert [(r["straggler_rank"], r["cause"]) for r in late] == [(1, "idle.preparation.data")]
    assert late[0]["waiting_ns"] == 600
    assert late[0]["exposed_waiting_ns"] == 600
    assert late[0]["excess_ns"] == 600
    assert late[0]["collective_count"] == late[0]["late_collective_count"] == 2
    assert late[0]["share_ratio"] == late[0]["late_ratio"] == 1.0
    found = worst(view(attribution, "stragglers"))
    assert found is not None
    assert (found.rank, found.cause, found.excess_ns) == (1, "idle.preparation.data", 600)


def test_a_late_loader_is_named_in_the_last_steps_alone() -> None:
    """As where the first of the traced steps are of another kind."""
    late = worst(view(attributed([loading_rank(0), loading_rank(300)]).of_steps([1]), "stragglers"))
    assert late is not None
    assert (late.rank, late.cause, late.excess_ns) == (1, "idle.preparation.data", 300)


def test_waiting_in_the_view_is_the_waiting_of_the_causes() -> None:
    attribution = attributed([loading_rank(0), loading_rank(300), loading_rank(120)])
    causes = {c.id: c.time_ns for c in attribution.causes()}
    for name in ("collectives", "stragglers"):
        total = sum(r["exposed_waiting_ns"] for r in view(attribution, name).to_pylist())
        # Shares of the waiting are rounded per row.
        assert total == pytest.approx(causes["communication.wait"], abs=4)


def test_whoever_began_later_has_no_cause_here() -> None:
    # Without steps, rank 1's first event, of host or device, is 300 later: so its window begins
    # 300 later, and it did nothing longer than rank 0.
    def rank(begin: int) -> dict[str, pa.Table]:
        device = kernels(
            kernel(begin, begin + 100, GEMM), kernel(begin + 100, 1000, ALL_REDUCE, 20)
        )
        host = spans(span(begin, begin + 1, "aten::empty"))
        return tables(host, device, TABLES["step"].empty(), [recorded(1)])

    rows = view(attributed([rank(0), rank(300)]), "stragglers").to_pylist()
    assert [(r["straggler_rank"], r["cause"], r["waiting_ns"]) for r in rows] == [(1, None, 300)]


def test_whoever_began_with_the_others_waited_for_a_launch() -> None:
    # Both hosts are traced from 0; what rank 1's device waited for until 300 was not recorded.
    def rank(begin: int) -> dict[str, pa.Table]:
        device = kernels(
            kernel(begin, begin + 100, GEMM), kernel(begin + 100, 1000, ALL_REDUCE, 20)
        )
        host = spans(span(0, 1, "aten::empty"))
        return tables(host, device, TABLES["step"].empty(), [recorded(1)])

    rows = view(attributed([rank(0), rank(300)]), "stragglers").to_pylist()
    told = [(r["straggler_rank"], r["cause"], r["waiting_ns"]) for r in rows]
    assert told == [(1, "idle.unlaunched", 300)]


def test_bandwidths_are_those_of_nccl_tests() -> None:
    # 4 ranks, all-gather of 1e6 floats in all: 4e6 bytes in 100 µs = 40 GB/s, times 3/4 = 30 GB/s;
    # V100 SXM2's links carry 150 GB/s in one direction.
    def rank(number: int) -> dict[str, pa.Table]:
        entry = recorded(
            0,
            size=4,
            sequence=7,
            collective="_allgather_base",
            in_elements_count=250_000,
            out_elements_count=1_000_000,
        )
        device = kernels(kernel(number * 10_000, 130_000, "ncclDevKernel_AllGather_RING_LL", 20))
        return tables(spans(span(0, 1, "aten::empty")), device, TABLES["step"].empty(), [entry])

    made = attributed([rank(i) for i in range(4)], device="Tesla V100-SXM2-32GB")
    (row,) = view(made, "collectives").to_pylist()
    assert (row["collective"], row["ranks"], row["rank_count"]) == ("allgather", "0-3", 4)
    assert (row["straggler_rank"], row["waiting_ns"]) == (3, 30_000 + 20_000 + 10_000)
    assert (row["transfer_ns"], row["message_bytes"]) == (100_000, 4_000_000)
    assert row["algorithm_bytes_per_s"] == pytest.approx(40e9)
    assert row["bus_bytes_per_s"] == pytest.approx(30e9)
    assert row["at_peak_ratio"] == pytest.approx(0.2)


def test_an_all_gather_of_equal_sides_has_no_size() -> None:
    # One side holds the parts of all ranks; 1000 in and 1000 out is some other count.
    def rank(begin: int) -> dict[str, pa.Table]:
        device = kernels(kernel(begin, 1000, "ncclDevKernel_AllGather", 20))
        entry = recorded(0, collective="allgather", sequence=1)
        return tables(spans(span(0, 1, "aten::empty")), device, TABLES["step"].empty(), [entry])

    (row,) = view(attributed([rank(0), rank(100)]), "collectives").to_pylist()
    assert row["message_bytes"] is row["bus_bytes_per_s"] is None
    assert row["waiting_ns"] == 100


def test_exposed_and_hidden_time_by_group() -> None:
    # The all-reduce runs [100, 400], from the first event on; computing hides [150, 250] of it.
    # Exposed is 200 of the 300 of each rank.
    def rank(_: int) -> dict[str, pa.Table]:
        device = kernels(kernel(150, 250, GEMM), kernel(100, 400, ALL_REDUCE, 20))
        host = spans(span(100, 101, "aten::empty"))
        return tables(host, device, TABLES["step"].empty(), [recorded(0)])

    (row,) = view(attributed([rank(0), rank(1)]), "exposed_communication").to_pylist()
    assert (row["collective"], row["ranks"], row["group"]) == ("allreduce", "0-1", "0")
    assert (row["event_count"], row["elapsed_ns"]) == (2, 600)
    assert (row["exposed_ns"], row["hidden_ns"]) == (400, 200)
    assert row["no_peak_ns"] == 400
    assert row["share_ratio"] == pytest.approx(400 / 600)


def overlapped(instances: list[tuple[int, int]]) -> dict[str, pa.Table]:
    """Kernels of (time alone, time beside the all-reduce), one every 1000."""
    device = []
    for i, (alone, beside) in enumerate(instances):
        t = 1000 * i
        device.append(kernel(t, t + alone + beside, GEMM))
        if beside:
            device.append(kernel(t + alone, t + alone + beside, ALL_REDUCE, 20))
    return tables(spans(span(0, 1, "aten::empty")), kernels(*device), TABLES["step"].empty(), [])


def test_communication_of_another_device_of_the_rank_is_not_beside() -> None:
    made = overlapped([(100, 0), (0, 150)] * 3)
    devices = [1 if name == ALL_REDUCE else 0 for name in made["device_event"]["name"].to_pylist()]
    at = made["device_event"].schema.get_field_index("device_id")
    field = made["device_event"].schema.field(at)
    made["device_event"] = made["device_event"].set_column(at, field, pa.array(devices, field.type))
    (row,) = view(attributed([made]), "overlap").to_pylist()
    assert (row["overlap_ns"], row["beside_instance_count"]) == (0, 0)
    assert row["slowdown_factor"] is None


def test_overlap_and_its_price() -> None:
    # Alone 100; beside communication 150, all of it.
    pairs = [(100, 0), (0, 150)] * 3
    (row,) = view(attributed([overlapped(pairs)]), "overlap").to_pylist()
    assert (row["instance_count"], row["overlap_ns"], row["time_ns"]) == (6, 450, 750)
    assert row["overlap_ratio"] == pytest.approx(0.6)
    assert (row["median_alone_ns"], row["median_beside_ns"]) == (100, 150)
    assert row["slowdown_factor"] == pytest.approx(1.5)
    assert row["spearman"] == pytest.approx(1.0)
    assert row["pearson"] == pytest.approx(1.0)


def test_no_correlation_is_told_of_few_or_equal_values() -> None:
    few = view(attributed([overlapped([(100, 0), (0, 150)])]), "overlap").to_pylist()[0]
    same = view(attributed([overlapped([(50, 50)] * 9)]), "overlap").to_pylist()[0]
    assert few["spearman"] is few["pearson"] is None
    assert same["spearman"] is same["pearson"] is None
    assert same["slowdown_factor"] is None


def test_correlations_equal_their_definitions() -> None:
    rng = np.random.default_rng(3)
    count = 60
    dur, group = rng.integers(10, 19, count), rng.integers(0, 3, count)
    shared = rng.integers(0, 10, count)
    start, row = 1000 * np.arange(count), np.arange(2 * count)
    one, op = np.zeros(2 * count, dtype=np.int64), np.tile(group.astype(str), 2)
    events = {
        "rank": one,
        "row": row,
        "device_id": one,
        "step_index": one,
        "kernel": op,
        "op": op,
        "start_ns": np.tile(start, 2),
        "dur_ns": np.concatenate([dur, shared]),
        "op_row": pa.nulls(2 * count, pa.int64()),
        "work_class": ["compute"] * count + ["communication"] * count,
    }
    found = answered(
        "overlap",
        step_event=pa.table(events),
        event_link=pa.table({name: events[name] for name in ("rank", "row", "step_index")}),
        communication=pa.table({"rank": one[:count], "event_row": row[count:]}),
        selection=pa.table({"rank": [0], "step_index": [0], "in_step_time": [True]}),
        host_span=pa.table({"rank": [0], "row": [0], "dur_ns": [0], "input_dims": [""]}),
    )

    def ranked(values: np.ndarray) -> list[float]:
        return [sum(values < v) + (sum(values == v) - 1) / 2 for v in values]

    assert len(found) == 3
    for line in found:
        mine = group == int(line["op"])
        ratio, slow = shared[mine] / dur[mine], dur[mine]
        assert line["overlap_ns"] == shared[mine].sum()
        assert line["pearson"] == pytest.approx(np.corrcoef(ratio, slow)[0, 1])
        expected = np.corrcoef(ranked(ratio), ranked(slow))[0, 1]
        assert line["spearman"] == pytest.approx(expected)


def test_lead_is_the_latest_start_less_ones_own() -> None:
    rows = view(attributed([loading_rank(0), loading_rank(300)]), "lead").to_pylist()
    told = {(r["rank"], r["step"], r["kind"]): r["median_ns"] for r in rows}
    assert told == {
        (0, 0, "collective"): 300,
        (0, 1, "collective"): 300,
        (0, 0, "kernel"): 300,
        (0, 1, "kernel"): 300,
        (1, 0, "collective"): 0,
        (1, 1, "collective"): 0,
        (1, 0, "kernel"): 0,
        (1, 1, "kernel"): 0,
    }


def test_a_collective_is_of_the_step_in_which_it_begins() -> None:
    """The host launches step 1's all-reduce while the device still runs step 0, which hides it."""
    host = spans(
        *(span(1000 * s, 1000 * s + 1000, f"ProfilerStep#{s}", "annotation") for s in range(2)),
        span(10, 14, "cudaLaunchKernel", "runtime", correlation_id=1),
        span(1010, 1014, "cudaLaunchKernel", "runtime", correlation_id=2),
        span(1020, 1024, "cudaLaunchKernel", "runtime", correlation_id=3),
    )
    device = kernels(
        kernel(20, 1500, GEMM, correlation_id=1),
        kernel(1100, 1400, ALL_REDUCE, stream=20, correlation_id=2),
        kernel(1500, 1900, GEMM, correlation_id=3),
    )
    rank = tables(host, device, steps((0, 1000), (1000, 2000)), [recorded(1, sequence=0)])
    attribution = attributed([rank, rank])
    assert [r["step"] for r in view(attribution, "collectives").to_pylist()] == [0]
    lead = view(attribution, "lead").to_pylist()
    assert {r["step"] for r in lead if r["kind"] == "collective"} == {0}


def test_a_single_rank_has_no_such_views() -> None:
    attribution = attributed([loading_rank(0)])
    for name in ("collectives", "stragglers", "lead"):
        assert view(attribution, name).num_rows == 0
    assert view(attribution, "exposed_communication").num_rows == 1


def test_a_clock_that_is_ahead_makes_no_straggler() -> None:
    ahead = 5_000_000_000

    def moved(given: dict[str, pa.Table]) -> dict[str, pa.Table]:
        found = dict(given)
        for name in ("host_span", "device_event", "step"):
            for column in ("start_ns", "end_ns"):
                at = given[name].schema.get_field_index(column)
                if at >= 0:
                    later = pa.array(given[name][column].to_numpy() + ahead)
                    found[name] = found[name].set_column(at, given[name].schema.field(at), later)
        return found

    ranks = [loading_rank(0), moved(loading_rank(300))]
    attribution = attributed(ranks, hosts=["one", "two"])
    rows = view(attribution, "stragglers").to_pylist()
    assert [(r["straggler_rank"], r["waiting_ns"]) for r in rows] == [(1, 600)]
    leads = view(attribution, "lead").to_pylist()
    assert {r["median_ns"] for r in leads} == {0, 300}
