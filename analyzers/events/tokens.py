"""Tokens that a rank's embeddings looked up, and the host spans of its steps."""

from __future__ import annotations

import msgspec
import numpy as np
import pyarrow.compute as pc

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.events.steps import TracedSteps
from chopper.analyzers.trace.columns import ints, strings
from chopper.errors import JSON_ERRORS

_EMBEDDING = "aten::embedding"


def tokens_of(run: Attributed, rank: int) -> int | None:
    """Return the tokens that a rank looked up in its steps, None where that cannot be told.

    All its embeddings must use one table of the same shape: a second one (positions, types) would
    count the same tokens again.
    """
    counts = lookups(run, rank) if rank in run.joined else {}
    return next(iter(counts.values())) if len(counts) == 1 else None


def lookups(run: Attributed, rank: int) -> dict[tuple[int, ...], int]:
    """Return the indices looked up in a rank's steps by shape of the embedding's table.

    Empty where the shapes of a call were not recorded.
    """
    spans = run.joined[rank].host_span
    codes, names = strings(spans, "name")
    if _EMBEDDING not in names:
        return {}
    inside, _ = spans_in_steps(run, rank)
    dims, texts = strings(spans, "input_dims")
    kinds, counts = np.unique(dims[inside & (codes == names.index(_EMBEDDING))], return_counts=True)
    found: dict[tuple[int, ...], int] = {}
    for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
        try:
            shapes = msgspec.json.decode(texts[kind] if kind >= 0 else "")
            table, indices = msgspec.convert(shapes[:2], type=tuple[tuple[int, ...], list[int]])
        except (*JSON_ERRORS, TypeError):
            return {}
        found[table] = found.get(table, 0) + count * int(np.prod(indices))
    return found


def spans_in_steps(run: Attributed, rank: int) -> tuple[np.ndarray, int]:
    """Return the mask of the host spans that begin in a rank's traced steps, and their number.

    Of the steps that the run is about; without any, the whole trace is one.
    """
    host, steps = run.joined[rank].host_span, run.joined[rank].step
    steps = steps.filter(steps["traced"]) if steps.num_rows else steps
    if steps.num_rows and run.whole is not run:
        steps = steps.filter(pc.is_in(steps["number"], value_set=run.windows["number"]))
    if not steps.num_rows:
        return np.ones(host.num_rows, dtype=bool), 1
    traced = TracedSteps(*(ints(steps, name) for name in ("number", "start_ns", "end_ns")))
    time_ns = ints(host, "start_ns")
    if run.whole is run:
        # What lies between two steps belongs to their windows.
        inside: np.ndarray = (time_ns >= traced.start_ns[0]) & (time_ns < traced.end_ns[-1])
        return inside, len(traced)
    return traced.index_at(time_ns) >= 0, len(traced)
