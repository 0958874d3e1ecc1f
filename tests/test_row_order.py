"""The order in which a file lists its events decides nothing."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chopper import pipeline, reports
from chopper.causes import Level
from tests.golden.own import OWN
from tests.kineto_writer import EPOCH_WHOLE, Trace

_LEVELS: tuple[Level, ...] = ("phase", "layer", "op", "kernel", "step")
_CATALOGUE = (
    "hta/cpu-rows-only-no-device.json.gz",
    "hta/a100-alexnet-cuda-sync.json.gz",
    "hta/a100-overlaid-critical-path-category.json.gz",
    "hta/mi250-minitoy-train-rocm62.json.gz",
    "hta/cpu-only-gloo-rank34of300.json.gz",
    "param/v100-dlrm-8ranks/worker0_step_12.1694128201545.pt.trace.json.gz",
)


def result(file: Path) -> Any:
    """Everything that an attribution says of a trace."""
    found = pipeline.attribute(file)
    document = reports.document(found)
    for level in _LEVELS:
        document[level] = [[g.key, g.time_ns, g.causes] for g in found.by(level)]
    return json.loads(json.dumps(document))


def same_in_any_order(directory: Path, document: dict[str, Any], seed: int) -> None:
    file = directory / "trace.json"
    file.write_text(json.dumps(document))
    before = result(file)
    random.Random(seed).shuffle(document["traceEvents"])
    file.write_text(json.dumps(document))
    assert result(file) == before


@pytest.mark.parametrize("name", ["fsdp2", "model-rocm", "loading"])
def test_shuffled_rows_of_our_recordings_change_nothing(tmp_path: Path, name: str) -> None:
    file = OWN / name / "rank-00000" / "trace.json.gz"
    same_in_any_order(tmp_path, json.loads(gzip.decompress(file.read_bytes())), seed=1)


@pytest.mark.parametrize("name", _CATALOGUE)
def test_shuffled_rows_of_real_traces_change_nothing(
    traces_dir: Path, tmp_path: Path, name: str
) -> None:
    document = json.loads(gzip.decompress((traces_dir / name).read_bytes()))
    same_in_any_order(tmp_path, document, seed=1)


_SPAN = st.tuples(
    st.sampled_from(["op", "annotation", "python", "call", "kernel"]),
    st.integers(0, 5),
    st.sampled_from([0, 1, 2, 4]),
    st.sampled_from(["aten::mm", "aten::add", "chopper::forward", "model.py(3): f", "k"]),
    st.integers(0, 2),
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spans=st.lists(_SPAN, min_size=2, max_size=14), seed=st.integers(0, 3))
def test_shuffled_rows_that_begin_and_end_together_change_nothing(
    tmp_path: Path, spans: list[tuple[str, int, int, str, int]], seed: int
) -> None:
    # Whole microseconds, as PyTorch wrote them for years: many events share both ends.
    trace = Trace(dialect=EPOCH_WHOLE)
    trace.step(0, 0, 20_000)
    for kind, start, length, name, which in spans:
        at, dur = 1_000 * start, 1_000 * length
        if kind == "op":
            trace.op(name, at, dur, tid=trace.tid + which % 2)
        elif kind == "annotation":
            trace.annotation(name, at, dur)
        elif kind == "python":
            trace.python(name, at, dur)
        elif kind == "call":
            trace.call("cudaStreamSynchronize", at, dur)
        else:
            trace.launch(
                name, at, dur, kernel_at=at + 1_000 * which, kernel_for=dur, stream=7 + which
            )
    same_in_any_order(tmp_path, json.loads(trace.encode()), seed)
