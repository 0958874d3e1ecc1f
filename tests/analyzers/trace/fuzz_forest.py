"""Give the forest in C arrays of all kinds, sound and unsound, and see that it lives.

    python tests/analyzers/trace/fuzz_forest.py [--count 10000] [--seed 0] [--sanitize]

With ``--sanitize`` it is first built with the address and undefined-behaviour sanitizers; any
report of theirs, and any leak that the extension is part of, is a failure.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.sanitizing import run_fuzzer


def fuzz(count: int, seed: int) -> None:
    """Call every function ``count`` times with arrays that may be anything."""
    from chopper.analyzers.trace import _forest

    accepted = refused = 0
    for i in range(count):
        rng = np.random.default_rng(seed + i)
        for name, kinds in _ARRAYS.items():
            length = int(rng.integers(0, 12))
            arrays = [_array(rng, kind, length) for kind in kinds]
            numbers = (int(rng.integers(-1, 5)), _number(rng)) if name == "nest" else ()
            try:
                getattr(_forest, name)(*numbers, *arrays)
                accepted += 1
            except (ValueError, TypeError, BufferError):
                refused += 1
    print(f"{count} rounds, {accepted} calls accepted, {refused} refused")


# Times, rows above, threads, masks, depths, and places: what each array holds when it is sound.
_ARRAYS = {
    "nest": "tthtdtt",
    "nearest": "rmr",
    "topmost": "rmr",
    "containing": "rmm",
    "within": "rmm",
    "inherit": "rc",
    "look_up_masks": "cmv",
    "look_up_codes": "cdd",
    "place_segments": "ttrhf",
    "fill_segments": "ttrhfss",
}


def _array(rng: np.random.Generator, kind: str, length: int) -> Any:
    """An array of a kind, or of something else once in a while."""
    if rng.random() < 0.02:
        return rng.choice(np.array([None, 3, "text", b"bytes"], dtype=object))
    if rng.random() < 0.03:
        length = int(rng.integers(0, 12))
    if rng.random() < 0.02:
        kind = str(rng.choice(list("trhmdc")))
    if rng.random() < 0.05:  # numbers of rows and threads that do not exist
        values = np.array([_number(rng) for _ in range(length)], dtype=np.int64)
    elif kind == "r":
        values = rng.integers(-1, np.maximum(np.arange(length), 0), endpoint=False)
    elif kind in "cv":
        values = rng.integers(-1 if kind == "c" else 0, 3, length)
    elif kind == "h":
        values = rng.integers(0, 4, length)
    elif kind == "f":
        values = np.sort(rng.integers(0, 24, int(rng.integers(3, 7))))
    elif kind == "s":
        values = np.zeros(24, dtype=np.int64)
    else:
        values = np.sort(rng.integers(0, 30, length))
    dtype = {"m": bool, "v": bool, "d": np.int32, "c": np.int32}.get(kind, np.int64)
    array = values.astype(dtype)
    if rng.random() < 0.02:
        array = array[::2]
    if rng.random() < 0.02:
        array.flags.writeable = False
    return array


def _number(rng: np.random.Generator) -> int:
    limits = np.iinfo(np.int64)
    return int(rng.choice([limits.min, limits.max, -2, -1, 0, 1, 5, 40, 1 << 40]))


if __name__ == "__main__":
    run_fuzzer(
        __doc__, __file__, "analyzers/trace/_forest.c", "chopper.analyzers.trace._forest", fuzz
    )
