"""Any bytes and any values: a run whose causes sum to the observed time, or one clear error."""

from __future__ import annotations

import functools
import gzip
import json
import operator
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chopper import pipeline, reports
from chopper.errors import ChopperError
from chopper.storage.manifest import encode
from chopper.tables import TABLES
from tests.fuzz.mutating import edit_bytes, edit_json, to_text
from tests.kineto_writer import EPOCH_WHOLE, TODAY, small_trace


def outcome_of(data: bytes) -> None:
    """Read bytes: a run whose causes sum to the observed time, or a ChopperError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.json"
        path.write_bytes(data)
        try:
            found = pipeline.attribute(path)
        except ChopperError as exc:
            assert "\n" not in str(exc)  # noqa: PT017
            return
        assert sum(found.pieces["time_ns"].to_pylist()) == found.observed_ns
        assert sum(leaf.time_ns for leaf in found.leaves()) == found.observed_ns
        assert (found.pieces["time_ns"].to_numpy() >= 0).all()
        json.dumps(reports.document(found), allow_nan=False)
        for part in found.recording.manifest.ranks:
            encode(part)
        for (_, name), table in found.recording.store.items():
            TABLES[name].validate(table).validate(full=True)


SEEDS = [small_trace(TODAY, rank=0, world=2).encode(), small_trace(EPOCH_WHOLE).encode()]
randoms = st.integers(0, 2**32).map(Random)
fuzz = settings(max_examples=60, derandomize=True)


@given(seed=st.sampled_from(SEEDS), random=randoms, edits=st.integers(1, 5), packed=st.booleans())
@fuzz
def test_any_bytes_give_a_closed_run_or_an_error(
    seed: bytes, random: Random, edits: int, packed: bool
) -> None:
    data = gzip.compress(seed, mtime=0) if packed else seed
    for _ in range(edits):
        data = edit_bytes(random, data)
    outcome_of(data)


@given(random=randoms, edits=st.integers(1, 6))
@fuzz
def test_any_value_in_any_place_gives_a_closed_run_or_an_error(random: Random, edits: int) -> None:
    document = json.loads(SEEDS[0])
    for _ in range(edits):
        document = edit_json(random, document)
    outcome_of(to_text(random, document))


DIMS = ("traceEvents", 3, "args", "Input Dims")


@pytest.mark.parametrize(
    "edits",
    [
        {("baseTimeNanoseconds",): 2**62 - 1},
        {("traceEvents", 2, "args", "correlation"): 2**64 - 1},
        {("traceEvents", 4, "cat"): "\ud800", ("x",): float("nan")},
        {("traceEvents", 3, "args", "Input type"): {}, ("traceEvents", 5, "name"): "NCCL"},
        {DIMS: [[2**62] * 20], ("traceEvents", 5, "name"): "nccl_AllReduce"},
        {(*DIMS, 0, 0): 9_007_199_254_740_928},
    ],
)
def test_values_that_failed_once(edits: dict[tuple[Any, ...], Any]) -> None:
    document = json.loads(SEEDS[0])
    for path, value in edits.items():
        *above, key = path
        functools.reduce(operator.getitem, above, document)[key] = value
    outcome_of(json.dumps(document).encode("utf-8", "surrogatepass"))
