"""The FLOP and byte model on real traces, and against TraceLens' published tables."""

from __future__ import annotations

import ast
import csv
import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.analyzers.work.work_records import Recorded, is_op, recorded, sound


def operators(path: Path) -> Iterator[Recorded]:
    text = gzip.decompress(path.read_bytes())
    trace = json.loads(text)
    for event in trace if isinstance(trace, list) else trace["traceEvents"]:
        if is_op(event):
            yield recorded(event)


TRACES = {
    # trace: operators of these families whose FLOP count must be known
    "tracelens/h100-qwen1.5-0.5b-inference": {"gemm": 193, "sdpa": 48},
    "tracelens/mi300x-bert-small-inference": {"gemm": 50, "sdpa": 8},
    "tracelens/mi300x-resnet18-train-no-distributedinfo": {"conv": 10, "gemm": 1},
    "hpctrainingexamples/mi300x-op-replay": {"conv": 10},
    "hta/a100-recsys-rank3of8": {"gemm": 1000},
    "kineto/v100-resnet50-dataloader0-2021": {"gemm": 1},
}


@pytest.mark.parametrize("trace", TRACES)
def test_real_traces_are_understood(traces_dir: Path, trace: str) -> None:
    known: dict[str, int] = {}
    for event in operators(traces_dir / f"{trace}.json.gz"):
        work = event.work()
        sound(work)
        if work is not None and work.flop_count is not None:
            known[work.family] = known.get(work.family, 0) + 1
        elif work is not None and work.family == "gemm" and event.dims is not None:
            pytest.fail(f"{event} has shapes and no count: {work.reason}")
    for kind, least in TRACES[trace].items():
        assert known.get(kind, 0) >= least, known


def tracelens_rows(traces_dir: Path, table: str) -> Iterator[tuple[str, Recorded, float, float]]:
    """(report, operator, FLOP, bytes) of each distinct call in TraceLens' published reports."""
    for path in sorted((traces_dir / "tracelens" / "reference-reports").glob(f"*/{table}.csv*")):
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for row in csv.DictReader(io.StringIO(raw.decode())):
            lists = (
                ast.literal_eval(row[f"{key}_first"])
                for key in ("Input Dims", "Input type", "Concrete Inputs")
            )
            event = Recorded(row["name"], *(json.dumps(value) for value in lists))
            yield (
                path.parent.name,
                event,
                float(row["GFLOPS_first"]) * 1e9,
                float(row["Data Moved (MB)_first"] or "nan") * 2**20,
            )


def test_gemm_equals_tracelens(traces_dir: Path) -> None:
    rows = 0
    for report, event, flop, moved_bytes in tracelens_rows(traces_dir, "GEMM"):
        work = event.work()
        assert work is not None
        assert work.flop_count is not None, event
        # TraceLens adds one addition per element for addmm's bias; torch's counter does not.
        bias = 0
        if event.name == "aten::addmm":
            _, left, right, *_ = json.loads(event.dims or "")
            bias = left[0] * right[1]
        assert work.flop_count + bias == pytest.approx(flop, rel=1e-9), (report, event)
        if moved_bytes == moved_bytes:
            assert work.bytes_count == pytest.approx(moved_bytes, rel=0.005), (report, event)
        rows += 1
    assert rows >= 60


def test_convolutions_equal_tracelens(traces_dir: Path) -> None:
    rows = 0
    for table in ("CONV_fwd", "CONV_bwd"):
        for report, event, flop, moved_bytes in tracelens_rows(traces_dir, table):
            work = event.work()
            assert work is not None
            assert work.flop_count is not None, event
            # TraceLens counts both gradients even where the input's is not wanted (first layer).
            unwanted = event.name == "aten::convolution_backward" and '"[False, True, False]"' in (
                event.concrete or ""
            )
            assert work.flop_count * (2 if unwanted else 1) == pytest.approx(flop, rel=1e-9), (
                report,
                event,
            )
            # Backward traffic differs: TraceLens adds up both gradients' reads of grad_output.
            if table == "CONV_fwd":
                assert work.bytes_count == pytest.approx(moved_bytes, rel=0.005), (report, event)
            rows += 1
    assert rows >= 40


def test_attention_equals_tracelens(traces_dir: Path) -> None:
    rows = 0
    for report, event, flop, moved_bytes in tracelens_rows(traces_dir, "SDPA_fwd"):
        work = event.work()
        assert work is not None
        assert work.flop_count is not None
        # TraceLens takes half of the square for a causal mask: L²/2, not the L(L+1)/2 pairs that
        # it keeps. Dense counts are equal.
        assert work.flop_count / (2 if work.causal else 1) == pytest.approx(flop, rel=1e-9), (
            report,
            event,
        )
        length = json.loads(event.dims or "")[0][2]
        if work.causal:
            assert work.useful_flop_count == pytest.approx(flop * (length + 1) / length, rel=1e-9)
        # We count the rows' logsumexp, too.
        assert work.bytes_count == pytest.approx(moved_bytes, rel=0.01)
        rows += 1
    assert rows >= 6
