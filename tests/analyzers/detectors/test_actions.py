"""Patterns are seen where they cost time, nowhere else, and what mending gives back is right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest

import chopper
from chopper import pipeline
from chopper.analyzers import actions, detectors
from chopper.analyzers.actions import Material
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.detectors import Sighting, host, kernels, ranks
from chopper.analyzers.replay.replay import Replay
from chopper.analyzers.trace.names import is_program_frame
from chopper.analyzers.views import ranks as rank_views
from chopper.analyzers.views.ranks import Worst
from chopper.collectors.snapshot import tables_of
from chopper.errors import UsageError
from chopper.reports import actions as report
from chopper.storage.streams import write_table
from tests.analyzers import make
from tests.analyzers.replay.make import tables, two_ranks
from tests.analyzers.views.test_allocator_replay import UNSTEADY_US, sharded
from tests.kineto_writer import Trace
from tests.known_causes.model.job import simulate
from tests.known_causes.model.plan import Clock, Dose, Plan
from tests.known_causes.model.writer import write

MS = 1_000_000
POWER_CAP = 4


def attributed(folder: Path, plan: Plan) -> Attribution:
    write(simulate(plan), folder)
    return pipeline.attribute(folder)


def found(run: Attribution) -> list[actions.Action]:
    tried = actions.actions(run, Replay(run))
    assert tried.failed == {}
    return tried.ranked


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("data_loading", Plan(data=Dose(5 * MS))),
        ("allocator_retries", Plan(allocator=Dose(4 * MS))),
        ("launch_bound", Plan(dispatch=Dose(400_000))),
        ("profiler_overhead", Plan(profiler=Dose(4 * MS))),
        ("garbage_collection", Plan(collection=Dose(4 * MS))),
        ("python_code", Plan(python=Dose(4 * MS))),
        ("late_rank", Plan(slow=Dose(0.5, ranks=(1,)))),
        (
            "blocking_reads",
            Plan(ahead=True, synchronization=Dose(400_000), synchronization_count=8),
        ),
        ("reduced_clock", Plan(clocks=(Clock(0.7, POWER_CAP),))),
    ],
)
def test_an_action_gives_back_what_the_same_job_without_its_pattern_takes_less(
    tmp_path: Path, name: str, plan: Plan
) -> None:
    run = attributed(tmp_path / "with", plan)
    without = attributed(tmp_path / "without", Plan(ahead=plan.ahead))
    first = found(run)[0]
    assert first.detector == name
    times = [sum(r.step_time_ns()) / len(r.step_time_ns()) for r in (run, without)]
    assert first.saved_ns == pytest.approx(times[0] - times[1], rel=0.03)
    assert first.saved_ratio == pytest.approx(first.saved_ns / times[0])
    assert first.ci95_ns is not None
    assert first.ci95_ns[0] < first.saved_ns < first.ci95_ns[1]


@pytest.mark.parametrize("unsteady", [True, False])
def test_advice_on_power_caps_names_the_allocators_replay_where_it_applies(
    tmp_path: Path, unsteady: bool
) -> None:
    """Delays of 5 to 75 µs decide which block serves a request; equal ones decide nothing."""
    write(simulate(Plan(clocks=(Clock(0.7, POWER_CAP),))), tmp_path)
    snapshot = sharded(UNSTEADY_US if unsteady else (5,)).snapshot()
    for name, table in tables_of(snapshot, "here").items():
        write_table(tmp_path / "rank-00000", name, table.to_pydict())
    run = pipeline.attribute(tmp_path)
    first = found(run)[0]
    # Two gathers of 30 MiB at a time and a segment of 20: worked out beside the replay's tests.
    said = "12 frees of rank 0 waited for another stream"
    fixed = "as in FSDP2 (fully_shard), it always peaks at 80.0 MiB"
    assert (said in first.evidence["how"]) == (fixed in first.evidence["how"]) == unsteady
    notes = chopper.whatif(run, clock="reference").notes
    assert any(said in note for note in notes) == unsteady


def on_host(*spans: dict[str, Any], until: int) -> dict[str, pa.Table]:
    """A rank without a device: spans in ms, in five steps alike."""
    moved = [
        span | {"start_ns": (span["start_ns"] + i * until) * MS, "dur_ns": span["dur_ns"] * MS}
        for i in range(5)
        for span in spans
    ]
    return tables(
        moved, [], make.steps(*((i * until * MS, (i + 1) * until * MS) for i in range(5)))
    )


def sent(start: int, end: int, name: str, call: str, peer: int = -1) -> list[dict[str, Any]]:
    """A collective that the program waits for at once, or an exchange with one rank."""
    inputs = {} if peer < 0 else {"concrete_inputs": f'["", "", "{peer}", "0"]'}
    worker = {} if peer >= 0 else {"tid": 9}
    issue = make.span(start, end if peer >= 0 else start + 1, f"c10d::{call}", **inputs)
    return [issue, make.span(start, end, f"gloo:{name}", "annotation", **worker)]


def test_work_that_is_uneven_is_predicted_as_shared_evenly() -> None:
    # One product of 10 ms on rank 0 and four on rank 1; evenly, 25 each of a step of 50.
    reduce = "all_reduce", "allreduce_"
    products = [make.span(10 * i, 10 * i + 10, "aten::mm") for i in range(4)]
    last = make.span(45, 50, "aten::add")
    run = two_ranks(
        on_host(products[0], *sent(11, 45, *reduce), last, until=50),
        on_host(*products, *sent(41, 45, *reduce), last, until=50),
    )
    [action] = found(run)
    assert action.detector == "uneven_work"
    assert (action.evidence["rank"], action.evidence["what"]) == (
        1,
        "Uneven work: rank 1 has 3.0× the work of the others",
    )
    # Products and sums together: 45 and 15 ms.
    assert action.evidence["work_factor"] == pytest.approx(3)
    assert action.saved_ns == pytest.approx(15 * MS, rel=0.02)


def over_link(link_bytes_per_s: float | None) -> Attribution:
    """Attribute steps of 50 ms: a product of 10, an all-reduce of 400 kB until 50."""
    size = {"input_dims": "[[100000]]", "input_types": '["float"]'}
    issue, transfer = sent(10, 50, "all_reduce", "allreduce_")
    rank = on_host(make.span(0, 10, "aten::mm"), issue, transfer | size, until=50)
    return two_ranks(rank, rank, link_bytes_per_s=link_bytes_per_s)


def test_a_full_link_is_mended_by_fewer_bytes_and_a_slow_transfer_by_overlap() -> None:
    # 400 kB at 12.5 MB/s take 32 of the 40 ms.
    run = over_link(12.5e6)
    leaves = {row.id: row.time_ns for row in run.leaves()}
    assert leaves["communication.transfer.at_peak"] == 2 * 5 * 32 * MS
    assert leaves["communication.transfer.below_peak"] == 2 * 5 * 8 * MS
    full, exposed = found(run)
    assert (full.detector, exposed.detector) == ("link_bandwidth", "exposed_transfer")
    # All messages are of one size, so all of the 40 ms counts as the bytes'.
    assert full.saved_ns == pytest.approx(20 * MS, rel=0.02)
    assert exposed.saved_ns == pytest.approx(8 * MS, rel=0.02)
    assert chopper.whatif(run, link="25MB/s").predicted_step_ns == pytest.approx(30 * MS, rel=0.02)
    # Of a link that is not known, nothing is said to be full.
    [exposed] = found(over_link(None))
    assert exposed.detector == "exposed_transfer"
    assert exposed.saved_ns == pytest.approx(40 * MS, rel=0.02)


def test_the_place_of_a_full_link_is_what_takes_its_time_not_what_is_frequent() -> None:
    # Two broadcasts of 5 ms each, and an all-reduce of 30.
    size = {"input_dims": "[[50000]]", "input_types": '["float"]'}
    spans = [make.span(0, 5, "aten::mm")]
    for start, end, name in ((5, 10, "broadcast"), (10, 15, "broadcast"), (15, 45, "all_reduce")):
        issue, transfer = sent(start, end, name, f"{name.replace('_', '')}_")
        spans += [issue, transfer | size]
    rank = on_host(*spans, until=50)
    full = found(two_ranks(rank, rank, link_bytes_per_s=20e6 / 3))[0]
    assert (full.detector, full.where.op) == ("link_bandwidth", "gloo:all_reduce")


def test_stages_that_wait_for_each_other_are_a_pipeline() -> None:
    # Each stage works 40 of 80 ms, one after the other.
    first = make.span(0, 20, "aten::mm"), make.span(60, 80, "aten::mm")
    last = make.span(20, 60, "aten::mm")
    run = two_ranks(
        on_host(
            first[0],
            *sent(20, 21, "send", "send", 1),
            *sent(21, 60, "recv", "recv_", 1),
            first[1],
            until=80,
        ),
        on_host(*sent(0, 20, "recv", "recv_", 0), last, *sent(60, 61, "send", "send", 0), until=80),
    )
    [action] = found(run)
    assert (action.detector, action.evidence["what"]) == (
        "uneven_work",
        "Pipeline bubbles: stages wait for each other",
    )
    assert action.saved_ns == pytest.approx(40 * MS, rel=0.1)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(),
        Plan(ahead=True),
        # The host is ahead of the device: what it waits for, or takes longer for, is hidden.
        Plan(ahead=True, data=Dose(5 * MS)),
        Plan(ahead=True, allocator=Dose(2 * MS)),
        Plan(ahead=True, dispatch=Dose(200_000)),
    ],
)
def test_nothing_is_said_where_mending_gives_nothing_back(tmp_path: Path, plan: Plan) -> None:
    run = attributed(tmp_path / "run", plan)
    tried = actions.actions(run, Replay(run))
    # Transfers are exposed in the job as it is: what its data, host and allocator do is hidden.
    assert {a.detector for a in tried.ranked} <= {"exposed_transfer"}


@pytest.mark.parametrize(
    ("trace", "name"),
    [
        ("kineto/v100-resnet50-dataloader0-2021.json.gz", "data_loading"),
        ("hta/v100-ddp-rank1of2-memory-events.json.gz", "optimizer_loops"),
        ("hta/a100-recsys-rank3of8.json.gz", "blocking_reads"),
        ("hta/a100-ddp-rank0of2-nccl-metadata.json.gz", "launch_bound"),
        ("param/v100-dlrm-8ranks", "late_rank"),
    ],
)
def test_actions_of_real_traces(traces_dir: Path, trace: str, name: str) -> None:
    run = pipeline.attribute(traces_dir / trace)
    ranked = found(run)
    assert name in [a.detector for a in ranked]
    assert [a.rank_ns for a in ranked] == sorted((a.rank_ns for a in ranked), reverse=True)
    assert all(0.01 < a.saved_ratio < 1 for a in ranked)


@pytest.mark.parametrize(
    ("trace", "name", "evidence"),
    [
        (
            "torch-profiling-tutorial/h100-transformer-integer-us-python-stacks-a.json.gz",
            "unfused_attention",
            {"calls": 3, "dims": "16 × 8 × 128 × 128"},
        ),
        (
            "tracelens/mi300x-xdit-flux1-inference-python-stacks-large.json.gz",
            "unfused_attention",
            {"dims": "1 × 64 × 512 × 512"},
        ),
        ("hta/a100-alexnet-cuda-sync.json.gz", "pageable_copies", {"copies": 16, "pageable": 16}),
        (
            "hta/a100-recsys-rank3of8.json.gz",
            "reduced_precision",
            {"now": "fp32", "other": "tf32", "factor": 8.0},
        ),
        ("hta/a100-recsys-rank3of8.json.gz", "misaligned_products", {"kernels": 26}),
    ],
)
def test_patterns_that_cost_nothing_in_that_trace_are_seen(
    traces_dir: Path, trace: str, name: str, evidence: dict[str, object]
) -> None:
    run = pipeline.attribute(traces_dir / trace)
    seen = actions.sightings(name, Material(run, Replay(run)))
    assert any(evidence.items() <= s.evidence.items() for s in seen)


@pytest.mark.parametrize(
    "trace",
    [
        "param/rtx2080ti-linear-train.json.gz",  # a softmax after a linear layer
        "tracelens/b300-moe-unit.json.gz",  # a softmax that routes tokens
        "tracelens/h100-bert-small-inference.json.gz",  # attention is fused
    ],
)
def test_other_softmaxes_are_no_attention(traces_dir: Path, trace: str) -> None:
    run = pipeline.attribute(traces_dir / trace)
    assert [*actions.sightings("unfused_attention", Material(run, Replay(run)))] == []


@pytest.mark.parametrize(
    ("trace", "name"),
    [
        ("hta/a100-alexnet-cuda-sync.json.gz", "allocator_retries"),
        ("hta/a100-overlaid-critical-path-category.json.gz", "allocator_retries"),
        ("aorta/mi350x-rocprofiler-sdk-backend-train-step.json.gz", "launch_bound"),
    ],
)
def test_one_step_may_be_a_first_iteration_and_is_claimed_for_nothing_of_the_host(
    traces_dir: Path, trace: str, name: str
) -> None:
    run = pipeline.attribute(traces_dir / trace)
    tried = actions.actions(run, Replay(run))
    reasons = {action.detector: reason for action, reason in tried.dropped}
    assert "fewer than 3 steps were traced" in reasons[name]
    assert name not in [a.detector for a in tried.ranked]
    assert all(detectors.detector(a.detector).in_every_step for a in tried.ranked)
    _, [said] = report.tell(run, tried, "step")
    assert said.startswith("Seen, but not certain: ")
    assert "fewer than 3 steps were traced" in said


@pytest.mark.parametrize(
    ("steps", "first", "is_claimed"), [(1, 0, False), (2, 1, False), (3, 0, True), (2, 10, True)]
)
def test_steps_tell_what_recurs_by_their_count_or_their_numbers(
    tmp_path: Path, steps: int, first: int, is_claimed: bool
) -> None:
    trace = Trace()
    for number in range(first, first + steps):
        at = number * 1_000_000
        trace.step(number, at, 1_000_000)
        op = trace.op("aten::mm", at + 10_000, 700_000)
        trace.call("cudaMalloc", at + 20_000, 600_000)
        call, kernel = at + 630_000, at + 660_000
        trace.launch("gemm", call, 10_000, kernel_at=kernel, kernel_for=200_000, op=op)
    (tmp_path / "trace.json").write_bytes(trace.encode())
    run = pipeline.attribute(tmp_path / "trace.json")
    tried = actions.actions(run, Replay(run))
    assert ("allocator_retries" in [a.detector for a in tried.ranked]) is is_claimed
    dropped = [action.detector for action, _ in tried.dropped]
    assert ("allocator_retries" in dropped) is not is_claimed


def test_a_graph_takes_away_launches_and_leaves_the_users_python(tmp_path: Path) -> None:
    python = Dose(400_000)
    plans = {"both": Plan(dispatch=python, python=python), "python": Plan(python=python)}
    runs = {name: attributed(tmp_path / name, plan) for name, plan in plans.items()}
    assert "launch_bound" not in [a.detector for a in found(runs["python"])]
    [seen] = [a for a in found(runs["both"]) if a.detector == "launch_bound"]
    times = [sum(run.step_time_ns()) / len(run.step_time_ns()) for run in runs.values()]
    assert seen.saved_ns == pytest.approx(times[0] - times[1], rel=0.03)


def test_the_line_of_the_program_is_named(traces_dir: Path) -> None:
    run = pipeline.attribute(
        traces_dir / "tracelens/mi300x-resnet18-train-no-distributedinfo.json.gz"
    )
    [seen] = actions.sightings("allocator_retries", material := Material(run, Replay(run)))
    # Not torchvision's, which called the operators.
    assert actions.where(material, seen).line == "train_single_gpu.py(41): main"


@pytest.mark.parametrize(
    ("frame", "is_program"),
    [
        ("train.py(12): main", True),
        ("mine/layers.py(3): forward", True),
        ("/home/me/project/train.py(12): <module>", True),
        ("C:\\work\\train.py(12): main", True),
        # Scripts that are called like a module of the standard library, or like a library.
        ("test.py(4): main", True),
        ("torch_train.py(4): main", True),
        ("torch_models/net.py(4): forward", True),
        # PyTorch cuts the entry of sys.path: of libraries the package's name is left.
        ("torch/nn/modules/module.py(1776): _call_impl", False),
        ("torchvision/models/resnet.py(89): forward", False),
        ("transformers/models/bert/modeling_bert.py(5): forward", False),
        ("json/decoder.py(332): decode", False),
        ("contextlib.py(132): __enter__", False),
        ("torch_guard.py(90): wrapper", False),
        ("/opt/venv/lib/python3.12/site-packages/mine/train.py(1): f", False),
        ("/usr/lib/python3/dist-packages/yaml/loader.py(1): f", False),
        ("/usr/lib/python3.10/threading.py(953): run", False),
        ("C:\\Python\\Lib\\site-packages\\tqdm\\std.py(1): f", False),
        ("<string>(2): __init__", False),
        ("<built-in function perf_counter>", False),
        ("nn.Module: Linear_0", False),
    ],
)
def test_frames_of_libraries_are_not_the_programs(frame: str, is_program: bool) -> None:
    assert is_program_frame(frame) is is_program


LOADS = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
WORKERS = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


@pytest.mark.parametrize(
    ("loader", "frames", "line", "where"),
    [
        # A library's time is that of the function that called it.
        (
            LOADS,
            [
                ("torch/utils/data/_utils/fetch.py(49): fetch", 500),
                ("mine/data.py(7): decode", 480),
                ("PIL/Image.py(1): open", 470),
            ],
            "mine/data.py(7): decode",
            "most of it in mine/data.py(7): decode",
        ),
        (
            LOADS,
            [("torch/utils/data/_utils/fetch.py(49): fetch", 500), ("mine/data.py(7): decode", 90)],
            None,
            "in the training process itself (num_workers=0)",
        ),
        (
            LOADS,
            [],
            None,
            "in the training process itself (num_workers=0); Python stacks (with_stack=True) would "
            "name the function",
        ),
        (WORKERS, [], None, "in its worker processes, which a trace does not show"),
    ],
)
def test_the_place_of_data_loading_is_the_function_that_takes_the_time(
    tmp_path: Path, loader: str, frames: list[tuple[str, int]], line: str | None, where: str
) -> None:
    """Each frame lies in the one before it; the device waits for the loader in each step."""
    trace = Trace()
    for number in range(3):
        at = number * 1_000_000
        trace.step(number, at, 1_000_000)
        trace.op(loader, at + 10_000, 600_000)
        for depth, (name, us) in enumerate(frames):
            trace.python(name, at + (20 + depth) * 1_000, us * 1_000)
        op = trace.op("aten::mm", at + 700_000, 50_000)
        call, kernel = at + 710_000, at + 730_000
        trace.launch("gemm", call, 10_000, kernel_at=kernel, kernel_for=200_000, op=op)
    (tmp_path / "trace.json").write_bytes(trace.encode())
    run = pipeline.attribute(tmp_path / "trace.json")
    material = Material(run, Replay(run))
    [seen] = actions.sightings("data_loading", material)
    place = actions.where(material, seen)
    assert (place.phase, place.line) == ("data", line)
    assert (seen.evidence["function"], seen.evidence["where"]) == (line, where)


@pytest.mark.parametrize("error", [ZeroDivisionError("of <b>{0}</b>"), UsageError("no such cause")])
def test_a_detector_that_fails_takes_nothing_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    run = attributed(tmp_path / "run", Plan(data=Dose(5 * MS)))

    def fails(run: Attribution) -> Iterator[Sighting]:
        raise error

    monkeypatch.setattr(host, "launch_bound", fails)
    tried = actions.actions(run, Replay(run))
    assert tried.ranked[0].detector == "data_loading"
    assert [*tried.failed] == ["launch_bound"]
    failures = report.tell(run, tried, "step")[1][-1]
    assert failures.startswith("Not checked, because of an error in Chopper: launch_bound (")
    assert str(error) in failures


def test_a_cause_without_time_is_not_seen(tmp_path: Path) -> None:
    run = attributed(tmp_path / "run", Plan())
    assert [*actions.sightings("reduced_clock", Material(run, Replay(run)))] == []


@pytest.mark.parametrize(("share_ratio", "seen"), [(0.7, 0), (0.8, 1)])
def test_one_of_two_ranks_comes_last_by_chance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share_ratio: float, seen: int
) -> None:
    run = attributed(tmp_path / "run", Plan(slow=Dose(0.5, ranks=(1,))))
    last = Worst(1, 0.9, share_ratio, None, 0)
    monkeypatch.setattr(rank_views, "worst", lambda table: last)
    assert len([*actions.sightings("late_rank", Material(run, Replay(run)))]) == seen


@pytest.mark.parametrize(
    ("kernel", "seen"),
    [
        ("cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_64x3_tn_align2", True),
        ("cutlass_80_tensorop_s1688gemm_128x128_16x4_nt_align1", True),
        ("cutlass_80_tensorop_f16_s16816gemm_f16_256x128_32x3_tn_align16", False),
        # Kernels without matrix units are compiled for single elements.
        ("cutlass_80_simt_sgemm_128x32_8x5_nn_align1", False),
        # The shape of a cluster, not an alignment.
        ("cutlass3x_sm90_tensorop_gemm_bf16_128x128x64_1x1x1_0_tnn_align8", False),
    ],
)
def test_the_name_of_a_kernel_says_how_its_operands_are_aligned(kernel: str, seen: bool) -> None:
    assert kernels.is_misaligned(kernel) is seen


@pytest.mark.parametrize(
    ("trace", "other", "how"),
    [
        ("hta/a100-recsys-rank3of8.json.gz", "tf32", "set_float32_matmul_precision('high')"),
        ("hta/gp100-train-gpu-user-annotation.json.gz", "fp16", "torch.float16"),
        ("aorta/mi350x-rocprofiler-sdk-backend-train-step.json.gz", "bf16", "torch.bfloat16"),
    ],
)
def test_what_to_try_names_the_precision_that_is_predicted(
    traces_dir: Path, trace: str, other: str, how: str
) -> None:
    run = pipeline.attribute(traces_dir / trace)
    seen = actions.sightings("reduced_precision", Material(run, Replay(run)))
    [evidence] = [s.evidence for s in seen if s.evidence["now"] == "fp32"]
    assert evidence["other"] == other
    assert how in evidence["how"]


@pytest.mark.parametrize(
    ("sizes", "dur_ns", "peak", "latency_ns"),
    [
        # Nothing tells latency from transfer.
        ([3_000_000] * 10, [250 * MS] * 10, None, None),
        ([3_000_000] * 10, [250 * MS] * 10, 12e6, None),
        # The peak of a device's link is not that of a slow network.
        ([3_000_000] * 10, [250 * MS] * 10, 450e9, None),
        ([2_000] * 10, [100_000] * 10, 1e9, 80_000),
        # One that others left early took no time: it tells no rate.
        ([3_000_000] * 10 + [3_000_000], [250 * MS] * 10 + [0], None, None),
        # The largest tells the rate: 100 MB in 10 ms.
        ([2_000] * 10 + [100_000_000], [100_000] * 10 + [10 * MS], None, 99_800),
    ],
)
def test_the_latency_of_a_collective_is_what_its_bytes_do_not_take(
    sizes: list[int], dur_ns: list[int], peak: float | None, latency_ns: int | None
) -> None:
    count = len(sizes)
    communication = pa.table(
        {
            "rank": pa.array([0] * count, pa.int32()),
            "event_row": pa.array(range(count), pa.int64()),
            # The large ones are of another kind.
            "collective": ["allreduce" if s < 10**7 else "allgather" for s in sizes],
            "group": pa.array(["default"] * count),
            "message_bytes": pa.array(sizes, pa.int64()),
            "arrival_ns": pa.array([0] * count, pa.int64()),
            "left_ns": pa.array(dur_ns, pa.int64()),
            "ready_ns": pa.array([None] * count, pa.int64()),
            "bus_factor": pa.array([1.0] * count, pa.float64()),
            "link_bytes_per_s": pa.array([peak] * count, pa.float64()),
        }
    )
    for name in ("collective", "group"):
        at = communication.column_names.index(name)
        communication = communication.set_column(at, name, communication[name].dictionary_encode())
    run = SimpleNamespace(
        communication=communication,
        links={0: pa.table({"step_index": pa.array([0] * count, pa.int64())})},
        joined={0: SimpleNamespace(device_event=pa.table({"dur_ns": pa.array(dur_ns)}))},
    )
    seen = [*ranks.small_collectives(cast("Any", run))]
    assert [s.evidence["latency_ns"] for s in seen] == ([] if latency_ns is None else [latency_ns])
    if latency_ns is not None:
        assert seen[0].run_ns[0][1].sum() == 1_000_000 - 9 * latency_ns


def test_every_detector_declares_itself() -> None:
    names = sorted(detectors.declared())
    assert len(names) >= 10
    for name in names:
        declared = detectors.detector(name)
        assert callable(detectors.function_of(name))
        assert declared.view in chopper.views.VIEWS
        assert declared.condition.endswith(".")
        assert not declared.without.endswith(".")
        assert declared.remedy.endswith((".", "}"))


def test_one_step_of_layers_that_repeat_is_no_first_iteration(traces_dir: Path) -> None:
    run = pipeline.attribute(traces_dir / "tracelens/b200-eager-inference-rank0of8.json.gz")
    tried = actions.actions(run, Replay(run))
    assert [a.detector for a in tried.ranked][:2] == ["python_code", "launch_bound"]
