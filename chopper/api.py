"""Public functions: load, attribute, compare, replay, query and report a run."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

from chopper import pipeline
from chopper import wording as fmt
from chopper.analyzers.attribution import Attribution as Result
from chopper.analyzers.relations import schema_of
from chopper.attribution_cache import FileFacts, attribution_of, facts_of, names_of
from chopper.causes import LEVELS
from chopper.engines.choice import engine_of
from chopper.errors import UsageError
from chopper.notebook import as_cell
from chopper.quantities import one_of
from chopper.reports import tables as result_tables
from chopper.storage.run import Run as Recording
from chopper.storage.run import ranks_of
from chopper.tables import GROUPS, TABLES
from chopper.tables.frames import Table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from chopper.analyzers.attribution import Recoverable
    from chopper.analyzers.compare.result import Comparison
    from chopper.analyzers.replay.answers import WhatIf
    from chopper.analyzers.replay.replay import Replay
    from chopper.engines import Engine
    from chopper.hardware.ceilings import Stated
    from chopper.pipeline import Source
    from chopper.reports.verdict import Verdict

    Runs: TypeAlias = "Run | Attribution | Recording | Result | Source"
    """What a function takes as a run: a path is enough."""


class Run:
    """A recorded or imported run: what was recorded, its views, and its attribution.

    Attributes:
        source: the path or pattern that it was read from.
        path: its directory; None for traces that were loaded without one.
    """

    def __init__(
        self,
        recording: Recording,
        choices: tuple[Source, dict[str, Any]] | None = None,
        inputs: tuple[FileFacts, ...] | None = None,
    ) -> None:
        self._recording = recording
        self._choices, self._inputs = choices, inputs
        self.source: str = recording.source
        self.path: Path | None = recording.path

    @cached_property
    def attribution(self) -> Attribution:
        """The attribution of the run, made once; :func:`attribute` takes ranks and steps."""
        return attribute(self)

    @cached_property
    def ranks(self) -> Table:
        """One row per rank: its host, device and process, and how its recording ended."""
        return Table.declared(ranks_of(self._recording.manifest), TABLES["ranks"])

    @cached_property
    def findings(self) -> Table:
        """What was noticed when the run was recorded and read."""
        manifest = self._recording.manifest
        every = [*manifest.findings, *(f for part in manifest.ranks for f in part.findings)]
        return Table.declared(result_tables.findings(every), result_tables.FINDING)

    def view(self, name: str) -> Table:
        """Return a view of the run; see :meth:`Attribution.view`."""
        return self.attribution.view(name)

    def scan(
        self,
        name: str,
        *,
        ranks: Sequence[int] | None = None,
        steps: Sequence[int] | None = None,
    ) -> Table:
        """Return a recorded or derived table, of all ranks and times unless some are chosen.

        Args:
            name: a table that `chopper schema` lists.
            ranks: numbers of ranks.
            steps: numbers of traced steps: rows of these steps, or that begin within them.

        Raises:
            UsageError: no such table, rank or step, or a table that has no ranks or times.
        """
        chosen = _one_of("table", name, TABLES)
        columns = schema_of(chosen).names
        conditions = []
        for kind, wanted in (("ranks", ranks), ("steps", steps)):
            if (numbers := _numbers(kind, wanted)) is not None:
                conditions.append(self._within(chosen, columns, kind, numbers))
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        rows = query(self, f'FROM "{chosen}"{where}').arrow().cast(schema_of(chosen))
        return Table.declared(rows, TABLES[chosen])

    def _within(self, table: str, columns: list[str], kind: str, numbers: Sequence[int]) -> str:
        """Return the condition that rows are of some ranks, or of some steps."""
        times = [n for n in ("start_ns", "time_ns") if n in columns]
        if "step_index" not in columns and TABLES[table] in GROUPS["analysis"]:
            times = [n for n in times if n == "start_ns"]  # elsewhere time_ns is a duration
        if "rank" not in columns or (kind == "steps" and not {"step_index", *times} & {*columns}):
            raise UsageError(f"table {table!r} has no {kind}; leave out {kind}=")
        if kind == "ranks":
            known = [row["rank"] for row in self.ranks]
            _known("rank", numbers, known, "is in the run")
            return f"rank IN ({', '.join(map(str, numbers)) or 'NULL'})"
        windows = [*query(self, 'FROM "window"')]
        _known("step", numbers, sorted({w["number"] for w in windows}), "was traced")
        each = [
            f"rank = {w['rank']} AND "
            + (
                f"step_index = {w['step_index']}"
                if "step_index" in columns
                else f"{times[0]} BETWEEN {w['start_ns']} AND {w['end_ns'] - 1}"
            )
            for w in windows
            if w["number"] in numbers
        ]
        return f"({' OR '.join(f'({condition})' for condition in each) or 'false'})"

    def query(self, sql: str) -> Table:
        """Run SQL over the tables and views of the run; see :func:`query`."""
        return query(self, sql)

    def __repr__(self) -> str:
        return f"<chopper.Run {self.source!r}: {fmt.plural(len(self._recording.ranks), 'rank')}>"


class Attribution:
    """Every nanosecond of a run's steps, attributed to one cause.

    Times per step are means over ranks and steps. Where steps of several kinds were traced (with an
    evaluation, say), it covers those that the step time is taken from.

    Attributes:
        source: the path or pattern that the run was read from.
    """

    def __init__(self, run: Result) -> None:
        self._run = run
        self.source: str = run.source

    @property
    def step_ns(self) -> int | None:
        """The step time: of untraced steps if there are any, else of the traced ones."""
        return self._run.step_time().headline_ns

    @property
    def observed_ns(self) -> int:
        """Time of all step windows, summed over ranks and steps: what the causes sum to."""
        return self._run.observed_ns

    @cached_property
    def _replay(self) -> Replay | str:
        from chopper.analyzers.replay.replay import replay_or_reason

        return replay_or_reason(self._run)

    @cached_property
    def _saving(self) -> dict[str, Recoverable]:
        from chopper.analyzers.replay.replay import recoverable

        return recoverable(self._run, self._replay)

    @cached_property
    def verdict(self) -> Verdict:
        """What bounds the run: a sentence, the class behind it, and the largest causes."""
        from chopper.reports.story import Story
        from chopper.reports.verdict import verdict

        return verdict(Story(self._run), self._replay)

    @cached_property
    def causes(self) -> Table:
        """All causes with time in them, parents before their leaves; the leaves sum to the step."""
        return Table.declared(
            result_tables.causes(self._run, self._saving), result_tables.CAUSE, reason=_NOTHING
        )

    @cached_property
    def ranks(self) -> Table:
        """One row per rank: its device, its step and its ideal."""
        return Table.declared(result_tables.ranks(self._run), result_tables.RANK)

    @cached_property
    def actions(self) -> Table:
        """What to try, the most recoverable time first; without rows, ``reason`` says why."""
        from chopper.analyzers.actions import actions

        reason, tried = "no pattern was seen", None
        if isinstance(self._replay, str):
            reason = self._replay
        else:
            tried = actions(self._run, self._replay)
        rows = result_tables.actions(tried)
        return Table.declared(rows, result_tables.ACTION, reason=reason)

    @cached_property
    def findings(self) -> Table:
        """What the data can and cannot support, most severe first."""
        found = result_tables.findings(self._run.findings)
        return Table.declared(found, result_tables.FINDING, reason="nothing was found")

    def by(self, level: str) -> Table:
        """Return the time of a step by a level, with a column for each cause.

        Args:
            level: ``cause`` (leaves only), ``step``, ``phase``, ``layer``, ``op``, ``kernel`` or
                ``rank``; or ``pipeline``, ``data``, ``expert``, ``context`` or ``tensor``, summed
                over the ranks of one place. Steps, ranks and places come in order, everything else
                largest first; a key of null gathers what has no value at this level (idle time
                without an operator).

        Raises:
            UsageError: no such level, or no rank's place in that dimension is known.
        """
        if _one_of("level", level, LEVELS) == "cause":
            rows = result_tables.causes(self._run, self._saving, leaves=True)
            return Table.declared(rows, result_tables.CAUSE, reason=_NOTHING)
        declared, rows = result_tables.by(self._run, level)
        return Table.declared(rows, declared, reason=_NOTHING)

    def view(self, name: str) -> Table:
        """Return one detailed table: ``kernels``, ``operations``, ``collectives``, ``stragglers`` …

        ``chopper analyze RUN --view list`` lists all of them.

        Raises:
            UsageError: no such view.
        """
        from chopper.views import VIEWS, view

        chosen = _one_of("view", name, VIEWS)
        return Table.declared(view(self._run, chosen), VIEWS[chosen], reason=VIEWS[chosen].needs)

    def waterfall(self) -> Figure:
        """Return a Plotly figure from the ideal step to the observed one, a bar per cause."""
        from chopper.reports.figures import waterfall
        from chopper.reports.story import Story

        return _figure(waterfall(Story(self._run)))

    def timeline(self, rank: int | None = None, step: int | None = None) -> Figure:
        """Return a Plotly figure of one step: each stream coloured by cause, and idle time.

        Args:
            rank: by default the first one.
            step: number of the step; by default the one of median length.

        Raises:
            UsageError: there is no such rank or step.
        """
        from chopper.reports.figures import step_timeline

        return _figure(step_timeline(self._run, rank, step))

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON form, schema ``chopper.attribution/4``."""
        from chopper.reports import document

        return document(self._run)

    def _repr_html_(self) -> str:
        return as_cell(self._run, "chopper.reports.run:notebook_page")

    def __repr__(self) -> str:
        return (
            f"<chopper.Attribution of {self.source!r}: {fmt.duration(self.step_ns)} per step, "
            f"{fmt.plural(len(self._run.ranks), 'rank')}, {fmt.plural(self._run.steps, 'step')}>"
        )


_NOTHING = "nothing was attributed"


def _figure(document: Mapping[str, Any]) -> Figure:
    """Return a figure of a report as Plotly draws it in a notebook."""
    from plotly.graph_objects import Figure

    data = [{**trace} for trace in document["data"]]
    for trace in data:
        # The report fills in the colour of what is no cause from the reader's colour scheme.
        if isinstance(colors := trace["marker"]["color"], list):
            trace["marker"] = {**trace["marker"], "color": [hue or _NEUTRAL for hue in colors]}
    return Figure(data=data, layout={**document["layout"], "template": "plotly_white"})


_NEUTRAL = "#5f6673"


def _one_of(kind: str, name: object, known: Iterable[str]) -> str:
    """Return the known name that was meant; a `UsageError` suggests the nearest ones."""
    if not isinstance(name, str):
        names = ", ".join(itertools.islice(known, 3))
        raise UsageError(
            f"{kind} is {name!r} ({type(name).__name__}), expected the name of one: {names} …"
        )
    return one_of(kind, name, known)


def _text(name: str, value: object, example: str) -> str | None:
    """Return an argument that is text; a `UsageError` says what it is instead."""
    if value is None or isinstance(value, str):
        return value
    raise UsageError(
        f"{name} is {value!r} ({type(value).__name__}), expected text: {name}={example!r}"
    )


def _texts(name: str, values: object, example: str) -> list[str]:
    """Return an argument that is one text or several."""
    each = [*values] if isinstance(values, list | tuple | set | frozenset) else [values]
    return [text for value in each if (text := _text(name, value, example)) is not None]


def _numbers(kind: str, numbers: object) -> Sequence[int] | None:
    """Return numbers of ranks or steps; a `UsageError` says what they are instead."""
    if numbers is None:
        return None
    if isinstance(numbers, str | bytes) or not isinstance(numbers, Iterable):
        raise UsageError(
            f"{kind} is {numbers!r} ({type(numbers).__name__}), expected a list of numbers: "
            f"{kind}=[0, 1]"
        )
    found = [*numbers]
    for number in found:
        if isinstance(number, bool) or not isinstance(number, SupportsIndex):
            raise UsageError(
                f"{kind} has {number!r} ({type(number).__name__}), expected whole numbers: "
                f"{kind}=[0, 1]"
            )
    return [operator.index(number) for number in found]


def _known(kind: str, numbers: Sequence[int], known: Sequence[int], state: str) -> None:
    """Raise a `UsageError` where one of the numbers is not known."""
    for number in numbers:
        if number not in known:
            raise UsageError(f"no {kind} {number} {state}: it has {fmt.ranges(known)}")


def _source(source: object) -> Source:
    """Return what names a run; a `UsageError` says what it is instead."""
    if isinstance(source, str | Path):
        return source
    named = [*source] if isinstance(source, list | tuple | set | frozenset) else [source]
    paths = [item for item in named if isinstance(item, str | Path)]
    for item in named:
        if not isinstance(item, str | Path):
            raise UsageError(
                f"a run is {item!r} ({type(item).__name__}), expected a path, a glob or a list of "
                'them: chopper.load("runs/mine")'
            )
    return paths


def recording_of(run: Runs) -> Recording | Source:
    """Return the recording behind a run or an attribution; a path stays as it is."""
    if isinstance(run, Run):
        return run._recording
    if isinstance(run, Attribution):
        return run._run.recording
    if isinstance(run, Recording):
        return run
    return run.recording if isinstance(run, Result) else _source(run)


def attributed_of(run: Runs) -> Result:
    """Return the attribution behind a run, made where it is not there yet."""
    if isinstance(run, Result):
        return run
    if isinstance(run, Attribution):
        return run._run
    return run.attribution._run if isinstance(run, Run) else attribute(run)._run


def load(
    source: Source,
    *,
    engine: Engine | None = None,
    device: Stated | None = None,
    columns: Mapping[str, str] | None = None,
    layout: str | None = None,
) -> Run:
    """Open a run directory, or read traces as a run.

    Args:
        source: a run directory; or a trace file, a glob, a directory of traces, or several.
        engine: reads the files and holds their tables, one of :mod:`chopper.engines`; by default
            this process where they are small, else one process per core.
        device: the device that it was recorded on, by any usual name (``"h100-sxm"``), or rank →
            device; for recordings that name none. It counts whatever they say.
        columns: which column of a table of spans is what, where their names do not say so:
            ``{"rank": "worker", "duration": "took", "unit": "ms"}``.
        layout: how the job was divided over its ranks, for recordings that do not tell:
            ``"tp=4,pp=4,dp=4"``, the first dimension varying fastest from rank to rank (Megatron's
            order is tp, cp, dp, pp). It counts whatever they say.

    Raises:
        InputError: nothing is there, or it is neither a run nor traces.
        UsageError: the device is not in the table, a rank not in the run, a column no field of
            spans, or the layout of another number of ranks.
    """
    named, stated = _source(source), _stated(device, columns, layout)
    inputs = facts_of(names_of(named))
    return Run(pipeline.read(named, engine, **stated), (named, stated), inputs)


def _stated(
    device: Stated | None, columns: Mapping[str, str] | None, layout: str | None
) -> dict[str, Any]:
    """Return what the user says of a run, checked, by the names of arguments."""
    from chopper.collectors.formats.spans.fields import checked_columns

    return {
        "device": device,
        "columns": None if columns is None else checked_columns(columns),
        "layout": _text("layout", layout, "tp=4,pp=4,dp=4"),
    }


def attribute(
    run: Runs,
    *,
    engine: Engine | None = None,
    ranks: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    device: Stated | None = None,
    columns: Mapping[str, str] | None = None,
    layout: str | None = None,
) -> Attribution:
    """Attribute every nanosecond of the run's step windows to exactly one cause.

    Where steps of several kinds were traced (with an evaluation, say, or slow first ones), it
    covers those of the step time. The run itself is not changed.

    Args:
        run: a run, or anything that :func:`load` takes.
        engine: runs the stages of each rank, one of :mod:`chopper.engines`; by default this
            process where the run is small or in its memory, else one process per core. The result
            is the same.
        ranks: the ranks that views, replay and timeline cover. By default all, or, in a run with
            more than two million host spans and device events, at most sixteen that stand out.
        steps: numbers of the steps to attribute. By default all that were traced.
        device, columns, layout: as :func:`load` takes them.

    Raises:
        InputError: nothing is there, or it is neither a run nor traces.
        UsageError: a rank that is not in the run, steps of which none was traced, a device that is
            not in the table, or a layout of another number of ranks.
    """
    chosen = _numbers("ranks", ranks), _numbers("steps", steps)
    source, inputs, stated = recording_of(run), None, _stated(device, columns, layout)

    def make() -> Result:
        return pipeline.attribute(source, engine, *chosen, **stated)

    if isinstance(run, Run) and run._choices is not None and run._inputs is not None:
        (named, earlier), inputs = run._choices, run._inputs
        stated = {name: value or earlier[name] for name, value in stated.items()}
    elif isinstance(source, Recording):
        return Attribution(make())
    else:
        named = source
    if engine is not None:  # the user wants to see it work
        return Attribution(make())
    choices = *chosen, *stated.values()
    return Attribution(attribution_of(names_of(named), make, *choices, inputs=inputs))


def compare(
    a: Runs,
    b: Runs,
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

    first, second = pipeline.beside(*(attributed_of(r) for r in (a, b)))
    return compared(first, second, allow_different=allow_different, all_steps=all_steps)


def whatif(
    run: Runs,
    *,
    fix: str | Sequence[str] = (),
    clock: str | None = None,
    link: str | None = None,
    latency: str | None = None,
    faster: str | Sequence[str] = (),
    without: str | Sequence[str] = (),
    graphs: bool = False,
    overlap: bool = False,
    schedule: str | None = None,
    virtual_stages: int | None = None,
    micro_batches: int | str | None = None,
) -> WhatIf:
    """Predict the step time of a changed run by replaying its dependency graph.

    Without a change, replay the run: as it was, or as fast as its steps without a trace.

    Args:
        run: a run or its attribution, or anything that :func:`load` takes.
        fix: causes to remove: ids, their last parts (``data``), or plain names
            (``straggler``, ``launch_gaps``); or parts of a job, whose operations then take the mean
            of their type: ``stage=3``, ``rank=12``, ``replica=1``, ``op=backward``, ``all``; or
            ``stages``, ``sequence-lengths``: all of these alike.
        clock: device clock, ``1980MHz``, or ``reference`` for the clock of its quoted peak.
        link: bandwidth between ranks, ``50GB/s`` or ``x2``.
        latency: of that link, ``5us`` or ``x0.5``.
        faster: ``gemm=2x``: kernels of a family, or those that a regular expression matches.
        without: operators to remove.
        graphs: launch each step as one CUDA graph.
        overlap: nothing but communication, and the end of a step, waits for communication.
        schedule: pipeline schedule instead of the recorded one: ``1f1b``, ``gpipe``,
            ``interleaved``, ``zb1p``, ``dualpipe``.
        virtual_stages: stages of the model per pipeline rank.
        micro_batches: of a step: a number, or ``x2``.

    Raises:
        UsageError: an invalid or contradictory change, or one that this run has no data for.
        InputError: the run cannot be replayed.
    """
    from chopper.analyzers.replay.whatif_options import changes_of

    changes = changes_of(
        fix=_texts("fix", fix, "straggler"),
        clock=_text("clock", clock, "1980MHz"),
        link=_text("link", link, "50GB/s"),
        latency=_text("latency", latency, "5us"),
        faster=_texts("faster", faster, "gemm=2x"),
        without=_texts("without", without, "aten::copy_"),
        graphs=graphs,
        overlap=overlap,
        schedule=_text("schedule", schedule, "1f1b"),
        virtual_stages=virtual_stages,
        micro_batches=None if micro_batches is None else str(micro_batches),
    )
    return pipeline.whatif(attributed_of(run), changes)


def query(run: Runs, sql: str, *, memory: str = "2GB") -> Table:
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

    _text("sql", sql, "FROM step")
    is_attributed = isinstance(run, Attribution | Result) or (
        isinstance(run, Run) and "attribution" in vars(run)
    )
    source = attributed_of(run) if is_attributed else recording_of(run)
    with contextlib.ExitStack() as held:

        def engine() -> Engine:
            assert not isinstance(source, Result)
            return held.enter_context(engine_of(pipeline.sizes_of(source)))

        limit = size_bytes(_text("memory", memory, "2GB") or "2GB", "memory")
        statement = held.enter_context(Query(source, sql, limit, engine=engine))
        statement.plan()
        statement.read()
        schema, batches = statement.batches()
        return Table(pa.Table.from_batches(batches, schema), "query", reason="the query has none")


def report(run: Runs, output: str | Path = "report.html", *, force: bool = True) -> Path:
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

    if not isinstance(output, Path):
        output = Path(_text("output", output, "report.html") or "report.html")
    kind = format_of(output)
    if output.exists() and not force:
        raise OutputError(f"{output}: exists already; pass force=True to replace it")
    source = recording_of(run)
    if not isinstance(source, Recording):
        check_page(output, [source] if isinstance(source, str | Path) else source)
        run = load(source)
        source = run._recording
    imported = source.manifest.ranks if source.path is None else []
    check_page(output, [file for part in imported for file in part.traces])
    write_atomic(output, render(attributed_of(run), kind).encode())
    return output
