"""Any bytes and any values: a run whose causes sum to the observed time, or one clear error."""

from __future__ import annotations

import contextlib
import gzip
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

import chopper
from chopper.errors import ChopperError
from chopper.storage.manifest import encode
from chopper.tables import TABLES
from tests.kineto_writer import EPOCH_WHOLE, TODAY, small_trace


def outcome_of(data: bytes) -> None:
    """Read bytes: a run whose causes sum to the observed time, or a ChopperError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.json"
        path.write_bytes(data)
        try:
            found = chopper.attribute(path)
        except ChopperError as exc:
            assert "\n" not in str(exc)  # noqa: PT017
            return
        assert sum(found.pieces["time_ns"].to_pylist()) == found.observed_ns
        assert sum(leaf.time_ns for leaf in found.leaves()) == found.observed_ns
        assert (found.pieces["time_ns"].to_numpy() >= 0).all()
        json.dumps(found.to_dict(), allow_nan=False)
        for part in found.recording.manifest.ranks:
            encode(part)
        for (_, name), table in found.recording.store.items():
            TABLES[name].validate(table).validate(full=True)


SEEDS = [small_trace(TODAY, rank=0, world=2).encode(), small_trace(EPOCH_WHOLE).encode()]
byte_edits = st.lists(
    st.tuples(
        st.sampled_from(["flip", "delete", "insert", "truncate", "copy"]),
        st.floats(0, 1, exclude_max=True),
        st.integers(0, 255),
        st.integers(1, 40),
    ),
    min_size=1,
    max_size=5,
)
fuzz = settings(max_examples=60, derandomize=True)


@given(seed=st.sampled_from(SEEDS), edits=byte_edits, packed=st.booleans())
@fuzz
def test_any_bytes_give_a_closed_run_or_an_error(
    seed: bytes, edits: list[tuple[str, float, int, int]], packed: bool
) -> None:
    data = bytearray(gzip.compress(seed, mtime=0) if packed else seed)
    for kind, where, byte, length in edits:
        at = int(where * len(data))
        match kind:
            case "flip" if data:
                data[at] ^= byte or 1
            case "delete":
                del data[at : at + length]
            case "insert":
                data[at:at] = bytes([byte]) * length
            case "truncate":
                del data[at:]
            case "copy":
                data[at:at] = data[at : at + length * 20]
    outcome_of(bytes(data))


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([0, -1, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 10**25])
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=8)
    | st.sampled_from(["", "7", "stream 7", "ProfilerStep#12", "nccl", "\ud800", "NaN", "1e999"])
    | st.sampled_from([[], {}, [[]], [1, [2]], {"a": {"b": 1}}])
)
PLAIN: dict[str, Any] = json.loads(SEEDS[0])


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from _places(value[key], (*path, key))
    elif isinstance(value, list):
        for i in range(len(value)):
            yield from _places(value[i], (*path, i))


PLACES = list(_places(PLAIN))


@given(
    edits=st.lists(st.tuples(st.sampled_from(PLACES), scalars), min_size=1, max_size=6),
    strict=st.booleans(),
)
@example(edits=[(("baseTimeNanoseconds",), 2**62 - 1)], strict=True)
@example(edits=[(("traceEvents", 2, "args", "correlation"), 2**64 - 1)], strict=True)
@example(edits=[(("traceEvents", 4, "cat"), "\ud800")], strict=False)
@example(
    edits=[(("traceEvents", 3, "args", "Input type"), {}), (("traceEvents", 5, "name"), "NCCL")],
    strict=True,
)
@example(
    edits=[
        (("traceEvents", 3, "args", "Input Dims"), [[2**62] * 20]),
        (("traceEvents", 5, "name"), "nccl_AllReduce"),
    ],
    strict=True,
)
@example(
    edits=[(("traceEvents", 3, "args", "Input Dims", 0, 0), 9_007_199_254_740_928)], strict=True
)
@fuzz
def test_any_value_in_any_place_gives_a_closed_run_or_an_error(
    edits: list[tuple[tuple[Any, ...], Any]], strict: bool
) -> None:
    document = json.loads(SEEDS[0])
    for path, value in edits:
        at: Any = document
        with contextlib.suppress(KeyError, IndexError, TypeError):
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = value
    text = json.dumps(document)
    if not strict:
        text = text[:-1] + ',"x": NaN}'
    outcome_of(text.encode("utf-8", "surrogatepass"))
