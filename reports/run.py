"""The page of a run: verdict, causes, and in a browser every table and event of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chopper import wording as fmt
from chopper.analyzers.replay.replay import recoverable, replay_or_reason
from chopper.causes import CAUSES, LEAVES
from chopper.reports import breakdown
from chopper.reports.labels import cause_cell, color, finding_table, sentence
from chopper.reports.page import (
    BROWSER,
    DOCUMENT,
    PLAIN,
    TERMINAL,
    Cards,
    Cell,
    Column,
    Fact,
    Facts,
    Figure,
    Item,
    Items,
    Page,
    Paragraph,
    Program,
    Section,
    Table,
    Widget,
)
from chopper.reports.story import (
    KIND_HEADER,
    Groupings,
    Story,
    coverage_label,
    kind_rows,
    tell,
    tracing_rows,
)
from chopper.views import VIEWS, views

if TYPE_CHECKING:
    from collections.abc import Mapping

    from chopper.analyzers.attributed import Attributed
    from chopper.attribution import CauseRow, Recoverable
    from chopper.causes import Level
    from chopper.reports.page import Block, Format

_ROWS = 15
"""Groups of one level in Markdown."""
_TERMINAL_ROWS = 20
_ALERTS = 4
_MODEL, _WITHHELD = "~", "?"
_RECOVERABLE = "Predicted saving if only this cause were removed; savings overlap"
_SCRIPTS = ("util.js", "table.js", "details.js", "plots.js", "timeline.js", "main.js")


def page(run: Attributed, format: Format) -> Page:
    """Return the page of a run, with what a format can show and nothing else.

    Args:
        run: what to report.
        format: text has the causes; Markdown the times by phase, layer, operator, kernel and rank
            too; HTML every table, figure and event.
    """
    if format == "html":
        return _browser_page(run)
    groupings = Groupings(run)
    story = tell(groupings)
    causes = Section(
        title="Where the time went",
        intro=f"Times are means per {story.traced_unit} over {windows_text(run, story)}; the "
        "causes sum to the observed time exactly.",
        blocks=_causes(run, story, recoverable(run, replay_or_reason(run)), format),
    )
    if format == "txt":
        sections = [causes, *_spread(groupings, story)]
    else:
        sections = [*_top_list(story), causes]
        levels = [level for level, _ in breakdown.LEVELS if level != "step"]
        sections += [_level(groupings, story, level, rows=_ROWS) for level in levels]
        sections += _coverage(run)
    return _page(story, _head(run, story), [s for s in sections if s.blocks])


def grouped(run: Attributed, by: Level, *, top: int | None = None) -> Page:
    """Return the page of a run regrouped by a level, for a terminal.

    Args:
        run: what to report.
        by: the level.
        top: groups to list; None for 20, and for all steps or ranks.
    """
    groupings = Groupings(run)
    story = tell(groupings)
    rows = top or (None if by in ("step", "rank") else _TERMINAL_ROWS)
    section = Section(
        title=f"By {dict(breakdown.LEVELS)[by].lower()}",
        blocks=(breakdown.table(groupings, story, by, rows=rows),),
    )
    return _page(story, _head(run, story), [section, *_spread(groupings, story)])


def _page(story: Story, summary: list[Block], sections: list[Section], **more: Any) -> Page:
    return Page(
        title=story.title,
        headline=story.verdict,
        facts=story.facts,
        summary=summary,
        sections=sections,
        **more,
    )


def _head(run: Attributed, story: Story) -> list[Block]:
    """Return what stands below the verdict."""
    blocks: list[Block] = []
    # Why no ideal is known is the whole detail then, and is said among the findings.
    if story.detail and all(f.message != story.ideal_reason for f in story.findings):
        blocks.append(Paragraph(story.detail))
    if story.tracing:
        blocks.append(Paragraph(story.tracing))
    lines = [line for line in (story.utilization, *story.ceiling, story.withheld) if line]
    blocks += [Paragraph(line, "dim", formats=TERMINAL) for line in lines]
    blocks += [Items(items=lines, formats=DOCUMENT)] if lines else []
    findings = [
        Item(f"{f'rank {f.rank}: ' if several else ''}{f.message}", f.severity, f.code)
        for f in story.findings
        for several in [f.rank is not None and len(run.ranks) > 1]
    ]
    blocks += [Items(items=findings, formats=PLAIN)] if findings else []
    blocks += _alerts(run, story)
    rows = kind_rows(story.step)
    if rows:
        kind, *numbers, traced = KIND_HEADER
        columns: list[str | Column] = [kind, *numbers, Column(traced, kind="prose")]
        blocks.append(Table(columns=columns, rows=rows))
    return blocks


def _alerts(run: Attributed, story: Story) -> list[Block]:
    """Return the gravest findings for the first screen, and how many more there are."""
    # What the sentence under the verdict says already is not said again below it.
    other = [f for f in story.findings if f.message != story.ideal_reason]
    alerts = [f for f in other if f.severity != "info"][:_ALERTS]
    ranks = len(run.ranks) > 1
    items = [
        Item(
            (f"Rank {f.rank}: " if f.rank is not None and ranks else "") + sentence(f.message),
            f.severity,
        )
        for f in alerts
    ]
    blocks: list[Block] = []
    if items:
        title = "What the data cannot support"
        blocks.append(Items(items=items, title=title, formats=BROWSER))
    hidden = len(other) - len(alerts)
    if hidden:
        words = fmt.plural(hidden, "more finding" if alerts else "finding")
        blocks.append(Widget("more.html.j2", {"words": f"{words} about the trace"}))
    return blocks


def _top_list(story: Story) -> list[Section]:
    items = []
    for cause in story.top:
        evidence = f" ({'; '.join(map(str, cause.evidence))})" if cause.evidence else ""
        items.append(
            f"{cause.title}: {fmt.duration(cause.per_window_ns)} per {story.traced_unit}, "
            f"{fmt.ratio(cause.row.share_ratio)}. {cause.meaning} {cause.advice}{evidence}"
        )
    return [Section(title="The largest causes", blocks=(Items(items=items),))]


def _causes(
    run: Attributed, story: Story, saving: Mapping[str, Recoverable], format: Format
) -> list[Block]:
    """Return the tree of causes, and what its marks and columns mean."""
    rows = [r for r in run.causes() if r.time_ns > 0]
    if not rows:
        return []
    notes = []
    if format == "txt":
        if any(not r.measured and r.withheld is None for r in rows):
            notes.append(f"{_MODEL} a model has a part in it; the others are recorded times")
        if any(r.withheld is not None for r in rows):
            notes.append(f"{_WITHHELD} the data does not support it (see findings)")
    notes.append(_recoverable_note(saving))
    table = _cause_table(story, rows, saving, format)
    return [table, *(Paragraph(note, "dim") for note in notes)]


def windows_text(run: Attributed, story: Story) -> str:
    """Return how many step windows there are: ``8 step windows of 2 ranks``."""
    if story.unit == "window":
        return fmt.plural(story.windows, "window")
    text = fmt.plural(story.windows, "step window")
    return f"{text} of {fmt.plural(len(run.ranks), 'rank')}" if len(run.ranks) > 1 else text


def _recoverable_note(saving: Mapping[str, Recoverable]) -> str:
    if any(one.time_ns is not None for one in saving.values()):
        return (
            "Recoverable: predicted saving if only this cause were removed (`chopper whatif`). "
            "Savings overlap, so they do not add up."
        )
    return f"Recoverable: unknown, {next((s.reason for s in saving.values() if s.reason), '')}"


def _cause_table(
    story: Story, causes: list[CauseRow], saving: Mapping[str, Recoverable], format: Format
) -> Table:
    """Return the tree of causes with its sum.

    Args:
        story: names the unit of the times.
        causes: rows, in the order of the tree.
        saving: recoverable time of each cause.
        format: text marks what a cause rests on; the others have columns for it.
    """
    columns: list[str | Column] = [
        *("Cause", f"Per {story.traced_unit}", "Share"),
        Column("Recoverable", wide=True, hint=_RECOVERABLE),
        Column("95 % interval", wide=True),
        *([Column("Meaning", kind="prose", wide=True)] if format == "html" else []),
        *([Column("Basis", kind="id")] if format != "txt" else []),
    ]
    rows = [_cause_cells(c, story, saving[c.id], format) for c in causes]
    total = ["Observed", fmt.duration(story.observed_per_window_ns), "100 %", "", ""]
    tracing = [[s[:1].upper() + s[1:], t, r, "", i] for s, t, r, i in tracing_rows(story)]
    rest = [""] * (len(columns) - len(total))
    return Table(
        columns=columns,
        rows=[*rows, *([*row, *rest] for row in (total, *tracing))],
        strong=frozenset((len(rows),)),
    )


def _cause_cells(
    cause: CauseRow, story: Story, saving: Recoverable, format: Format
) -> list[str | Cell]:
    mark = "" if cause.measured else f" {_MODEL}"
    kind = "measured" if cause.measured else "model"
    if cause.withheld is not None:
        mark, kind = f" {_WITHHELD}", "not supported"
    share = cause.share_ratio or 0.0
    saved = None if saving.time_ns is None else saving.time_ns / story.windows
    doc = CAUSES[cause.id].doc
    return [
        cause_cell(cause.id, cause.label + (mark if format == "txt" else "")),
        fmt.duration(cause.time_ns / story.windows),
        Cell(text=fmt.ratio(cause.share_ratio), share_ratio=share, color=color(cause.id)),
        Cell(text=fmt.duration(saved), hint=saving.reason or _RECOVERABLE),
        Cell(text=_interval(cause.ci95_ns, story.windows), dim=True),
        *([Cell(text=doc, hint=doc)] if format == "html" else []),
        *([Cell(text=kind, hint=cause.basis)] if format != "txt" else []),
    ]


def _interval(ci95_ns: tuple[float, float] | None, windows: int) -> str:
    if ci95_ns is None:
        return fmt.UNKNOWN
    return " – ".join(fmt.duration(v / windows) for v in ci95_ns)


def _level(groupings: Groupings, story: Story, level: Level, *, rows: int) -> Section:
    table = breakdown.table(groupings, story, level, rows=rows)
    blocks = (table,) if len(groupings.by(level)) > 1 else ()
    return Section(title=f"By {dict(breakdown.LEVELS)[level].lower()}", blocks=blocks)


def _spread(groupings: Groupings, story: Story) -> list[Section]:
    """Return one line over the ranks: the spread of the step time, and which is slowest."""
    ranks = groupings.run.ranks
    if len(ranks) < 2:
        return []
    per_step = {r.label: r.observed_ns / max(r.steps, 1) for r in ranks}
    slowest = max(per_step, key=per_step.__getitem__)
    fastest = min(per_step, key=per_step.__getitem__)
    line = (
        f"{len(ranks)} ranks, per {story.traced_unit}: fastest {fastest} "
        f"{fmt.duration(per_step[fastest])}, slowest {slowest} {fmt.duration(per_step[slowest])}"
    )
    if len(ranks) <= 4:
        parts = [f"{label} {fmt.duration(t)}" for label, t in per_step.items()]
        line = f"per {story.traced_unit}: " + " · ".join(parts)
    return [Section(title="", blocks=(Paragraph(line, "dim"),), formats=TERMINAL)]


def _coverage(run: Attributed) -> list[Section]:
    facts = [
        Fact(
            label=coverage_label(name),
            value="unknown" if value is None else fmt.ratio(value),
            share_ratio=None if value is None else min(max(value, 0.0), 1.0),
        )
        for name, value in run.coverage.items()
    ]
    blocks = (Facts(facts=facts, style="bars"),) if facts else ()
    return [Section(title="Coverage", blocks=blocks)]


def _browser_page(run: Attributed) -> Page:
    """Return the page with its figures, tables, timeline and their data."""
    from chopper.reports import details, environment, figures, frequency, series, timeline
    from chopper.reports.pack import deflate_text
    from chopper.reports.to_html import to_script_json

    replay = replay_or_reason(run)
    tables = views(run, VIEWS, replay=replay)
    groupings = Groupings(run, tables)
    story = tell(groupings)
    telemetry = [*series.collect(run.recording), *series.queues(run)]
    path = timeline.critical_lanes(run, replay)
    lanes = timeline.build(run.whole, telemetry, path=path)
    detailed = details.tables(run, tables)
    clocks = frequency.section(groupings, story)
    sections = [
        _gap(run, story, recoverable(run, replay)),
        _steps(run, story),
        Section(
            title="Breakdown",
            id="breakdown",
            intro="The same nanoseconds, grouped another way. Select a row to see its causes.",
            blocks=(Widget("breakdown.html.j2"),),
        ),
        Section(
            title="Detailed tables",
            short="Tables",
            id="details",
            intro="The run from every side. Choose a table, sort it by any column, filter it by "
            "any word.",
            blocks=(Widget("details.html.j2"),),
        ),
        Section(
            title="Timeline",
            id="timeline",
            intro=" ".join(lanes.notes)
            or f"Every recorded device event and host span of every {story.unit}.",
            blocks=(Widget("timeline.html.j2", {"unit": story.unit}),),
        ),
        *([clocks] if clocks is not None else []),
        _telemetry(run, story, figures.telemetry(telemetry, run) if telemetry else {}),
        _quality(run, story),
        environment.section(run),
        _method(run, story),
    ]
    data = breakdown.data(groupings, story) | {
        "line_colors": figures.LINES,
        "timeline": lanes.windows,
        "timeline_path": lanes.path,
    }
    blobs = {
        "names": lanes.names,
        "series": lanes.telemetry,
        "details-data": deflate_text(to_script_json(detailed).encode()),
        **lanes.packs,
    }
    summary = [*_head(run, story), *_composition(run, story), *_top_cards(run, story)]
    program = Program(scripts=_SCRIPTS, data=data, blobs=blobs)
    return _page(story, summary, sections, source=run.recording.source, program=program)


def _composition(run: Attributed, story: Story) -> list[Block]:
    """Return the observed time as a strip of its causes, and the causes by family."""
    leaves = [r for r in run.leaves() if r.time_ns > 0]
    if not leaves:
        return []
    parts = sorted(leaves, key=lambda r: LEAVES.index(r.id))
    families = [
        (row, [r for r in leaves if r.id == row.id or r.id.startswith(row.id + ".")])
        for row in run.causes()
        if row.parent is None and row.time_ns > 0
    ]
    context = {"parts": parts, "families": families, "windows": story.windows}
    return [Widget("composition.html.j2", context)]


def _top_cards(run: Attributed, story: Story) -> list[Block]:
    if not story.top:
        return []
    noun = "cause" if len(story.top) == 1 else "causes"
    title = f"The largest {noun} of the gap"
    if story.ideal_per_window_ns is None:
        # What a model could not split may be larger, but is no cause.
        known = run.leaves()[0].id == story.top[0].row.id
        title = f"The largest {'' if known else 'known '}{noun}"
    return [Widget("top.html.j2", {"title": title, "story": story})]


def _gap(run: Attributed, story: Story, saving: Mapping[str, Recoverable]) -> Section:
    from chopper.reports import figures

    known = story.ideal_per_window_ns is not None
    begins = f"The ideal is unknown, so this starts at 0. {sentence(story.ideal_reason or '')}"
    if known:
        begins = (
            "Starts at what the hardware needs at its peak, adds every cause, ends at what was "
            f"observed{' while tracing' if story.tracing else ''}."
        )
    waterfall = Figure(
        name="waterfall",
        title="",
        figure=figures.waterfall(run, story),
        label="Waterfall from ideal to observed time; the table below holds the same figures",
    )
    return Section(
        title="From ideal to observed" if known else "Where the time went",
        short="Causes",
        id="gap",
        intro=f"{begins} Mean per {story.traced_unit} over {windows_text(run, story)}. Every "
        "nanosecond is in exactly one bar.",
        blocks=(waterfall, *_causes(run, story, saving, "html")),
    )


def _steps(run: Attributed, story: Story) -> Section:
    from chopper.reports import figures

    count = len({int(i) for i in run.windows["step_index"].to_pylist()})
    binned = f"{fmt.count(count)} steps, averaged in bins. " if count > figures.MAX_BARS else ""
    return Section(
        title="Step by step" if story.unit == "step" else "The window",
        short="Steps",
        id="steps",
        intro=f"{binned}Causes of each {story.unit}, stacked. Select a bar to open that "
        f"{story.unit} in the timeline.",
        blocks=(
            Widget("steps.html.j2"),
            Figure(
                name="steps",
                title="",
                figure=figures.steps(run, story),
                label="Causes of each step, stacked",
            ),
        ),
    )


def _telemetry(run: Attributed, story: Story, figure: dict[str, Any]) -> Section:
    intro = (
        f"Sampled over the whole run; shaded bands are traced {story.unit}s. At most 1 500 points "
        "per line, the extremes kept."
    )
    if not figure:
        why = "no telemetry collector ran; the collectors below say why."
        if run.recording.manifest.kind == "imported":
            why = (
                "imported traces hold none. Record with chopper to see CPU, memory and network "
                "here."
            )
        intro = f"Nothing was sampled: {why}"
    drawn = Figure(name="telemetry", title="", figure=figure, label="Telemetry over the run")
    return Section(
        title="Telemetry",
        id="telemetry",
        intro=intro,
        blocks=(drawn,) if figure else (),
    )


def _quality(run: Attributed, story: Story) -> Section:
    blocks: list[Block] = []
    intro = "No check found anything that would weaken the figures of this report."
    if story.findings:
        intro = "What was found about the data before anything was claimed from it."
        blocks.append(finding_table(story.findings, ranks=len(run.ranks)))
    for section in _coverage(run):
        blocks += section.blocks
    return Section(
        title="Trace quality",
        short="Quality",
        id="quality",
        intro=intro,
        blocks=blocks,
    )


def _method(run: Attributed, story: Story) -> Section:
    ideal = f"Unknown here. {sentence(story.ideal_reason or '')}"
    if story.ideal_per_window_ns is not None:
        ideal = (
            "FLOP of matrix products, convolutions and attention, from recorded shapes and data "
            f"types, divided by the device's peak: {fmt.duration(story.ideal_per_window_ns)} per "
            f"{story.unit}."
        )
    windows = windows_text(run, story)
    cards = (
        (
            "Observed",
            (
                "Each rank's device timeline is cut into windows, one per step, that tile it: a "
                "step owns the time from the end of the last device event of the steps before it "
                f"to the end of its own last one. {windows[:1].upper()}{windows[1:]}, "
                f"{fmt.duration(run.observed_ns)} in all; figures per {story.unit} are this sum "
                "divided by the number of windows.",
            ),
        ),
        ("Busy, exposed, idle", (_STATES,)),
        ("95 % interval", (_INTERVAL,)),
        ("Ideal", (ideal, *story.ceiling, _MFU)),
        ("Measured and model", (_BASIS,)),
    )
    leaves = [r for r in run.causes() if r.time_ns > 0 and r.id in LEAVES]
    table = Table(
        columns=(
            *("Cause", Column("Meaning", kind="prose"), Column("Rests on", kind="prose")),
            Column("Kind", kind="id"),
        ),
        rows=[
            (
                Cell(text=r.label, below=f"`{r.id}`", color=color(r.id)),
                CAUSES[r.id].doc,
                r.basis,
                "measured" if r.measured else "model" if r.withheld is None else "not supported",
            )
            for r in leaves
        ],
    )
    return Section(
        title="How each number was made",
        short="Method",
        id="method",
        intro="All times are integer nanoseconds; causes sum to the observed time exactly.",
        blocks=(Cards(cards=cards), table),
    )


_STATES = (
    "At each moment the device counts as computing, else communicating, else copying, else idle. "
    "What runs under computing costs no time of its own. Idle time is cut by what the launching "
    "thread was doing until it launched the kernel that ended the gap."
)
_INTERVAL = (
    "Steps are resampled 2 000 times with replacement; the interval holds 95 % of the resulting "
    "means. It says how much steps vary, not how good a model is. With one step there is none."
)
_MFU = (
    "MFU = Σ F(d) ÷ (P(d) · T): the FLOP of each data type d that the model needs, against the "
    "ceiling for that type, over the observed time. HFU counts what was computed again, too."
)
_BASIS = (
    "“Measured” figures come from recorded times alone. “Model” figures split recorded time by "
    "FLOP, bytes or peaks: as good as the shapes and peaks they rest on."
)
