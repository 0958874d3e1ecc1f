"""The forest in C against the one in numpy: the same from all spans, nested well or badly.

It is also built with the address and undefined-behaviour sanitizers and given arrays of all kinds
(``fuzz_forest.py``). By hand, for longer:

    python tests/analyzers/trace/fuzz_forest.py --sanitize --count 1000000
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chopper.analyzers.trace import span_forest_numpy
from chopper.analyzers.trace.span_forest import COMPILED
from tests.sanitizing import HAS_COMPILER, run_program, skip_without_sanitizers

pytestmark = pytest.mark.skipif(
    not COMPILED and not HAS_COMPILER, reason="no C compiler: the forest was not built"
)
if COMPILED:
    from chopper.analyzers.trace import _forest, span_forest_c

Spans = tuple[np.ndarray, np.ndarray, np.ndarray]


def test_forest_was_built() -> None:
    """Where there is a compiler, the fast way is there: nobody would see it missing."""
    assert COMPILED


@st.composite
def spans(draw: st.DrawFn) -> Spans:
    """(start, duration, thread) in the order of tables: some overlap, are empty, even negative."""
    unit = draw(st.sampled_from([1, 1, 500, 1000]))
    base = draw(st.sampled_from([0, -7000, 1_751_410_836_000_000_000]))
    rows = draw(
        st.lists(st.tuples(st.integers(0, 40), st.integers(-2, 25), st.integers(0, 2)), max_size=40)
    )
    rows.sort(key=lambda row: (row[0], -row[1]))
    start, dur, thread = (np.array([row[i] for row in rows], dtype=np.int64) for i in range(3))
    return start * unit + base, dur * unit, np.unique(thread, return_inverse=True)[1]


@given(spans(), st.sampled_from([0, 1, 1000]), st.data())
def test_same_as_level_by_level(given_spans: Spans, tolerance: int, data: st.DataObject) -> None:
    start, dur, thread = given_spans
    found = span_forest_c.nest(tolerance, start, dur, thread)
    expected = span_forest_numpy.nest(tolerance, start, dur, thread)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.tolist() == theirs.tolist()
    parent, _, clipped_start, clipped_end = found
    marked = np.array(data.draw(st.lists(st.booleans(), min_size=len(start), max_size=len(start))))
    for name in ("nearest", "topmost", "containing", "within"):
        ours, theirs = (
            getattr(m, name)(parent, marked.astype(bool))
            for m in (span_forest_c, span_forest_numpy)
        )
        assert ours.dtype == theirs.dtype
        assert ours.tolist() == theirs.tolist(), name
    codes = data.draw(st.lists(st.integers(-2, 3), min_size=len(start), max_size=len(start)))
    ours, theirs = (
        m.inherited(parent, np.array(codes, np.int32)) for m in (span_forest_c, span_forest_numpy)
    )
    assert ours.dtype == theirs.dtype == np.int32
    assert ours.tolist() == theirs.tolist()
    # A thread more than there are spans on: it has no segments.
    at = (4, clipped_start, clipped_end, parent, thread)
    for ours, theirs in zip(
        span_forest_c.segments(*at), span_forest_numpy.segments(*at), strict=True
    ):
        assert ours.dtype == theirs.dtype
        assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("dtype", [bool, np.int32, np.float64])
@pytest.mark.parametrize("narrow", [True, False])
def test_codes_are_looked_up_as_by_index(dtype: type, narrow: bool) -> None:
    codes = np.array([0, 2, -1, 1, 1], dtype=np.int32 if narrow else np.int64)
    values: np.ndarray = np.array([3, 0, 1, 0], dtype=dtype)
    ours, theirs = (m.look_up(codes, values) for m in (span_forest_c, span_forest_numpy))
    assert ours.dtype == theirs.dtype
    assert ours.tolist() == theirs.tolist() == [dtype(v) for v in (3, 1, 0, 0, 0)]


def test_times_at_the_end_of_their_range() -> None:
    most = np.iinfo(np.int64).max
    start = np.array([0, 5, most - 3, most - 2], dtype=np.int64)
    dur = np.array([most, 10, 3, 2], dtype=np.int64)
    thread = np.zeros(4, np.int64)
    for forest in (span_forest_c, span_forest_numpy):
        parent, _, s, e = forest.nest(0, start, dur, thread)
        assert parent.tolist() == [-1, 0, 0, 2]
        time, span, _ = forest.segments(1, s, e, parent, thread)
        assert time.tolist() == [0, 5, 15, most - 3, most - 2, most]
        assert span.tolist() == [0, 1, 0, 2, 3, -1]


def test_deep_stacks() -> None:
    depth = 20_000
    start = np.arange(depth)
    dur = 2 * depth - 2 * start
    thread = np.zeros(depth, np.int64)
    marked = start == 3
    for forest in (span_forest_c, span_forest_numpy):
        parent = forest.nest(0, start, dur, thread)[0]
        assert (parent == start - 1).all()
        assert forest.nearest(parent, marked).tolist() == [-1] * 3 + [3] * (depth - 3)


@pytest.mark.parametrize(
    ("name", "arrays", "message"),
    [
        ("nearest", ([1, -1], [True, False], [0, 0]), "row 0: its parent is not a row above it"),
        ("topmost", ([-1, 1], [True, False], [0, 0]), "row 1: its parent is not a row above it"),
        ("containing", ([-1, 7], [True, False], [True, True]), "row 1: its parent"),
        ("within", ([-1, 1], [True, False], [False, False]), "row 1: its parent is not"),
        ("nearest", ([-1, 0], [True], [0, 0]), "marked: expected 2 values, found 1"),
        ("place_segments", ([0], [9], [-1], [1], [0, 0]), "row 0: its thread is not one"),
        ("place_segments", ([0], [9], [-1], [0], []), "first: expected a value more"),
        ("fill_segments", ([0], [9], [-1], [0], [0, 5], [0], [0]), "thread 0 has no place among 1"),
        ("fill_segments", ([0], [9], [-1], [0], [0, 1], [0], [0]), "not as many as placed"),
        ("fill_segments", ([0], [9], [-1], [0], [0, 1], [0], [0, 0]), "differ in length"),
    ],
)
def test_numbers_out_of_range_are_refused(
    name: str, arrays: tuple[list[int], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(_forest, name)(*(_as_array(values) for values in arrays))


def _as_array(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=bool if values and type(values[0]) is bool else np.int64)


def test_threads_that_were_not_announced_are_refused() -> None:
    out = [np.zeros(2, t) for t in (np.int64, np.int32, np.int64, np.int64)]
    times = np.zeros(2, np.int64)
    with pytest.raises(ValueError, match="row 1: its thread is not one of those announced"):
        _forest.nest(1, 0, times, times, np.array([0, 1]), *out)
    with pytest.raises(ValueError, match="3 threads of 2 spans"):
        _forest.nest(3, 0, times, times, np.array([0, 1]), *out)


def test_codes_without_a_value_are_refused() -> None:
    codes, found = np.array([0, 2], np.int32), np.zeros(2, np.int32)
    for unknown in (2, -2, 1 << 30):
        codes[1] = unknown
        with pytest.raises(ValueError, match="row 1: its code has no value"):
            _forest.look_up_codes(codes, found, np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="row 0: its code has no value"):
        _forest.look_up_masks(np.array([-1], np.int32), np.zeros(1, bool), np.zeros(0, bool))
    with pytest.raises(ValueError, match="row 1: its parent is not a row above it"):
        _forest.inherit(np.array([-1, 1]), np.array([0, -1], np.int32))


def test_other_kinds_of_arrays_are_refused() -> None:
    whole, mask = np.full(4, -1, np.int64), np.zeros(4, bool)
    with pytest.raises(TypeError, match="parent: expected one dimension of int64, found 1 of"):
        _forest.nearest(whole.astype(np.int32), mask, whole)
    with pytest.raises(TypeError, match="marked: expected one dimension of bool, found 2 of"):
        _forest.nearest(whole, mask.reshape(2, 2), whole)
    with pytest.raises(TypeError, match="expected 3 arguments, found 2"):
        _forest.nearest(whole, mask)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="contiguous"):
        _forest.nearest(np.full(8, -1)[::2], mask, whole)
    whole.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        _forest.nearest(whole, mask, whole)


def test_sanitized_build_survives_arrays_of_all_kinds(tmp_path: Path) -> None:
    """Out-of-bounds access, undefined behaviour and leaks."""
    skip_without_sanitizers(tmp_path)
    done = run_program("tests/analyzers/trace/fuzz_forest.py", "--sanitize", "--count", "800")
    assert done.returncode == 0, done.stderr[-5000:]
    assert "800 rounds" in done.stdout
