"""The forest of spans in C, with the arguments and results of ``span_forest_numpy``.

It cannot be imported where the package was installed without a C compiler.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import chopper.analyzers.trace._forest as _forest


def nest(
    tolerance_ns: int, start_ns: np.ndarray, dur_ns: np.ndarray, thread: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """As `span_forest_numpy.nest`."""
    start_ns, dur_ns, thread = _contiguous(start_ns), _contiguous(dur_ns), _contiguous(thread)
    parent, start, end = (np.empty(len(thread), dtype=np.int64) for _ in range(3))
    depth = np.empty(len(thread), dtype=np.int32)
    threads = int(thread.max(initial=-1)) + 1
    _forest.nest(threads, tolerance_ns, start_ns, dur_ns, thread, parent, depth, start, end)
    return parent, depth, start, end


def _walk(
    fill: Callable[[np.ndarray, np.ndarray, np.ndarray], None], dtype: type
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return a function of parents and a mask that a function in C fills in."""

    def walk(parent: np.ndarray, marked: np.ndarray) -> np.ndarray:
        out: np.ndarray = np.empty(len(parent), dtype=dtype)
        fill(_contiguous(parent), _contiguous(marked, bool), out)
        return out

    return walk


nearest = _walk(_forest.nearest, np.int64)
topmost = _walk(_forest.topmost, np.int64)
containing = _walk(_forest.containing, bool)
within = _walk(_forest.within, bool)


def inherited(parent: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """As `span_forest_numpy.inherited`."""
    result = np.array(codes, dtype=np.int32)
    _forest.inherit(_contiguous(parent), result)
    return result


def look_up(codes: np.ndarray, values: np.ndarray) -> np.ndarray:
    """As `span_forest_numpy.look_up`."""
    if codes.dtype != np.int32 or values.dtype not in (bool, np.int32):
        return values[codes]
    result = np.empty(len(codes), dtype=values.dtype)
    fill = _forest.look_up_masks if values.dtype == bool else _forest.look_up_codes
    fill(np.ascontiguousarray(codes), result, np.ascontiguousarray(values))
    return result


def segments(
    threads: int, start_ns: np.ndarray, end_ns: np.ndarray, parent: np.ndarray, thread: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `span_forest_numpy.segments`."""
    spans = _contiguous(start_ns), _contiguous(end_ns), _contiguous(parent), _contiguous(thread)
    first = np.empty(threads + 1, dtype=np.int64)
    _forest.place_segments(*spans, first)
    time, span = (np.empty(first[-1], dtype=np.int64) for _ in range(2))
    _forest.fill_segments(*spans, first, time, span)
    return time, span, first


def _contiguous(values: np.ndarray, dtype: type = np.int64) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=dtype)
