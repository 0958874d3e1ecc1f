from __future__ import annotations

from typing import Any

# Arrays are one-dimensional, without gaps, and of the same length unless said otherwise: int64, but
# `depth` int32 and masks bool. They must not overlap. ValueError where a number of a row or thread
# is out of range, TypeError where an array is of another kind.

def nest(
    threads: int,
    tolerance_ns: int,
    start_ns: Any,
    dur_ns: Any,
    thread: Any,
    parent: Any,
    depth: Any,
    clipped_start_ns: Any,
    clipped_end_ns: Any,
    /,
) -> None:
    """Fill in parents, depths and clipped times of spans sorted by start, then longest first."""

def nearest(parent: Any, marked: Any, found: Any, /) -> None:
    """Fill in each row's nearest marked one upwards, itself included; -1 for none."""

def topmost(parent: Any, marked: Any, found: Any, /) -> None:
    """Fill in each row's farthest marked one upwards, itself included; -1 for none."""

def containing(parent: Any, marked: Any, found: Any, /) -> None:
    """Fill in the mask of the rows that have a marked one somewhere below them."""

def within(parent: Any, marked: Any, found: Any, /) -> None:
    """Fill in the mask of the rows that are marked, or have a marked one somewhere above them."""

def inherit(parent: Any, codes: Any, /) -> None:
    """Replace each negative code (int32) by that of the nearest row above with one, else by -1."""

def look_up_masks(codes: Any, found: Any, values: Any, /) -> None:
    """Fill in the value (bool) of each code (int32); -1 stands for the last of ``values``."""

def look_up_codes(codes: Any, found: Any, values: Any, /) -> None:
    """The same for values of int32."""

def place_segments(start_ns: Any, end_ns: Any, parent: Any, thread: Any, first: Any, /) -> None:
    """Fill in where each thread's segments begin; ``first`` has a value more than threads."""

def fill_segments(
    start_ns: Any,
    end_ns: Any,
    parent: Any,
    thread: Any,
    first: Any,
    segment_start_ns: Any,
    segment_span: Any,
    /,
) -> None:
    """Fill in the segments themselves, as many as ``place_segments`` found."""
