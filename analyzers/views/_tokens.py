"""Tokens that a rank's embedding looked up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow.compute as pc

from chopper.analyzers.trace.columns import ints, strings
from chopper.errors import JSON_ERRORS

if TYPE_CHECKING:
    from chopper.analyzers.attributed import Attributed


def tokens_of(run: Attributed, rank: int) -> int | None:
    """Return the tokens that a rank looked up in its steps, None where that cannot be told.

    The elements of the indices of its ``aten::embedding`` calls, when all of these use one table
    of the same shape: a second one (positions, types) would count the same tokens again.
    """
    trace = run.joined.get(rank)
    if trace is None:
        return None
    spans = trace.host_span
    codes, names = strings(spans, "name")
    if "aten::embedding" not in names:
        return None
    rows = np.flatnonzero(codes == names.index("aten::embedding"))
    steps = trace.step
    steps = steps.filter(steps["traced"]) if steps.num_rows else steps
    if steps.num_rows and run.whole is not run:
        steps = steps.filter(pc.is_in(steps["number"], value_set=run.windows["number"]))
    if steps.num_rows:
        at = ints(spans, "start_ns")[rows]
        step = np.searchsorted(ints(steps, "start_ns"), at, side="right") - 1
        rows = rows[(step >= 0) & (at < ints(steps, "end_ns")[np.maximum(step, 0)])]
    dims, texts = strings(spans, "input_dims")
    found, counts = np.unique(dims[rows], return_counts=True)
    tokens = 0
    tables = set()
    for code, count in zip(found.tolist(), counts.tolist(), strict=True):
        shapes = _shapes(texts[code]) if code >= 0 else None
        if shapes is None:
            return None
        tables.add(tuple(shapes[0]))
        tokens += count * int(np.prod(shapes[1]))
    return tokens if len(tables) == 1 else None


def _shapes(text: str) -> list[list[int]] | None:
    """Shapes of the table and the indices of an embedding."""
    try:
        dims = msgspec.json.decode(text)
        return msgspec.convert(dims[:2], type=list[list[int]]) if len(dims) >= 2 else None
    except (*JSON_ERRORS, TypeError):
        return None
