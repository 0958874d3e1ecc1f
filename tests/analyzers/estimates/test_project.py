from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from chopper.analyzers.estimates.project import (
    Side,
    captured_ns,
    operator_class,
    operators,
    project,
)
from chopper.cli import cli
from chopper.errors import ChopperError, InputError, UsageError
from chopper.hardware.devices import Reach, named, reach_of
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
    for part in (str(file), "timed on the CPU only", "expected device events"):
        assert part in said


def test_a_captured_program_takes_its_bounds_and_launches() -> None:
    operator: dict[str, Any] = {"input_types": '["float", "float"]', "concrete_inputs": '["", ""]'}
    operator |= {"input_dims": "[[4096, 4096], [4096, 4096]]", "call_count": 2}
    side = Side(H100, WHOLE)
    bound_ns, roofline_ns = captured_ns([{"op": "aten::mm"} | operator], 4, side)
    assert bound_ns == pytest.approx(roofline_ns + 2 * 4500)
    more, same = captured_ns([{"op": n} | operator for n in ("aten::mm", "mine::secret")], 4, side)
    # Of what has no model, only the launches are known.
    assert more - bound_ns == pytest.approx(2 * 4500)
    assert same == roofline_ns
    with pytest.raises(InputError, match="none of the captured operators"):
        captured_ns([{"op": "mine::secret"} | operator], 4, side)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "nothing to project onto"),
        (("--device", "quux"), "no device is called 'quux'; there are NVIDIA quadro-…, p100"),
        (("--device", "cpu"), "found a CPU, expected an accelerator"),
        (("--device", "h100-sxm", "--from-device", "CPU"), "device 'CPU': found a CPU"),
        (("--device", "h100-smx"), "did you mean h100-sxm"),
        (("--check", "x"), "nothing to project onto"),
    ],
)
def test_bad_input_is_one_line(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(ChopperError) as caught:
        run("absent.json", *options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_run_is_one_line() -> None:
    with pytest.raises(UsageError, match="nothing to project given; give RUN"):
        run("--device", "b200")
