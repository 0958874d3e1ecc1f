"""Steps and windows of one rank, the host spans in them and the tokens that they looked up."""

from __future__ import annotations

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.coordinates import groups_along
from chopper.analyzers.trace import windows
from chopper.analyzers.trace.columns import ints, strings
from chopper.errors import JSON_ERRORS

_EMBEDDING = "aten::embedding"


def windows_of(run: Attribution, rank: int) -> pa.Table:
    """Return the step windows of a rank, in order. -> WINDOW."""
    return run.windows.filter(pc.equal(run.windows["rank"], rank))


def step_table(run: Attribution, rank: int) -> pa.Table:
    """Return the steps of a rank as they were joined, as recorded where it has no trace."""
    joined = run.joined.get(rank)
    return run.recording.table(rank, "step") if joined is None else joined.step


def steps_of(run: Attribution, rank: int) -> pa.Table:
    """Return all recorded steps of a rank, traced or not; its windows where it has none."""
    table = step_table(run, rank)
    return table if table.num_rows else windows_of(run, rank)


def traced_steps(run: Attribution, rank: int) -> windows.Steps:
    """Return the traced steps of a rank. STEP -> numbers and times."""
    return windows.traced_steps(step_table(run, rank))


def tokens_of(run: Attribution, rank: int) -> int | None:
    """Return the tokens that a rank looked up in its steps, None where that cannot be told.

    All its embeddings must use one table of the same shape: a second one (positions, types) would
    count the same tokens again.
    """
    counts = lookups(run, rank) if rank in run.joined else {}
    return next(iter(counts.values())) if len(counts) == 1 else None


def tokens_of_steps(
    run: Attribution, ranks: tuple[int, ...], numbers: np.ndarray
) -> tuple[np.ndarray, str]:
    """Return the tokens of steps, NaN where not known, and who counted them. STEP_WORK -> tokens.

    Summed over ranks: by the program's count, or of a mean step by its embedding. Ranks of one
    tensor-parallel group work on the same tokens, which count once.
    """
    ranks = with_own_tokens(run, ranks)
    counted = [run.recording.table(rank, "step_work") for rank in ranks]
    if all(table.num_rows for table in counted):
        work = pa.concat_tables(table.select(["step", "tokens_count"]) for table in counted)
        by_step = work.group_by("step").aggregate([("tokens_count", "sum")])
        total = dict(zip(*(c.to_pylist() for c in by_step.itercolumns()), strict=True))
        return np.array([total.get(n, np.nan) for n in numbers.tolist()], np.float64), "program"
    per_step = 0.0
    for rank in ranks:
        table = step_table(run, rank)
        traced = table.filter(table["traced"]).num_rows if table.num_rows else 1
        per_step += (tokens_of(run, rank) or np.nan) / (traced or np.nan)
    return np.full(len(numbers), per_step), "embeddings of traced steps"


def with_own_tokens(run: Attribution, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks without those that share the tokens of an earlier one.

    Ranks that differ only in their place in tensor parallelism work on the same tokens.
    """
    sharing: set[int] = set()
    for members in groups_along(run.recording.manifest, "tensor") if len(ranks) > 1 else ():
        sharing.update([rank for rank in ranks if rank in members][1:])
    return tuple(rank for rank in ranks if rank not in sharing)


def lookups(run: Attribution, rank: int) -> dict[tuple[int, ...], int]:
    """Return the indices that a rank looked up by shape of the table; none where not known."""
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


def spans_in_steps(run: Attribution, rank: int) -> tuple[np.ndarray, int]:
    """Return the mask of the host spans that begin in a rank's traced steps, and their number.

    Of the steps that the run is about; without any, the whole trace is one. None of a rank that
    has no window in them.
    """
    host, steps = run.joined[rank].host_span, run.joined[rank].step
    steps = steps.filter(steps["traced"]) if steps.num_rows else steps
    if not windows_of(run, rank).num_rows and windows_of(run.all_steps, rank).num_rows:
        return np.zeros(host.num_rows, dtype=bool), 0
    if steps.num_rows and run.all_steps is not run:
        steps = steps.filter(pc.is_in(steps["number"], value_set=run.windows["number"]))
    if not steps.num_rows:
        return np.ones(host.num_rows, dtype=bool), 1
    traced = windows.traced_steps(steps)
    time_ns = ints(host, "start_ns")
    if run.all_steps is run:
        # What lies between two steps belongs to their windows.
        inside: np.ndarray = (time_ns >= traced.start_ns[0]) & (time_ns < traced.end_ns[-1])
        return inside, len(traced)
    return traced.index_at(time_ns) >= 0, len(traced)
