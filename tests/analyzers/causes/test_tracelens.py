"""A second opinion on real traces: the tables that TraceLens publishes for them.

What differs is listed here with its reason; docs/concepts/work.md says who is right.
"""

from __future__ import annotations

import ast
import csv
import gzip
import io
import json
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from chopper import pipeline
from chopper.analyzers.causes.event_work import EventWork, event_work
from chopper.analyzers.trace.join import COMMUNICATION, Links
from chopper.analyzers.work import estimate
from chopper.hardware.ceilings import Ceiling
from chopper.hardware.devices import DTYPES
from tests.analyzers.make import joined as joined_tables
from tests.conftest import find_traces_dir

pytestmark = pytest.mark.skipif(find_traces_dir() is None, reason="real traces not present")

PEAK = Ceiling(flop_per_s=dict.fromkeys(DTYPES, 1e15), memory_bytes_per_s=1e12, source="test")
REPORTS = (
    "h100-bert-small-inference",
    "h100-qwen1.5-0.5b-inference",
    "mi300x-bert-small-inference",
    "mi300x-qwen1.5-0.5b-inference",
    "mi300x-resnet-train-rank0of8-act-checkpoint",
    "mi300x-sglang-qwen3-8b-decode-hipgraph",
    "mi300x-sglang-qwen3-8b-prefill-decode",
    "mi300x-torch-compile-triton",
    "mi300x-xdit-flux1-inference-python-stacks-large",
)
# Their report knows the operators of a graph's kernels from a second trace, of its capture.
REPLAYED = {
    "mi300x-sglang-qwen3-8b-decode-hipgraph",
    "mi300x-xdit-flux1-inference-python-stacks-large",
}


class Joined(NamedTuple):
    links: Links
    work: EventWork


@cache
def joined(traces_dir: Path, report: str) -> Joined:
    run = pipeline.read(traces_dir / "tracelens" / f"{report}.json.gz")
    rank = run.ranks[0]
    links = joined_tables(
        run.table(rank, "host_span"),
        run.table(rank, "device_event"),
        run.table(rank, "step"),
        run.table(rank, "collective"),
    ).links()
    return Joined(links, event_work(links, PEAK))


def published(traces_dir: Path, report: str, table: str) -> Iterator[dict[str, str]]:
    folder = traces_dir / "tracelens" / "reference-reports" / report
    for path in sorted(folder.glob(f"{table}.csv*")):
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
        csv.field_size_limit(10**8)
        yield from csv.DictReader(io.StringIO(text))


def left_out(links: Links, report: str) -> np.ndarray:
    """What their tables of operators lack: ROCm's memsets (CUDA's are in), and collectives."""
    if not report.startswith("mi"):
        return np.zeros(len(links.events), dtype=bool)
    found: np.ndarray = links.events.of("memset") | (links.work_class == COMMUNICATION)
    return found


# ---- kernel times ------------------------------------------------------------------------------


@pytest.mark.parametrize("report", REPORTS)
def test_operators_kernel_times_are_equal(traces_dir: Path, report: str) -> None:
    links = joined(traces_dir, report).links
    theirs: dict[str, float] = defaultdict(float)
    for row in published(traces_dir, report, "ops_summary"):
        theirs[row["name"]] += float(row["total_direct_kernel_time_sum"])
    counted = (links.op_row >= 0) & ~left_out(links, report)
    codes, values = links.op_names
    sums = np.bincount(codes[counted], weights=links.events.dur_ns[counted], minlength=len(values))
    ours = {name: time / 1e3 for name, time in zip(values, sums, strict=True) if time}
    # Launches outside of any operator are rows of their own there, without one here.
    calls = sum(theirs.pop(call, 0.0) for call in ("hipLaunchKernel", "hipModuleLaunchKernel"))
    # They cut the number from SGLang's names.
    theirs = {
        next((n for n in ours if n.startswith(f"{name}_3")), name): t for name, t in theirs.items()
    }
    if report in REPLAYED:
        outside = [name for name in ours if not name.startswith("Torch-Compiled Region")]
        assert outside
        assert all(theirs[name] >= ours[name] - 0.05 for name in outside)
        launched = links.has_launch & ~left_out(links, report)
        assert sum(theirs.values()) + calls == pytest.approx(
            links.events.dur_ns[launched].sum() / 1e3, abs=0.05 * len(theirs)
        )
        return
    assert {n for n, t in theirs.items() if t} == set(ours)
    for name, time in ours.items():
        assert time == pytest.approx(theirs[name], abs=0.05), name


@pytest.mark.parametrize(
    "report",
    [
        "h100-bert-small-inference",
        "h100-qwen1.5-0.5b-inference",
        "mi210-gpu-only",
        "mi300x-bert-small-inference",
        "mi300x-qwen1.5-0.5b-inference",
        "mi300x-torch-compile-triton",
    ],
)
def test_kernels_times_are_equal(traces_dir: Path, report: str) -> None:
    links = joined(traces_dir, report).links
    rows = list(published(traces_dir, report, "kernel_summary"))
    theirs: dict[str, float] = defaultdict(float)
    for row in rows:
        theirs[row["Kernel name"]] += float(row["Kernel duration (µs)_sum"])
    counted = links.events.of("kernel")  # theirs are kernels only, also those without a launch
    codes, values = links.events.names
    sums = np.bincount(codes[counted], weights=links.events.dur_ns[counted], minlength=len(values))
    ours = {name: time / 1e3 for name, time in zip(values, sums, strict=True) if time}
    for name, time in theirs.items():
        assert ours[name] == pytest.approx(time, abs=0.05), name
    assert sum(ours.values()) == pytest.approx(sum(theirs.values()), abs=0.05 * len(ours))


# ---- GEMM TFLOP/s ------------------------------------------------------------------------------


def arguments(row: dict[str, str]) -> tuple[str, ...]:
    texts = (row[f"{key}_first"] for key in ("Input Dims", "Input type", "Concrete Inputs"))
    return tuple(json.dumps(ast.literal_eval(text)) for text in texts)


@pytest.mark.parametrize(
    ("table", "report"),
    [
        *(("GEMM", report) for report in REPORTS),
        *(("SDPA_fwd", report) for report in REPORTS if "bert" in report or "qwen1.5" in report),
        ("SDPA_fwd", "mi300x-torch-compile-triton"),
        ("SDPA_fwd", "mi300x-xdit-flux1-inference-python-stacks-large"),
        ("CONV_fwd", "mi300x-resnet-train-rank0of8-act-checkpoint"),
        ("CONV_bwd", "mi300x-resnet-train-rank0of8-act-checkpoint"),
        ("CONV_fwd", "mi300x-xdit-flux1-inference-python-stacks-large"),
    ],
)
def test_rates_of_products_are_equal(traces_dir: Path, report: str, table: str) -> None:
    rows = list(published(traces_dir, report, table))
    assert rows
    links, _ = joined(traces_dir, report)
    host = links.host
    columns = [host.input_dims, host.input_types, host.concrete_inputs]
    kept = (links.op_row >= 0) & ~left_out(links, report)
    ours: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for name in {row["name"] for row in rows}:
        # A convolution's kernels run under the vendor's operator inside: whole calls are compared.
        calls = host.nesting.nearest(host.named(name.__eq__))
        call = np.where(kept, calls[links.op_row], -1)
        time = np.zeros(len(host))
        np.add.at(time, call[call >= 0], links.events.dur_ns[call >= 0])
        for at in np.unique(call[call >= 0]):
            recorded = (
                values[codes[at]] if codes[at] >= 0 else "null" for codes, values in columns
            )
            ours[(name, *(json.dumps(json.loads(text)) for text in recorded))].append(time[at])
    compared = 0
    theirs: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for row in rows:
        if not row["TFLOPS/s_mean"]:
            continue
        theirs[(row["name"], *arguments(row))] += [float(row["TFLOPS/s_mean"])] * int(
            row["name_count"]
        )
    for key, rates in theirs.items():
        if key not in ours or len(ours[key]) != len(rates):
            assert report in REPLAYED, key
            continue
        work = estimate(*key)
        assert work is not None
        assert work.flop_count is not None, work.reason
        flop = their_flop(table, key, work.flop_count, work.causal)
        rate = np.mean([flop / t / 1e3 for t in ours[key] if t])
        assert rate == pytest.approx(np.mean(rates), rel=2e-3), key
        compared += 1
    assert compared or report in REPLAYED


def their_flop(table: str, key: tuple[str, ...], flop: int, causal: bool | None) -> float:
    """Our FLOP in their way of counting; see docs/concepts/work.md."""
    name, dims, _, concrete = key
    if name == "aten::addmm":  # an addition per element for the bias
        _, left, right, *_ = json.loads(dims)
        return flop + int(left[0]) * int(right[1])
    if table == "SDPA_fwd" and causal:  # half of the square
        return flop / 2
    if table == "CONV_bwd" and '"[False, True, False]"' in concrete:  # a gradient nobody wants
        return 2 * flop
    return flop


# ---- bytes -------------------------------------------------------------------------------------


def right(name: str, dims: list[Any]) -> bool:
    """Whether both count the same; where not, why ours is right."""
    if name in ("aten::add", "aten::mul"):
        # They take a broadcast operand at the size of the result.
        return dims[0] == dims[1] or not dims[1] or (dims[0] != [] and dims[0] != [16, 16])
    if name == "aten::min":  # of two tensors; they take it for a reduction
        return not dims[1]
    return True


def test_traffic_of_memory_bound_operators_is_equal(traces_dir: Path) -> None:
    # Reductions: they take one result however many dimensions are kept. Norms: they count bias
    # and weight in float. Rotary embedding: the angles' table, which they leave out.
    loose = {"aten::sum": 0.11, "aten::mean": 0.03, "aten::native_layer_norm": 0.03}
    loose["sgl_kernel::rotary_embedding"] = 0.02
    compared = 0
    for report in REPORTS:
        for table in (
            "BinaryElementwise",
            "UnaryElementwise",
            "Normalization",
            "Normalization_fwd",
            "Reduce_fwd",
            "RMSNorm_fwd",
            "RoPE_fwd",
        ):
            for row in published(traces_dir, report, table):
                name = row["name"]
                texts = arguments(row)
                theirs = float(row["Data Moved (MB)_first"] or "nan") * 2**20
                if name in ("aten::layer_norm", "aten::batch_norm") or not theirs > 0:
                    continue  # a composite: what is inside it is compared
                if not right(name, json.loads(texts[0])):
                    continue
                work = estimate(name, *texts)
                assert work is not None, name
                wanted = pytest.approx(theirs, rel=loose.get(name, 0.003))
                assert work.bytes_count == wanted, (report, name, texts)
                compared += 1
    assert compared > 230
