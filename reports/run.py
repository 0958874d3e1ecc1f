"""The page of a run: verdict, causes, and in a browser every table and event of it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from chopper import wording as fmt
from chopper.analyzers.actions import Actions
from chopper.analyzers.actions import actions as ranked
from chopper.analyzers.attribution import Attribution, CauseRow, Recoverable
from chopper.analyzers.causes.step_time import FIRST, StepKind
from chopper.analyzers.detectors.remedies import remedy
from chopper.analyzers.replay.replay import Replay, recoverable, replay_or_reason
from chopper.analyzers.views.ranks import own_times
from chopper.causes import CAUSES, LEAVES, WAITS, Level
from chopper.reports import actions
from chopper.reports.actions import Told
from chopper.reports.labels import (
    cause_cell,
    color,
    finding_table,
    full_label,
    meaning,
    merged,
    method,
    of_ranks,
    sentence,
)
from chopper.reports.page import (
    PLAIN,
    Block,
    Cell,
    Column,
    Fact,
    Facts,
    Figure,
    Format,
    Item,
    Items,
    Page,
    Paragraph,
    Program,
    Section,
    Table,
    Widget,
)
from chopper.reports.sections import (
    LEVELS,
    environment,
    level_data,
    level_table,
    levels_of,
    view_tables,
)
from chopper.reports.story import Story, facts, step_sentences, withheld
from chopper.reports.tables import ORDERED
from chopper.reports.verdict import Verdict, verdict
from chopper.views import VIEWS, views

if TYPE_CHECKING:
    from chopper.reports.lanes import Timeline

_ROWS = 15
"""Groups of one level in Markdown."""
_TERMINAL_ROWS = 20
_ALERTS = 4
_SHOWN_FIRST_RATIO = 0.2
"""Leading steps that were slow are shown from this share of the time on."""
_MARKS = {"measured": "", "model": " ~", "not supported": " ?"}
_MUCH_RATIO = 0.1
"""If no action saves as much, the largest causes follow the actions."""
_MINOR_RATIO = 1e-3
"""Findings about a smaller part of a run are only counted."""
_SCALED = (
    "Share of the traced step, times the untraced step time: as if tracing slowed every cause "
    "alike, although it slows the host most."
)
_LEFT = (
    "The device's work as recorded, since tracing slows the host alone; its idle time is what is "
    "then left of the untraced step, shared as in the traced one; what tracing does not slow, such "
    "as waiting for data, keeps its time."
)
_RECOVERABLE = "Predicted saving if only this cause were removed; savings overlap"
_SCRIPTS = (
    *("util.js", "state.js", "table.js", "details.js", "plots.js"),
    *("timeline.js", "dock.js", "main.js"),
)


def page(run: Attribution, format: Format) -> Page:
    """Return the page of a run, with what a format can show and nothing else.

    Args:
        run: what to report.
        format: text has the causes; Markdown the times by phase, layer, operator, kernel and rank
            too; HTML every table, figure and event.
    """
    if format == "html":
        return _browser_page(run)
    return run.answer(f"page-{format}", lambda: _plain_page(run, format))


def _plain_page(run: Attribution, format: Format) -> Page:
    story = Story(run)
    replay = replay_or_reason(run)
    conclusion = verdict(story, replay)
    if not run.observed_ns:
        return _page(story, conclusion, [_held(run), *_findings(story)])
    causes = Section(
        title="Where the time went",
        intro=f"Times are means per {story.traced_unit} over {_windows(story)}; the causes sum to "
        "the observed time exactly.",
        blocks=_causes(story, recoverable(run, replay), format),
    )
    tried, told, notes = _tried(story, replay)
    first = [actions.section(told, notes)] if tried else []
    if not _saves(tried):
        first.append(_top_list(conclusion))
    if format == "txt":
        sections = [*first, causes, *_spread(story), *_findings(story)]
        return _page(story, conclusion, sections, told=told)
    levels = [
        _level(story, level, _ROWS)
        for level, _ in levels_of(story)
        if level != "step" and len(story.by(level)) > 1
    ]
    coverage = Section(title="Coverage", blocks=_coverage(run))
    sections = [*first, causes, *levels, *_findings(story), coverage]
    return _page(story, conclusion, sections, told=told)


def notebook_page(run: Attribution) -> Page:
    """Return the page of a run without what a browser's scripts make."""
    return page(run, "md")


def _tried(story: Story, replay: Replay | str) -> tuple[Actions | None, list[Told], list[str]]:
    """Return what to try first, in words, and what else is said of it."""
    if isinstance(replay, str):
        return None, [], []
    tried = ranked(story.run, replay)
    return tried, *actions.tell(story.run, tried, story.traced_unit)


def _saves(tried: Actions | None) -> bool:
    """Return whether an action saves so much that the largest causes need not be listed."""
    ranked_first = tried.ranked if tried else []
    return any(action.saved_ratio >= _MUCH_RATIO for action in ranked_first)


def grouped(run: Attribution, by: Level, *, top: int | None = None) -> Page:
    """Return the page of a run regrouped by a level, for a terminal.

    Args:
        run: what to report.
        by: the level.
        top: groups to list; None for 20, and for all steps or ranks.
    """
    story = Story(run)
    rows = top or (None if by in ORDERED else _TERMINAL_ROWS)
    conclusion = verdict(story, "")
    return _page(story, conclusion, [_level(story, by, rows), *_spread(story), *_findings(story)])


def _page(
    story: Story,
    found: Verdict,
    sections: list[Section],
    more: tuple[Block, ...] = (),
    told: Sequence[Told] = (),
    **of: Any,
) -> Page:
    return Page(
        title=story.run.recording.manifest.name,
        headline=found.sentence,
        facts=facts(story),
        summary=(*_head(story), *more),
        sections=[s for s in sections if s.blocks or s.id],
        first=[t.line for t in told[: actions.SHOWN]],
        **of,
    )


def _head(story: Story) -> list[Block]:
    """Return what stands below the verdict."""
    takes, detail = step_sentences(story)
    # Why no ideal is known may be a finding, and is not said twice.
    if any(f.message == story.ideal_reason for f in story.run.findings):
        detail = ""
    used = story.ceilings[1]
    return [
        *(Paragraph(text) for text in (f"{takes} {detail}".strip(), story.tracing) if text),
        *([Paragraph(used, "dim", formats=PLAIN)] if used else []),
        *_kinds(story),
    ]


def _limits(story: Story) -> list[Block]:
    """Return what the figures of a page rest on: ceilings, and what the data cannot support."""
    run = story.run
    ceilings, used = story.ceilings
    lines = [line for line in (used, *ceilings, withheld(run)) if line]
    findings = merged(run.findings)
    alerts = [
        Item(of_ranks(f, sentence(f.message), ranks, len(run.ranks)), f.severity)
        for f, ranks in findings
        if f.severity != "info"
    ][:_ALERTS]
    blocks: list[Block] = [Items(items=lines)] if lines else []
    blocks += [Items(items=alerts, title="What the data cannot support")] if alerts else []
    if len(findings) > len(alerts):
        words = fmt.plural(len(findings) - len(alerts), "more finding" if alerts else "finding")
        blocks.append(Widget("more.html.j2", {"words": f"{words} about the trace"}))
    return blocks


def _findings(story: Story) -> list[Section]:
    """Return the findings for a terminal and for documents; minor ones are counted."""
    items = [Item(line) for line in (*story.ceilings[0], withheld(story.run)) if line]
    minor = 0
    for f, ranks in merged(story.run.findings):
        if f.severity == "info" and not f.withholds and (f.share_ratio or 1.0) < _MINOR_RATIO:
            minor += 1
            continue
        items.append(Item(of_ranks(f, f.message, ranks, len(story.run.ranks)), f.severity, f.code))
    if minor:
        few = "about less than 0.1 % of the time or of the events"
        items.append(Item(f"{fmt.plural(minor, 'finding')} {few} not shown: --json", "info"))
    return [Section(title="About the data", blocks=(Items(items=items),))] if items else []


def _kinds(story: Story) -> list[Table]:
    """Return the kinds of steps; none where all are of one, leading ones that were slow aside."""
    kinds = [k for k in story.step.kinds if k.name != FIRST or k.share_ratio >= _SHOWN_FIRST_RATIO]
    if len(kinds) < 2:
        return []
    columns = ("kind of step", "steps", "untraced", "of time", Column("traced", kind="prose"))
    rows = [
        (
            k.name,
            str(len(k.steps)),
            fmt.duration(None if k.untraced is None else k.untraced.value_ns),
            fmt.ratio(k.share_ratio),
            f"{len(k.traced_steps)}, {fmt.duration(k.traced_mean_ns)}, mostly {_mostly(k)}"
            if k.traced_steps
            else "none",
        )
        for k in kinds
    ]
    return [Table(columns=columns, rows=rows)]


def _mostly(kind: StepKind) -> str:
    cause, time_ns = max(kind.causes_ns.items(), key=lambda kv: kv[1])
    return f"{full_label(cause)} ({fmt.ratio(time_ns / sum(kind.causes_ns.values()))})"


def _top_list(found: Verdict) -> Section:
    items = []
    for one in found.largest:
        location = actions.place(one.where)
        ranks = (e for e in one.evidence if e.label.endswith("rank"))
        more = "; ".join(f"{e.label} {e.shown}: {e.value}" for e in ranks)
        items.append(
            f"{one.label}: {fmt.duration(one.time_ns)} per {one.unit}, {fmt.ratio(one.share_ratio)}"
            f"{location and f', {location}'}. {sentence(more) + ' ' if more else ''}{one.remedy}"
        )
    return Section(title="The largest causes", blocks=(Items(items=items),) if items else ())


def _windows(story: Story) -> str:
    """Return how many step windows there are: ``8 step windows of 2 ranks``."""
    text = fmt.plural(story.windows, "window" if story.unit == "window" else "step window")
    ranks = len(story.run.ranks)
    several = ranks > 1 and story.unit == "step"
    return f"{text} of {fmt.plural(ranks, 'rank')}" if several else text


def _causes(story: Story, saving: Mapping[str, Recoverable], format: Format) -> list[Block]:
    """Return the tree of causes with its sum, and what its marks and columns mean."""
    causes = [r for r in story.run.causes() if r.time_ns > 0]
    if not causes:
        return []
    name, hint = ("Scaled", _SCALED) if story.idle_scale is None else ("Untraced", _LEFT)
    columns: list[str | Column] = [
        *("Cause", f"Per {story.traced_unit}"),
        *([Column(name, hint=hint)] if story.scale else []),
        "Share",
        Column("Recoverable", wide=True, hint=_RECOVERABLE),
        Column("95 % interval", wide=True),
        *([Column("Meaning", kind="prose", wide=True)] if format == "html" else []),
        *([Column("Basis", kind="id")] if format != "txt" else []),
    ]
    observed_ns = story.observed_per_window_ns
    sums = [
        ("Observed", fmt.duration(observed_ns), *_untraced(story, None), "100 %", "", ""),
        *_tracing_rows(story),
    ]
    rest = [""] * (len(columns) - len(sums[0]))
    table = Table(
        columns=columns,
        rows=[
            *(_cause_cells(c, story, saving[c.id], format) for c in causes),
            *([*row, *rest] for row in sums),
        ],
        strong=frozenset((len(causes),)),
    )
    kinds = {_kind(c) for c in causes} if format == "txt" else set()
    reason = next((one.reason for one in saving.values() if one.reason), "")
    is_known = any(one.step_ns is not None for one in saving.values())
    notes = [
        *(["~ by a model"] if "model" in kinds else []),
        *(["? not supported by the data"] if "not supported" in kinds else []),
        *(["savings overlap"] if is_known else []),
        "docs/reference/glossary.md#marks",
    ]
    unknown = [] if is_known else [Paragraph(f"Recoverable: unknown, {reason}", "dim")]
    return [table, *unknown, Paragraph(" · ".join(notes), "dim")]


def _kind(cause: CauseRow) -> str:
    if cause.withheld is not None:
        return "not supported"
    return "measured" if cause.measured else "model"


def _cause_cells(
    cause: CauseRow, story: Story, saving: Recoverable, format: Format
) -> list[str | Cell]:
    kind, windows, doc = _kind(cause), story.windows, CAUSES[cause.id].doc
    low_high_ns = cause.ci95_ns and [v / windows for v in cause.ci95_ns]
    return [
        replace(
            cause_cell(cause.id, cause.label + (_MARKS[kind] if format == "txt" else "")),
            link=f"#timeline?only=cause:{cause.id}",
        ),
        fmt.duration(cause.time_ns / windows),
        *_untraced(story, cause),
        Cell(
            text=fmt.ratio(cause.share_ratio),
            share_ratio=cause.share_ratio or 0.0,
            color=color(cause.id),
        ),
        Cell(text=fmt.duration(saving.step_ns), hint=saving.reason or _saving_hint(saving)),
        Cell(text=fmt.interval(low_high_ns), dim=True),
        *([Cell(text=doc, link=f"#{meaning(cause.id)}")] if format == "html" else []),
        *([Cell(text=kind, hint=cause.basis)] if format != "txt" else []),
    ]


def _untraced(story: Story, cause: CauseRow | None) -> tuple[str, ...]:
    """Return the time of a cause, or of all, in an untraced step, where that is shown."""
    if not story.scale:
        return ()
    if cause is None:
        return (fmt.duration(story.observed_per_window_ns * story.scale),)
    return (fmt.duration(story.untraced_ns(cause) / story.windows),)


def _saving_hint(saving: Recoverable) -> str:
    interval = f"; 95 % interval {fmt.interval(saving.ci95_ns)}" if saving.ci95_ns else ""
    return f"{_RECOVERABLE}{interval}"


def _tracing_rows(story: Story) -> list[tuple[str, ...]]:
    """Return the rows below the sum of the causes: the untraced step, the tracing overhead."""
    step = story.step
    if not story.tracing or step.untraced is None:
        return []
    observed = max(story.observed_per_window_ns, 1)
    quartiles = step.untraced.quartile_low_ns, step.untraced.quartile_high_ns
    rows: list[tuple[str, int, tuple[int, int] | None]] = [
        (f"{story.unit.capitalize()} without a trace", step.untraced.value_ns, quartiles)
    ]
    if step.is_tracing_certain and step.tracing_ns is not None:
        rows.insert(0, ("Profiler overhead (tracing)", step.tracing_ns, step.tracing_ci95_ns))
    return [
        (
            *(text, fmt.duration(time_ns), *([""] if story.scale else [])),
            *(fmt.ratio(time_ns / observed), "", fmt.interval(low_high_ns)),
        )
        for text, time_ns, low_high_ns in rows
    ]


def _level(story: Story, level: Level, rows: int | None) -> Section:
    title = f"By {dict(LEVELS)[level].lower()}"
    return Section(title=title, blocks=(level_table(story, level, rows=rows),))


def _spread(story: Story) -> list[Section]:
    """Return one line over the ranks: what a step takes each without waiting for the others."""
    own_ns = own_times(story.run)
    per_step = {r.label: own_ns[r.rank] for r in story.run.ranks if r.steps}
    if len(per_step) < 2:
        return []
    waits = any(row.id in WAITS and row.time_ns for row in story.run.causes())
    unit = f"per {story.traced_unit}{' without waiting for other ranks' if waits else ''}"
    parts = [f"{label} {fmt.duration(t)}" for label, t in per_step.items()]
    line = f"{unit}: {' · '.join(parts)}"
    if len(per_step) > 4:
        fastest, *_, slowest = sorted(per_step, key=per_step.__getitem__)
        line = (
            f"{len(per_step)} ranks, {unit}: fastest {fastest} "
            f"{fmt.duration(per_step[fastest])}, slowest {slowest} "
            f"{fmt.duration(per_step[slowest])}"
        )
    return [Section(title="", blocks=(Paragraph(line, "dim"),))]


def _coverage(run: Attribution) -> list[Block]:
    facts = [
        Fact(
            label=name.removesuffix("_ratio").replace("_", " ").replace(".", " ").capitalize(),
            value="unknown" if value is None else fmt.ratio(value),
            share_ratio=None if value is None else min(max(value, 0.0), 1.0),
        )
        for name, value in run.coverage.items()
    ]
    return [Facts(facts=facts, style="bars")] if facts else []


_LEAST_RANKS = 4
"""Fewer are told apart in the figure of steps."""


def _browser_page(run: Attribution) -> Page:
    """Return the page with its figures, tables, timeline and their data."""
    from chopper.reports import clocks, figures, job, lanes, series
    from chopper.reports.to_html import deflate_text, to_script_json

    # What is large and used once is made first, and gone before the views are.
    replay = replay_or_reason(run)
    near = run.detail
    telemetry = [*series.collect(near.recording), *series.queues(near)]
    packed = lanes.build_timeline(near.all_steps, telemetry, replay=replay)
    curves = figures.telemetry(telemetry, near) if telemetry else {}
    readings = [*clocks.readings(telemetry)]
    del telemetry
    tables = views(run, VIEWS, replay=replay)
    story = Story(run, tables)
    conclusion = verdict(story, replay)
    of_clocks = clocks.section(story, readings)
    sections = [
        *([_timeline(story, packed)] if packed.windows else []),
        *(_times(story, replay) if run.observed_ns else []),
        *([of_job] if (of_job := job.section(run)) is not None else []),
        *([_details()] if any(table.num_rows for table in tables.values()) else []),
        *([of_clocks] if of_clocks is not None else []),
        *([_telemetry(story, curves)] if curves else []),
        _quality(run),
        environment(run),
        *([_method(story)] if run.observed_ns else []),
    ]
    data = level_data(story) | {
        "line_colors": figures.LINES,
        "timeline": packed.windows,
        "timeline_path": packed.path,
    }
    blobs = {
        "names": packed.names,
        "series": packed.telemetry,
        "details-data": deflate_text(to_script_json(view_tables(run, tables)).encode()),
        **packed.packs,
    }
    program = Program(scripts=_SCRIPTS, data=data, blobs=blobs)
    tried, told, notes = _tried(story, replay)
    cards = _cards(story, conclusion, tried, told, notes)
    more = (*cards, *_composition(story), *_limits(story))
    source = run.recording.source
    return _page(story, conclusion, sections, more, told, source=source, program=program)


def _times(story: Story, replay: Replay | str) -> list[Section]:
    """Return where the time went: by cause, step, rank, and the breakdown."""
    return [
        _gap(story, recoverable(story.run, replay)),
        *([_steps(story)] if story.windows > 1 else []),
        *([_ranks(story)] if len(story.run.ranks) >= _LEAST_RANKS else []),
        Section(
            title="Breakdown",
            id="breakdown",
            intro="The same nanoseconds, grouped differently. Select a row to see its causes.",
            blocks=(Widget("breakdown.html.j2"),),
        ),
    ]


def _held(run: Attribution) -> Section:
    """Return the tables of a run of which no time was attributed."""
    items = [
        f"{VIEWS[name].title}: {fmt.plural(table.num_rows, 'row')} (`--view {name}`)"
        for name, table in views(run, VIEWS).items()
        if table.num_rows
    ]
    how = Paragraph(f"`chopper analyze {shlex.quote(run.source)} --view NAME` shows one of them.")
    return Section(title="Tables with rows", blocks=(how, Items(items=items)) if items else ())


def _timeline(story: Story, lanes: Timeline) -> Section:
    intro = " ".join(lanes.notes)
    return Section(
        title="Timeline",
        id="timeline",
        intro=intro or f"Every recorded device event and host span of every {story.unit}.",
        blocks=(Widget("timeline.html.j2", {"unit": story.unit}),),
    )


def _details() -> Section:
    return Section(
        title="Detailed tables",
        short="Tables",
        id="details",
        intro="All tables of the run. Choose one, sort it by any column, filter it by any word.",
        blocks=(Widget("details.html.j2"),),
    )


def _composition(story: Story) -> list[Block]:
    """Return the observed time as a strip of its causes, and the causes by family."""
    leaves = [r for r in story.run.leaves() if r.time_ns > 0]
    families = [
        (row, [r for r in leaves if r.id == row.id or r.id.startswith(row.id + ".")])
        for row in story.run.causes()
        if row.parent is None and row.time_ns > 0
    ]
    parts = sorted(leaves, key=lambda r: LEAVES.index(r.id))
    context = {"parts": parts, "families": families, "windows": story.windows}
    return [Widget("composition.html.j2", context)] if leaves else []


def _cards(
    story: Story, found: Verdict, tried: Actions | None, told: Sequence[Told], notes: Sequence[str]
) -> list[Block]:
    """Return what to try first; the largest causes where no action saves much."""
    blocks: list[Block] = [Paragraph(note) for note in notes]
    if tried and told:
        unit = actions.saving_unit(tried.pace, story.traced_unit)
        note = " ".join([actions.RANKED, *notes])
        blocks = [Widget("actions.html.j2", {"told": told, "unit": unit, "note": note})]
    if not found.largest or _saves(tried):
        return blocks
    title = "The largest causes" if len(found.largest) > 1 else "The largest cause"
    return [*blocks, Widget("top.html.j2", {"title": title, "largest": found.largest})]


def _gap(story: Story, saving: Mapping[str, Recoverable]) -> Section:
    from chopper.reports import figures

    known = story.ideal_per_window_ns is not None
    begins = f"The ideal time is unknown, so the figure starts at 0. {sentence(story.ideal_reason)}"
    if known:
        begins = (
            "Starts at the ideal time of the hardware, adds every cause, ends at the observed "
            f"time{' while tracing' if story.tracing else ''}."
        )
    waterfall = Figure(
        name="waterfall",
        title="",
        figure=figures.waterfall(story),
        label="Waterfall from ideal to observed time; the table below has the same figures",
    )
    return Section(
        title="From ideal to observed" if known else "Where the time went",
        short="Causes",
        id="gap",
        intro=f"{begins} Mean per {story.traced_unit} over {_windows(story)}. Every nanosecond is "
        "in exactly one bar.",
        blocks=(waterfall, *_causes(story, saving, "html")),
    )


def _steps(story: Story) -> Section:
    from chopper.analyzers.views.ranks import steps
    from chopper.reports import figures

    figure = figures.steps(story)
    binned = figure.get("binned")
    note = f"{fmt.count(binned)} steps, averaged in bins. " if binned else ""
    counts = [n for n in steps(story.run)["micro_steps"].to_pylist() if n is not None]
    if counts:
        least, most = min(counts), max(counts)
        several = fmt.plural(most, "micro-step")
        note += f"{several if least == most else f'{least} to {several}'} in each step. "
    label = "Causes of each step, stacked"
    return Section(
        title="Step by step" if story.unit == "step" else "The window",
        short="Steps",
        id="steps",
        intro=f"{note}Causes of each {story.unit}, stacked. Select a bar to open that "
        f"{story.unit} in the timeline.",
        blocks=(
            Widget("steps.html.j2"),
            Figure(name="steps", title="", figure=figure, label=label),
        ),
    )


def _ranks(story: Story) -> Section:
    from chopper.reports import figures

    coverage = ""
    covered, option = story.run.covered()
    if option:
        command = f"chopper report {shlex.quote(story.run.source)} {option.split()[0]} LIST"
        coverage = f" The timeline covers {covered}; others: {command}."
    label = "Ranks by steps, coloured by time; the table of ranks has the means"
    return Section(
        title="Ranks",
        id="ranks",
        intro=f"Time of each rank in each {story.unit}. All ranks leave a collective together: the "
        f"one that makes the others wait has the longest {story.unit} without waiting.{coverage}",
        blocks=(
            Widget("ranks.html.j2"),
            Figure(name="ranks", title="", figure=figures.rank_map(story), label=label),
        ),
    )


def _telemetry(story: Story, figure: dict[str, Any]) -> Section:
    intro = (
        f"Sampled over the whole run; shaded bands are traced {story.unit}s. At most 1 500 "
        "points per line; extremes are kept."
    )
    drawn = Figure(name="telemetry", title="", figure=figure, label="Telemetry over the run")
    return Section(title="Telemetry", id="telemetry", intro=intro, blocks=(drawn,))


def _quality(run: Attribution) -> Section:
    blocks = _coverage(run)
    intro = "No finding limits the figures of this report."
    if run.findings:
        intro = "Findings about the data, made before any figure was computed."
        blocks.insert(0, finding_table(run.findings, ranks=len(run.ranks)))
    return Section(title="Trace quality", short="Quality", id="quality", intro=intro, blocks=blocks)


def _method(story: Story) -> Section:
    ideal = f"Unknown here. {sentence(story.ideal_reason)}"
    if story.ideal_per_window_ns is not None:
        ideal = (
            "FLOP of matrix products, convolutions and attention, from recorded shapes and data "
            f"types, divided by the device's peak: {fmt.duration(story.ideal_per_window_ns)} per "
            f"{story.unit}."
        )
    cards = method(
        "run",
        windows=_windows(story).capitalize(),
        observed=fmt.duration(story.run.observed_ns),
        unit=story.unit,
        ideal=ideal,
        ceilings=". ".join(story.ceilings[0]),
    )
    table = Table(
        columns=(
            *("Cause", Column("Meaning", kind="prose"), Column("Remedy", kind="prose", wide=True)),
            *(Column("Basis", kind="prose", wide=True), Column("Kind", kind="id")),
        ),
        rows=[
            (
                Cell(text=r.label, below=f"`{r.id}`", color=color(r.id), anchor=meaning(r.id)),
                *(CAUSES[r.id].doc, remedy(story.run, r.id), r.basis, _kind(r)),
            )
            for r in story.run.causes()
            if r.time_ns > 0
        ],
    )
    return Section(
        title="How the numbers are computed",
        short="Method",
        id="method",
        intro="All times are integer nanoseconds; causes sum to the observed time exactly.",
        blocks=(cards, table),
    )
