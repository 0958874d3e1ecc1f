"""Public functions: load, attribute, compare, replay, query and report a run."""

from __future__ import annotations

import contextlib
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chopper import pipeline
from chopper.analyzers.attributed import Attributed
from chopper.attribution import Attribution
from chopper.engines.choice import engine_of
from chopper.errors import UsageError
from chopper.notebook import as_cell
from chopper.storage.run import Run

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from chopper.analyzers.compare.result import Comparison
    from chopper.analyzers.replay.answers import WhatIf
    from chopper.attribution import Recoverable
    from chopper.engines import Engine
    from chopper.hardware.rank_device import Stated
    from chopper.pipeline import Source
    from chopper.reports.verdict import Verdict


class AttributedRun(Attributed):
    """The attribution of a run with its intermediate results, as :func:`attribute` returns it.

    ``chopper.Attribution`` is its name for annotations. It has all members of
    :class:`~chopper.attribution.Attribution`.

    :func:`report`, :func:`compare` and :func:`whatif` accept it and do not repeat the work.
    """

    def _repr_html_(self) -> str:
        return as_cell(self, "chopper.reports.run:notebook_page")

    @cached_property
    def verdict(self) -> Verdict:
        """What bounds the run: a sentence, the class behind it, and the largest causes."""
        from chopper.analyzers.replay.replay import replay_or_reason
        from chopper.reports.story import Story
        from chopper.reports.verdict import verdict

        return verdict(Story(self), replay_or_reason(self))

    def recoverable(self) -> dict[str, Recoverable]:
        """Predict what removing each cause alone would save, by replaying the run.

        A saving is None, with the reason, where the run cannot be replayed or the cause cannot be
        removed. The values do not add up. Each call replays the run.
        """
        from chopper.analyzers.replay.replay import recoverable, replay_or_reason

        return recoverable(self, replay_or_reason(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON form, schema ``chopper.attribution/3``."""
        from chopper.reports import document

        return document(self)


def load(source: Source, *, engine: Engine | None = None, device: Stated | None = None) -> Run:
    """Open a run directory, or read traces as a run.

    Args:
        source: a run directory; or a trace file, a glob, a directory of traces, or several.
        engine: reads the files and holds their tables, one of :mod:`chopper.engines`; by default
            this process where they are small, else one process per core.
        device: the device that it was recorded on, by any usual name (``"h100-sxm"``), or rank →
            device; for recordings that name none. It counts whatever they say.

    Raises:
        InputError: nothing is there, or it is neither a run nor traces.
        UsageError: the device is not in the table, or a rank not in the run.
    """
    return pipeline.read(source, engine, device=device)


def attribute(
    run: Run | Source,
    *,
    engine: Engine | None = None,
    ranks: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    device: Stated | None = None,
) -> AttributedRun:
    """Attribute every nanosecond of the run's step windows to exactly one cause.

    Where steps of several kinds were traced (with an evaluation, say, or slow first ones), it
    covers those of the step time; :attr:`~chopper.attribution.Attribution.whole` covers all of
    them. The run itself is not changed.

    Args:
        run: a run, or anything that :func:`load` takes.
        engine: runs the stages of each rank, one of :mod:`chopper.engines`; by default this
            process where the run is small or in its memory, else one process per core. The result
            is the same.
        ranks: the ranks that views, replay and timeline cover. By default all, or, in a run with
            more than two million host spans and device events, at most sixteen that stand out.
        steps: numbers of the steps to attribute. By default all that were traced.
        device: the device that it was recorded on, as :func:`load` takes it.

    Raises:
        InputError: nothing is there, or it is neither a run nor traces.
        UsageError: a rank that is not in the run, steps of which none was traced, or a device that
            is not in the table.
    """
    return _for_users(pipeline.attribute(run, engine, ranks, steps, device=device))


def _attributed(run: Run | Attribution | Source) -> Attributed:
    """Return a run attributed, as it is where it is that already."""
    if isinstance(run, Attributed):
        return run
    if isinstance(run, Attribution):
        raise UsageError(f"{run.source}: the attribution was loaded without its run")
    return attribute(run)


def _for_users(run: Attributed) -> AttributedRun:
    """Return the same values with the methods that users call."""
    values = {f.name: getattr(run, f.name) for f in fields(Attributed)}
    for part in ("all_kinds", "detail"):
        if values[part] is not None:
            values[part] = _for_users(values[part])
    return AttributedRun(**values)


def compare(
    a: Run | Attribution | Source,
    b: Run | Attribution | Source,
    *,
    allow_different: bool = False,
    all_steps: bool = False,
) -> Comparison:
    """Compare two runs: how B's step differs from A's, cause by cause, with intervals.

    Args:
        a: the reference: a run or its attribution, or anything that :func:`load` takes.
        b: the run to judge, likewise.
        allow_different: give a verdict even if the runs do different work.
        all_steps: keep leading steps that took much longer than those after them.

    Raises:
        InputError: one of them is neither a run nor traces.
    """
    from chopper.analyzers.compare.runs import compare as compared

    first, second = pipeline.beside(*(_attributed(r) for r in (a, b)))
    return compared(first, second, allow_different=allow_different, all_steps=all_steps)


def whatif(
    run: Run | Attribution | Source,
    *,
    fix: str | Sequence[str] = (),
    clock: str | None = None,
    link: str | None = None,
    latency: str | None = None,
    faster: str | Sequence[str] = (),
    without: str | Sequence[str] = (),
    graphs: bool = False,
    overlap: bool = False,
) -> WhatIf:
    """Predict the step time of a changed run by replaying its dependency graph.

    Without a change, replay the run: as it was, or as fast as its steps without a trace.

    Args:
        run: a run or its attribution, or anything that :func:`load` takes.
        fix: causes to remove: ids, their last parts (``data``), or plain names
            (``straggler``, ``launch_gaps``).
        clock: device clock, ``1980MHz``, or ``reference`` for the clock of its quoted peak.
        link: bandwidth between ranks, ``50GB/s`` or ``x2``.
        latency: of that link, ``5us`` or ``x0.5``.
        faster: ``gemm=2x``: kernels of a family, or those that a regular expression matches.
        without: operators to remove.
        graphs: launch each step as one CUDA graph.
        overlap: nothing but communication waits for communication.

    Raises:
        UsageError: an invalid or contradictory change, or one that this run has no data for.
        InputError: the run cannot be replayed.
    """
    from chopper.analyzers.replay.whatif_options import changes_of

    changes = changes_of(
        fix=[fix] if isinstance(fix, str) else fix,
        clock=clock,
        link=link,
        latency=latency,
        faster=[faster] if isinstance(faster, str) else faster,
        without=[without] if isinstance(without, str) else without,
        graphs=graphs,
        overlap=overlap,
    )
    return pipeline.whatif(_attributed(run), changes)


def query(run: Run | Attributed | Source, sql: str, *, memory: str = "2GB") -> pa.Table:
    """Run one SQL statement over the tables and views of a run.

    `chopper schema` lists them. Tables of single ranks begin with the columns ``rank`` and ``row``.
    Tables cover all traced steps; views cover those of the step time, which ``selection`` names.

    Args:
        run: a run or its attribution, or anything that :func:`load` takes.
        sql: one reading statement in DuckDB's dialect; it cannot access files.
        memory: memory limit of DuckDB.

    Raises:
        UsageError: the SQL is wrong.
        InputError: the run cannot be read, or the SQL needs more memory.
    """
    import pyarrow as pa

    from chopper.quantities import size_bytes
    from chopper.sql import Query

    with contextlib.ExitStack() as held:

        def engine() -> Engine:
            assert not isinstance(run, Attributed)
            return held.enter_context(engine_of(pipeline.sizes_of(run)))

        statement = held.enter_context(Query(run, sql, size_bytes(memory, "memory"), engine=engine))
        statement.plan()
        statement.read()
        schema, batches = statement.batches()
        return pa.Table.from_batches(batches, schema)


def report(
    run: Run | Attribution | Source, output: str | Path = "report.html", *, force: bool = True
) -> Path:
    """Write a report; the format follows the extension: .html, .md, .json or .txt.

    Args:
        run: a run or its attribution, or anything that :func:`load` takes.
        output: the file to write.
        force: replace the file when it exists.

    Returns:
        ``output`` as a path.

    Raises:
        OutputError: ``output`` cannot be written, exists and ``force`` is False, lies inside a
            run, or is an input of the report.
        UsageError: unknown extension.
        InputError: ``run`` is neither a run nor traces.
    """
    from chopper.errors import OutputError
    from chopper.ingest import check_page
    from chopper.reports import format_of, render
    from chopper.storage.files import write_atomic

    output = Path(output)
    kind = format_of(output)
    if output.exists() and not force:
        raise OutputError(f"{output}: exists already; pass force=True to replace it")
    if not isinstance(run, Attribution | Run):
        check_page(output, [run] if isinstance(run, str | Path) else run)
        run = load(run)
    recording = run if isinstance(run, Run) else _attributed(run).recording
    imported = recording.manifest.ranks if recording.path is None else []
    check_page(output, [file for part in imported for file in part.traces])
    attribution = _attributed(run)
    write_atomic(output, render(attribution, kind).encode())
    return output
