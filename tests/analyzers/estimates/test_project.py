from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from chopper.analyzers.estimates.network import Topology, collective_time_s
from chopper.analyzers.estimates.project import (
    Side,
    operator_class,
    operators,
    project,
    project_captured,
)
from chopper.analyzers.estimates.scaling import SCALES, Collective, Step, at_scale, step_of
from chopper.cli import cli
from chopper.cli.estimates.project import page
from chopper.errors import ChopperError, InputError, UsageError
from chopper.hardware.devices import Reach, named, reach_of
from chopper.reports import to_text
from chopper.wording import percent
from tests.kineto_writer import TODAY, Trace

H100, MI300X = named("h100-sxm"), named("mi300x")
WHOLE = Reach(products=1.0, memory=1.0, source="test")


def table(*rows: tuple[str, str | None, int, int, float | None, float | None]) -> pa.Table:
    names = ("op", "dtype", "call_count", "time_ns", "math_flop", "traffic_bytes")
    schema = pa.schema(
        [
            ("op", pa.string()),
            ("dtype", pa.string()),
            ("call_count", pa.int64()),
            ("time_ns", pa.int64()),
            ("math_flop", pa.float64()),
            ("traffic_bytes", pa.float64()),
        ]
    )
    return pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows], schema=schema)


WORK = table(
    ("aten::mm", "bf16", 10, 10_000_000, 5e11, 1e8),
    ("aten::add", "bf16", 10, 1_000_000, None, 2e8),
    ("mine::secret", None, 10, 500_000, None, None),
)


def carried(work: pa.Table, there: Any = MI300X) -> dict[str, int]:
    classes, _ = operators(work, Side(H100, WHOLE), Side(there, WHOLE))
    return {c.operator_class: c.projected_ns for c in classes}


def test_work_goes_with_the_rate_that_bounds_it() -> None:
    found = carried(WORK)
    assert found["products"] == pytest.approx(10_000_000 * 989.4 / 1307.4, rel=1e-3)
    assert found["elementwise"] == pytest.approx(1_000_000 * 3350 / 5325, rel=1e-2)
    # What has no model goes with the rest.
    rest = (found["products"] + found["elementwise"]) / 11_000_000
    assert found["unmodelled"] == pytest.approx(500_000 * rest, rel=1e-3)


def test_what_has_no_model_gives_a_range() -> None:
    options: dict[str, Any] = {"run": "r", "windows_count": 1}
    options["causes_ns"] = {"compute.ideal": 11_500_000}
    devices: dict[str, Any] = {
        "here": Side(H100, WHOLE),
        "there": Side(MI300X, WHOLE),
    }
    found = project(operations=WORK, **options, **devices)
    assert found.projected_between_ns is not None
    low, high = found.projected_between_ns
    secret = 500_000
    assert high - low == pytest.approx(secret * (989.4 / 1307.4 - 3350 / 5325), rel=0.01)
    assert low <= found.projected_ns <= high
    assert project(operations=WORK.slice(0, 2), **options, **devices).projected_between_ns is None


def test_a_small_kernel_takes_its_fixed_time_anywhere() -> None:
    work = table(("aten::add", "bf16", 100, 200_000, None, 1e3))
    assert carried(work)["elementwise"] == 200_000


def test_onto_itself_nothing_changes() -> None:
    found = carried(WORK, H100)
    assert found == {"products": 10_000_000, "elementwise": 1_000_000, "unmodelled": 500_000}


def test_what_the_devices_reach_counts() -> None:
    half = Reach(products=0.5, memory=0.5, source="test")
    classes, _ = operators(WORK, Side(H100, WHOLE), Side(H100, half))
    assert {c.operator_class: c.projected_ns for c in classes}["products"] == 20_000_000


def test_a_slower_clock_slows_products_only() -> None:
    classes, _ = operators(WORK, Side(H100, WHOLE), Side(H100, WHOLE, 915e6))
    found = {c.operator_class: c.projected_ns for c in classes}
    assert found["products"] == pytest.approx(20_000_000, rel=1e-3)
    assert found["elementwise"] == 1_000_000


def test_collectives_are_no_operators_of_the_device() -> None:
    more = pa.concat_tables([WORK, table(("gloo:all_reduce", None, 8, 10**9, None, None))])
    assert carried(more) == carried(WORK)


def test_nothing_to_project_is_said() -> None:
    with pytest.raises(InputError, match="no operator of the run has device time"):
        carried(WORK.slice(0, 0))
    with pytest.raises(InputError, match="record with shapes"):
        carried(WORK.slice(2, 1))


def test_classes() -> None:
    assert operator_class("aten::mm", "gemm") == "products"
    assert operator_class("aten::copy_", "vector") == "copies"
    assert operator_class("aten::mul", "vector") == "elementwise"
    assert operator_class(None, None) == "unmodelled"


def test_every_device_of_the_list_reaches_less_than_its_peak() -> None:
    for device in (H100, MI300X, named("b200"), named("mi210")):
        found = reach_of(device)
        assert 0 < found.products < 1
        assert 0 < found.memory < 1
        assert found.source


STEP = Step(
    ranks_count=8,
    compute_ns=100e6,
    compute_spread_ns=1e6,
    idle_ns=5e6,
    copy_ns=1e6,
    exposed_ns=10e6,
    communication_ns=40e6,
    collectives=(
        Collective(name="all_gather", count=64, size_bytes=400_000_000),
        Collective(name="reduce_scatter", count=32, size_bytes=400_000_000),
    ),
)


@given(spread=st.floats(0, 1e7), exposed=st.floats(0, 4e7), size=st.integers(1, 10**10))
def test_the_parts_of_a_scale_sum_to_its_step(spread: float, exposed: float, size: int) -> None:
    step = msgspec.structs.replace(
        STEP,
        compute_spread_ns=spread,
        exposed_ns=exposed,
        collectives=(Collective(name="all_reduce", count=3, size_bytes=size),),
    )
    rows, _, _ = at_scale(step, SCALES, Topology())
    assert [r.ranks_count for r in rows] == list(SCALES)
    for row in rows:
        parts = (row.compute_ns, row.idle_ns, row.copy_ns, row.waiting_ns, row.transfer_ns)
        assert sum(parts) == row.step_ns
    waits = [r.waiting_ns for r in rows]
    assert waits == sorted(waits)


def test_the_knee_is_named_with_its_cause() -> None:
    slow = Topology(network_link_bytes_per_s=5e9)
    rows, knee, cause = at_scale(STEP, SCALES, slow)
    assert knee == 16
    assert cause == "exposed transfer"
    assert rows[1].efficiency_ratio < 0.8 <= rows[0].efficiency_ratio
    noisy = msgspec.structs.replace(STEP, compute_spread_ns=20e6, collectives=())
    _, knee, cause = at_scale(noisy, SCALES, Topology())
    assert knee is not None
    assert cause == "waiting for the slowest rank"
    quiet = msgspec.structs.replace(STEP, compute_spread_ns=0.0, collectives=())
    assert at_scale(quiet, SCALES, Topology())[1:] == (None, None)


def test_groups_of_adjacent_ranks_stay_as_large_and_others_grow() -> None:
    """Eight ranks recorded as 4 × tensor parallel over 2 replicas."""
    one = Collective(name="all_reduce", count=2, size_bytes=10**9, group_count=4, adjacent=True)
    quiet = {"compute_ns": 1.0, "compute_spread_ns": 0.0, "exposed_ns": 10e6}
    inner = msgspec.structs.replace(STEP, **quiet, communication_ns=10e6, collectives=(one,))
    rows, _, _ = at_scale(inner, (8, 1024), Topology())
    expected = 2 * collective_time_s("all_reduce", 1e9, 4, algorithm="ring") * 1e9
    assert [r.transfer_ns for r in rows] == [pytest.approx(expected, abs=1)] * 2
    wide = msgspec.structs.replace(one, group_count=2, adjacent=False)
    outer = msgspec.structs.replace(inner, collectives=(wide,))
    rows, _, _ = at_scale(outer, (8, 1024), Topology())
    # 4 ranks apart: 256 of 1024, of which 2 share a node and its two ports.
    apart = Topology(ranks_per_node_count=2)
    expected = (
        2
        * 1e9
        * min(
            collective_time_s("all_reduce", 1e9, 256, apart, a)
            for a in ("ring", "tree", "hierarchical")
        )
    )
    assert rows[1].transfer_ns == pytest.approx(expected, abs=1)


def test_a_rank_counts_the_collectives_of_its_own_groups_only() -> None:
    shape = {"collective": "allreduce", "message_bytes": 10**6, "transfer_ns": 50}
    rows = [shape | {"rank_count": 2, "ranks": ranks} for ranks in ("0-1", "2-3", "0,2", "1,3")] + [
        shape | {"rank_count": 4, "ranks": "0-3"}
    ]
    step = step_of(
        {"compute.vector.ideal": 8, "communication.transfer.no_peak": 4},
        np.zeros(4),
        steps_count=1,
        ranks_count=4,
        matched=pa.Table.from_pylist(rows),
    )
    found = {(c.group_count, c.adjacent): c.count for c in step.collectives}
    assert found == {(2, True): 1, (2, False): 1, (None, False): 1}
    assert step.communication_ns == 150


def test_the_estimate_for_the_recorded_ranks_is_held_against_the_recording() -> None:
    causes = {"compute.vector.ideal": 800, "communication.wait": 800}
    step = msgspec.structs.replace(
        STEP, compute_ns=100, compute_spread_ns=0, idle_ns=0, copy_ns=0, collectives=()
    )
    found = project(
        run="r",
        operations=table(),
        causes_ns=causes,
        windows_count=8,
        step=step,
        scales_count=(8, 64),
    )
    assert (found.recorded_ns, found.recorded_ranks_count, found.recorded_waiting_ns) == (
        200,
        8,
        100,
    )
    assert found.recorded_scale_error_ratio == pytest.approx(-0.5)


def test_the_number_of_ranks_asked_for_is_among_the_scales(traces_dir: Path) -> None:
    run = str(traces_dir / "param/v100-dlrm-8ranks")
    done = CliRunner().invoke(cli, ["estimate", "project", run, "--ranks", "24", "--json"])
    assert done.exit_code == 0, done.output
    assert [s["ranks_count"] for s in json.loads(done.stdout)["scales"]] == [8, 16, 24]


def test_ranks_that_do_not_fill_nodes_are_refused() -> None:
    with pytest.raises(UsageError, match="multiple of 8"):
        at_scale(STEP, (12,), Topology())


def test_a_run_is_carried_to_more_ranks_without_a_device() -> None:
    found = project(
        run="r",
        operations=WORK,
        causes_ns={"compute.ideal": 100, "idle.call": 10},
        windows_count=1,
        step=STEP,
        scales_count=(8, 64),
    )
    assert found.classes == ()
    assert found.target_device is None
    assert found.projected_ns == found.recorded_ns == 110
    assert len(found.scales) == 2


def test_transfer_goes_with_the_links_and_copies_with_pcie() -> None:
    a100 = named("a100-sxm4-80gb")
    causes = {
        "compute.ideal": 1000,
        "idle.call": 10,
        "communication.transfer.at_peak": 100,
        "communication.wait": 50,
        "copy.host_to_device": 40,
        "copy.memset": 5,
    }
    found = project(
        run="r",
        operations=WORK,
        causes_ns=causes,
        windows_count=1,
        here=Side(a100, WHOLE),
        there=Side(H100, WHOLE),
    )
    # NVLink 600 to 900 GB/s, PCIe 4 to 5; who waits, waits as long.
    assert found.projected_communication_ns == round(100 * 600 / 900 + 50)
    assert found.projected_copy_ns == 40 // 2 + 5


PAIRS = [
    (f"{a}-{model}-inference", there, f"{b}-{model}-inference")
    for model in ("qwen1.5-0.5b", "bert-small")
    for a, there, b in (("h100", "mi300x", "mi300x"), ("mi300x", "h100-sxm", "h100"))
]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["estimate", "project", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(("recorded", "device", "there"), PAIRS)
def test_real_pairs_within_25_percent_and_half_the_rooflines_error(
    traces_dir: Path, recorded: str, device: str, there: str
) -> None:
    files = [str(traces_dir / "tracelens" / f"{name}.json.gz") for name in (recorded, there)]
    document = json.loads(run(files[0], "--device", device, "--check", files[1], "--json"))
    assert abs(document["error_ratio"]) <= 0.25
    assert abs(document["error_ratio"]) <= abs(document["roofline_error_ratio"]) / 2
    assert any(c["checked_ns"] for c in document["classes"])
    # Idle time, which stays as it was, does not flatter these.
    operators = abs(document["operators_error_ratio"])
    assert operators <= abs(document["operators_roofline_error_ratio"]) / 2
    page = Path(__file__).resolve().parents[3] / "docs" / "concepts" / "estimates" / "project.md"
    text = page.read_text(encoding="utf-8")
    assert [field for field in document if f"`{field}`" not in text] == []
    shown = run(files[0], "--device", device, "--check", files[1], "--details")
    assert percent(document["error_ratio"], "+.1f") in shown
    assert percent(document["operators_error_ratio"], "+.1f") in shown
    times = document["roofline_error_ratio"] / document["error_ratio"]
    assert f"{abs(times):.1f} times as far off" in " ".join(shown.split())


def test_a_class_that_only_the_check_has_is_listed() -> None:
    other = pa.concat_tables([WORK, table(("aten::_softmax", "bf16", 1, 2_000_000, None, 1e8))])
    found = project(
        run="r",
        operations=WORK,
        causes_ns={"compute.ideal": 11_500_000},
        windows_count=1,
        here=Side(H100, WHOLE),
        there=Side(MI300X, WHOLE),
        checked=("c", other, {"compute.ideal": 13_500_000}),
    )
    there = {c.operator_class: c.checked_ns for c in found.classes}
    assert there["normalization"] == 2_000_000
    assert sum(ns or 0 for ns in there.values()) == 13_500_000
    projected = sum(c.projected_ns for c in found.classes)
    assert found.operators_error_ratio == pytest.approx(projected / 13_500_000 - 1)


def test_a_device_that_the_run_contradicts_is_refused(traces_dir: Path) -> None:
    file = str(traces_dir / "tracelens" / "h100-bert-small-inference.json.gz")
    with pytest.raises(UsageError, match="was recorded on NVIDIA H100"):
        run(file, "--device", "mi300x", "--from-device", "v100-sxm2-32gb")


@pytest.mark.parametrize("options", [(), ("--from-device", "a100-sxm4-80gb")])
def test_a_run_on_the_cpu_is_not_taken_for_a_devices(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    trace = Trace(dialect=TODAY)
    trace.op("aten::mm", 1_000, 5_000, shapes=[[64, 64], [64, 64]])
    file = tmp_path / "cpu.json"
    file.write_bytes(trace.encode())
    with pytest.raises(UsageError) as caught:
        run(str(file), "--device", "h100-sxm", *options)
    said = str(caught.value)
    assert "\n" not in said
    for part in (str(file), "timed on the CPU only", "expected device events", "--module"):
        assert part in said


def test_what_has_no_model_is_named() -> None:
    operator: dict[str, Any] = {
        "input_dims": "[[8, 8], [8, 8]]",
        "input_types": '["float", "float"]',
    }
    operator |= {"concrete_inputs": '["", ""]', "call_count": 2}
    found = project_captured(
        module="m",
        operators=[{"op": "aten::mm"} | operator, {"op": "mine::secret"} | operator],
        element_bytes=4,
        there=Side(H100, WHOLE),
    )
    assert found.unmodelled_operators == ("mine::secret",)
    assert found.unmodelled_ratio == 0.5
    said = to_text.render(page(found))
    assert "at least" in said
    assert "mine::secret" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "nothing to project onto"),
        (("--device", "quux"), "no device is called 'quux'; there are NVIDIA quadro-…, p100"),
        (("--device", "cpu"), "found a CPU, expected an accelerator"),
        (("--device", "h100-sxm", "--from-device", "CPU"), "device 'CPU': found a CPU"),
        (("--device", "h100-smx"), "did you mean h100-sxm"),
        (("--device", "h100-sxm", "--topology", "x.json"), "--topology needs --ranks"),
        (("--ranks", "8", "--check", "x"), "--check needs --device"),
        (("--ranks", "200000"), "expected at most 100000"),
        (("--ranks", "-8"), "more than zero"),
        (("--module", "m:f"), "RUN and --module contradict"),
        (("--batch", "2", "--device", "h100-sxm"), "--batch needs --module"),
    ],
)
def test_bad_input_is_one_line(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(ChopperError) as caught:
        run("absent.json", *options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


MODULE = """
from chopper.models.architectures import Architecture
from chopper.workloads.llama import Llama

def make():
    return Llama(Architecture(
        name="tiny", width=512, layers_count=2, heads_count=8, kv_heads_count=8, head_width=64,
        ffn_width=1024, vocabulary_count=64))
"""


@pytest.mark.slow
def test_a_captured_module_has_the_flop_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from chopper.analyzers.work import estimate
    from chopper.collectors.fake_tensors import capture_operators

    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    found = capture_operators("mine:make", batch=2, sequence=256)
    products = 0
    for op in found["operators"]:
        work = estimate(op["op"], op["input_dims"], op["input_types"], op["concrete_inputs"])
        if work is not None and work.family == "gemm" and work.flop_count:
            products += op["call_count"] * work.flop_count
    # Of the weights of products: 2 FLOP per token forward, 4 backward.
    weights = 2 * (4 * 512 * 512 + 3 * 512 * 1024) + 64 * 512
    assert products == 6 * weights * 2 * 256
    fast, slow = (
        project_captured(
            module="mine:make",
            operators=found["operators"],
            element_bytes=found["element_bytes"],
            there=Side(device, WHOLE),
        )
        for device in (H100, named("l4"))
    )
    assert fast.recorded_ns is None
    assert fast.roofline_ns < slow.roofline_ns
    assert sum(c.projected_ns for c in fast.classes) == fast.projected_ns
    launches = sum(c.calls_count for c in fast.classes)
    assert fast.projected_ns == pytest.approx(fast.roofline_ns + launches * 4500, rel=0.02)


RECURRENT = """
import torch

class Bags(torch.nn.Module):
    def __init__(self, asks):
        super().__init__()
        self.asks = asks
        self.bags = torch.nn.EmbeddingBag(1000, 32, mode="sum")
        self.layers = torch.nn.LSTM(32, 64, 2)

    def forward(self, ids):
        rows = self.bags(ids)
        if self.asks and rows.sum().item() > 0:
            rows = rows * 2
        return self.layers(rows[None])[0]

def make():
    return Bags(False)

def asking():
    return Bags(True)
"""


@pytest.mark.slow
def test_bags_and_recurrent_layers_are_captured_and_values_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from chopper.collectors.fake_tensors import capture_operators

    (tmp_path / "mine.py").write_text(RECURRENT)
    monkeypatch.chdir(tmp_path)
    found = capture_operators("mine:make", batch=4, sequence=8, precision="fp32")
    step = project_captured(
        module="mine:make",
        operators=found["operators"],
        element_bytes=found["element_bytes"],
        there=Side(H100, WHOLE),
    )
    assert not any("rnn" in op or "bag" in op for op in step.unmodelled_operators)
    assert ("recurrent" in " ".join(step.assumptions)) == any(
        "_rnn" in op["op"] for op in found["operators"]
    )
    with pytest.raises(ChopperError) as caught:
        capture_operators("mine:asking", batch=4, sequence=8)
    line = 1 + RECURRENT.splitlines().index("        if self.asks and rows.sum().item() > 0:")
    said = str(caught.value)
    assert f"mine.py:{line}: reads the value of a tensor (.item()" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "nothing to project given"),
        (("--module", "m:f"), "needs a device"),
        (
            ("--module", "m:f", "--ranks", "8", "--device", "h100-sxm"),
            "--ranks contradicts --module",
        ),
        (("--module", "m", "--device", "h100-sxm"), "package.module:factory"),
        (("--module", "m:f", "--device", "h100-sxm", "--precision", "int8"), "expected bf16"),
    ],
)
def test_bad_input_without_a_run_is_one_line(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(ChopperError) as caught:
        run(*options)
    assert message in str(caught.value)
