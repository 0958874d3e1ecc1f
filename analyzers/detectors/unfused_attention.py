"""Attention as products around a softmax, whose scores go through memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping

import numpy as np

from chopper.analyzers.detectors import Sighting, detector
from chopper.analyzers.events.device import Events
from chopper.analyzers.trace.join import Links

DETECTOR = detector("unfused_attention")
_PRODUCTS = frozenset({"aten::bmm", "aten::baddbmm", "aten::matmul"})
_SOFTMAX = frozenset({"aten::_softmax", "aten::_safe_softmax", "aten::_masked_softmax"})
_BETWEEN = 8
"""Kernels between a product and the softmax, at most."""


def unfused_attention(events: Events, links: Mapping[int, Links]) -> Iterator[Sighting]:
    """DEVICE_EVENT, HOST_SPAN -> at most one sighting: all forward calls of the run."""
    gone, about, largest, calls = {}, {}, (0, ""), 0
    for rank, link in links.items():
        rows = np.sort(events.row[events.rank == rank])
        between, around, most = _attention(link, rows)
        if between:
            gone[rank], about[rank] = np.unique(between), np.unique([*between, *around])
            calls += len(around) // 2
            largest = max(largest, most)
    if gone:
        kernels = sum(map(len, gone.values()))
        evidence = {"calls": calls, "kernels": kernels, "dims": largest[1]}
        yield Sighting(detector="unfused_attention", events=about, gone=gone, evidence=evidence)


def _attention(links: Links, rows: np.ndarray) -> tuple[list[int], list[int], tuple[int, str]]:
    """Return the events between products, the products, and the largest scores of one rank."""
    between: list[int] = []
    around: list[int] = []
    largest = (0, "")
    if not len(links.host):
        return between, around, largest
    codes, values = links.op_names
    dims_of, texts = links.host.input_dims
    stream = links.events.stream_key
    softmax = np.array([name in _SOFTMAX for name in values] + [False])
    if not softmax.any():
        return between, around, largest
    for lane in np.unique(stream[rows]):
        mine = rows[(stream[rows] == lane) & (links.op_row[rows] >= 0)]
        op, shapes = codes[mine], dims_of[links.op_row[mine]]
        for at in np.flatnonzero(softmax[op]).tolist():
            # Few kernels stand around a softmax: what is not near one is never read.
            first = max(at - _BETWEEN, 0)
            near = slice(first, at + _BETWEEN + 1)
            ops = [values[c] for c in op[near].tolist()]
            dims = [_dims(texts, code) for code in shapes[near].tolist()]
            middle = at - first
            if not dims[middle]:
                continue
            scores = dims[middle][0]
            before = _product(ops, dims, middle, -1, math.prod(scores))
            after = _product(ops, dims, middle, 1, math.prod(scores))
            if before is None or after is None:
                continue
            if _written(dims[before]) != math.prod(scores):
                continue
            between += mine[first + before + 1 : first + after].tolist()
            around += [int(mine[first + before]), int(mine[first + after])]
            largest = max(largest, (math.prod(scores), " × ".join(map(str, scores))))
    return between, around, largest


def _product(
    ops: list[str], dims: list[list[list[int]]], at: int, direction: int, count: int
) -> int | None:
    """Return the next product before or after a softmax; None where something else comes first."""
    for step in range(1, _BETWEEN + 1):
        i = at + direction * step
        if not 0 <= i < len(ops):
            return None
        if ops[i] in _PRODUCTS:
            return i
        if all(math.prod(shape) != count for shape in dims[i] if shape):
            return None
    return None


def _written(dims: list[list[int]]) -> int | None:
    """Return the elements that a batched product writes."""
    matrices = [shape for shape in dims if len(shape) >= 2][-2:]
    if len(matrices) < 2:
        return None
    return math.prod(matrices[0][:-1]) * matrices[1][-1]


def _dims(texts: list[str], code: int) -> list[list[int]]:
    """Return the recorded shapes of an operator's inputs; empty where there are none."""
    if code < 0:
        return []
    try:
        value = json.loads(texts[code])
    except (ValueError, RecursionError):
        return []
    if not isinstance(value, list):
        return []
    return [s for s in value if isinstance(s, list) and all(isinstance(n, int) for n in s)]
