"""One self-contained page: opens from a file, needs no network, runs nothing that a trace says.

Names from traces reach the page in three ways only: through the template, which escapes them; as
JSON in a data block, with ``<``, ``>`` and ``&`` as escapes; and deflated. Scripts put them on the
page as text. The content policy lets run exactly the page's own script and Plotly, by their
hashes, and no request.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from chopper import wording as fmt
from chopper._version import __version__
from chopper.causes import CAUSES, LEAVES
from chopper.reports import details, figures, frequency, plotly_script, series, timeline
from chopper.reports.advice import advice
from chopper.reports.labels import full_label, sentence
from chopper.reports.pack import deflate_text
from chopper.reports.palette import PHASES, color, ink
from chopper.reports.story import (
    KIND_HEADER,
    Story,
    Views,
    coverage_label,
    kind_rows,
    tell,
    tracing_rows,
)

if TYPE_CHECKING:
    from chopper.analyzers.attributed import Attributed
    from chopper.attribution import CauseRow, Group, Level, Recoverable
    from chopper.reports.story import TopCause
    from chopper.storage.manifest import CollectorReport, Overhead

_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("util.js", "table.js", "details.js", "plots.js", "timeline.js", "main.js")
_SECTIONS = (
    ("summary", "Summary"),
    ("gap", "Causes"),
    ("steps", "Steps"),
    ("breakdown", "Breakdown"),
    ("details", "Tables"),
    ("timeline", "Timeline"),
    ("frequency", "Frequency"),
    ("telemetry", "Telemetry"),
    ("quality", "Quality"),
    ("environment", "Environment"),
    ("method", "Method"),
)
_LEVELS: tuple[tuple[Level, str], ...] = (
    ("phase", "Phase"),
    ("layer", "Layer"),
    ("op", "Operator"),
    ("kernel", "Kernel"),
    ("step", "Step"),
    ("rank", "Rank"),
)
_MAX_ROWS = 1000
"""Rows of one level in the page; the rest is one row."""
_WIDE_RATIO = 0.045
"""Parts of the composition wide enough for a figure in them."""


def render(attribution: Attributed) -> str:
    """The HTML report of an attribution."""
    plotly_script.prefetch()
    import jinja2
    from markupsafe import Markup as safe

    views = Views(attribution)
    story = tell(views)
    telemetry = [*series.collect(attribution.run), *series.queues(attribution)]
    tables = details.tables(attribution)
    lanes = timeline.build(attribution.whole, telemetry)
    clocks = frequency.build(attribution, story)
    context = _context(views, story, lanes, telemetry)
    context["frequency"] = clocks
    context["has_details"] = bool(tables)
    absent = {"details": not tables, "frequency": clocks is None}
    context["sections"] = [s for s in _SECTIONS if not absent.get(s[0])]
    script = "(() => {\n'use strict';\n" + "\n".join(_asset(s) for s in _SCRIPTS) + "\n})();"
    plotly = plotly_script.get()
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["code_parts"] = _code_parts
    environment.filters["sentence"] = sentence
    template = environment.from_string(_asset("report.html.j2"))
    return template.render(
        **context,
        css=safe(_asset("report.css")),
        js=safe(script),
        data=safe(_data(views, story, lanes, telemetry, clocks)),
        names=safe(lanes.names),
        telemetry=safe(lanes.telemetry),
        details=safe(deflate_text(to_script_json(tables).encode())),
        packs=[(key, safe(blob)) for key, blob in lanes.packs.items()],
        plotly=safe(plotly.deflated),
        plotly_bytes=plotly.size_bytes,
        script_hashes=safe(f"{plotly_script.policy_hash(script.encode())} {plotly.policy_hash}"),
    )


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def to_script_json(value: Any) -> str:
    """JSON that can stand inside a script element whatever its strings hold."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    text = re.sub("[<>&\u2028\u2029]", lambda m: _UNSAFE[m.group()], text)
    # Lone surrogates cannot be encoded: a name that holds one shows U+FFFD.
    return text.encode("utf-8", "replace").decode("utf-8")


def _data(
    views: Views,
    story: Story,
    lanes: timeline.Timeline,
    telemetry: list[series.Series],
    clocks: frequency.Frequency | None,
) -> str:
    """What the page's scripts read: causes, levels, figures, windows."""
    attribution = views.attribution
    order = [row.id for row in attribution.leaves()]
    order.sort(key=LEAVES.index)
    number = {cause: i for i, cause in enumerate(order)}
    return to_script_json(
        {
            "unit": story.unit,
            "windows": story.windows,
            "observed_ns": attribution.observed_ns,
            "causes": [
                {"id": c, "label": full_label(c), "color": color(c)}
                for c in [*order, *(c for c in CAUSES if c not in number)]
            ],
            "phase_colors": PHASES,
            "line_colors": figures.LINES,
            "rank_labels": {str(r.rank): r.label for r in attribution.ranks},
            "step_index": sorted({int(i) for i in attribution.windows["step_index"].to_pylist()}),
            "levels": [_level(views, level, label, number) for level, label in _LEVELS],
            "figures": {
                "waterfall": figures.waterfall(attribution, story),
                "steps": figures.steps(attribution, story),
                "telemetry": figures.telemetry(telemetry, attribution),
                **({} if clocks is None else clocks.figures),
            },
            "timeline": lanes.windows,
            "timeline_path": lanes.path,
        }
    )


def _level(views: Views, level: Level, label: str, number: dict[str, int]) -> dict[str, Any]:
    """One table of the breakdown.

    Rows are ``[key, shown, time_ns, divisor, calls, busy_ns, [[cause, time_ns]…], order]``: the
    divisor turns the sum into a mean per step, calls and busy are counted over all windows.
    """
    groups = views.by(level)
    ordered = level in ("step", "rank")
    attribution = views.attribution
    steps_of = {r.rank: max(r.steps, 1) for r in attribution.ranks}
    labels = {r.rank: r.label for r in attribution.ranks}
    per_step = _windows_per_step(attribution) if level == "step" else {}
    calls = _calls(attribution, level) if level in ("kernel", "op", "layer", "phase") else None
    rows: list[list[Any]] = []
    for i, group in enumerate(groups[:_MAX_ROWS]):
        divisor = views.windows
        if level == "rank" and group.key is not None:
            divisor = steps_of.get(int(group.key), 1)
        elif level == "step":
            divisor = per_step.get(group.key, 1)
        count, busy = _NO_CALLS if calls is None else calls.get(group.key, _NO_CALLS)
        rows.append(
            [
                None if group.key is None else str(group.key),
                _shown(group, level, labels),
                group.time_ns,
                divisor,
                count,
                busy,
                _causes_of(group, number),
                i if ordered else None,
            ]
        )
    rest = groups[_MAX_ROWS:]
    cut = None
    if rest:
        time_ns = sum(g.time_ns for g in rest)
        cut = (
            f"{fmt.plural(len(rest), 'smaller row')} not listed: "
            f"{fmt.duration(time_ns / views.windows)}, "
            f"{fmt.ratio(time_ns / max(attribution.observed_ns, 1))} in all."
        )
    return {
        "id": level,
        "label": label,
        "ordered": ordered,
        "calls": calls is not None,
        "rows": rows,
        "cut": cut,
    }


def _shown(group: Group, level: str, labels: dict[int, str]) -> str:
    if group.key is None:
        return {"step": "whole trace"}.get(level, f"no {level}")
    if level == "kernel":
        return fmt.kernel_name(str(group.key))
    if level == "rank":
        return labels.get(int(group.key), f"rank {group.key}")
    return str(group.key)


def _causes_of(group: Group, number: dict[str, int]) -> list[list[int]]:
    found = [[number[c], t] for c, t in group.causes.items() if t > 0 and c in number]
    return sorted(found)


def _windows_per_step(attribution: Attributed) -> dict[Any, int]:
    counts: dict[Any, int] = {}
    for number in attribution.windows["number"].to_pylist():
        counts[number] = counts.get(number, 0) + 1
    return counts


_NO_CALLS: tuple[int | None, int | None] = (None, None)


def _calls(
    attribution: Attributed, level: str
) -> dict[str | int | None, tuple[int | None, int | None]]:
    """Per value of a level: its device events in the windows, and how long they ran.

    Durations count overlapped time too, so they can exceed the attributed time.
    """
    import numpy as np

    from chopper.reports.lanes import dictionary

    found: dict[str | int | None, tuple[int, int]] = {}
    for rank in attribution.run.ranks:
        links = attribution.links.get(rank)
        events = attribution.run.table(rank, "device_event")
        if links is None or not events.num_rows:
            continue
        column = events["name"] if level == "kernel" else links[level]
        values, codes = dictionary(column)
        inside = links["step_index"].is_valid().to_numpy()
        codes = codes[inside]
        dur = events["dur_ns"].to_numpy()[inside]
        counts = np.bincount(codes, minlength=len(values) + 1)
        # float64 sums are exact here: below 2**53 ns, 104 days.
        busy = np.bincount(codes, weights=dur, minlength=len(values) + 1)
        for value, n, t in zip([*values, None], counts.tolist(), busy.tolist(), strict=True):
            if n:
                before = found.get(value, (0, 0))
                found[value] = before[0] + n, before[1] + int(t)
    return dict(found)


def _context(
    views: Views, story: Story, lanes: timeline.Timeline, telemetry: list[series.Series]
) -> dict[str, Any]:
    attribution = views.attribution
    # What the sentence under the verdict says already is not said again below it.
    said = sum(f.message == story.ideal_reason for f in story.findings)
    grave = [f for f in story.findings if f.severity != "info"]
    alerts = [f for f in grave if f.message != story.ideal_reason][:4]
    hidden = len(story.findings) - len(alerts) - said
    composition = _composition(attribution, story)
    run = attribution.run
    return {
        "version": __version__,
        "story": story,
        "run_source": run.source,
        "ranks": len(attribution.ranks),
        "verdict_parts": emphasised(story.verdict),
        "alerts": alerts,
        "more_findings": _more_findings(hidden, bool(alerts)),
        "composition": composition,
        "composition_label": "Causes of the observed time: "
        + ", ".join(f"{p['label']} {p['share']}" for p in composition),
        "families": _families(attribution, story),
        "top": [_top(cause) for cause in story.top],
        "top_title": _top_title(attribution, story),
        "windows_text": _windows_text(attribution, story),
        "observed_text": fmt.duration(story.observed_per_window_ns),
        "tracing_rows": tracing_rows(story),
        "kind_rows": kind_rows(story.step),
        "kind_header": KIND_HEADER,
        "ideal_text": fmt.duration(story.ideal_per_window_ns),
        "total_text": fmt.duration(attribution.observed_ns),
        "tree": _tree(attribution, story),
        "steps_binned": _binned(attribution),
        "timeline_notes": lanes.notes,
        "has_telemetry": bool(telemetry),
        "no_telemetry": _no_telemetry(attribution),
        "coverage": [_coverage(name, value) for name, value in attribution.coverage.items()],
        "environment": _environment(attribution),
        "collectors": _collectors(attribution),
        "overhead": _overhead(attribution),
        "made": dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


_FIGURE = re.compile(r"(−?\d[\d.,\u202f]{0,20} ?(?:ns|µs|ms|s|min \d+ s)\b)")


def emphasised(text: str) -> list[tuple[str, bool]]:
    """A sentence cut into parts; durations are strong."""
    return [(part, i % 2 == 1) for i, part in enumerate(_FIGURE.split(text)) if part]


def _code_parts(text: str) -> list[tuple[str, bool]]:
    """A sentence cut at backticks; what stands between them is code."""
    return [(part, i % 2 == 1) for i, part in enumerate(text.split("`")) if part]


def _more_findings(hidden: int, some_shown: bool) -> str | None:
    if not hidden:
        return None
    words = fmt.plural(hidden, "more finding" if some_shown else "finding")
    return f"{words} about the trace"


def _windows_text(attribution: Attributed, story: Story) -> str:
    if story.unit == "window":
        return fmt.plural(story.windows, "window")
    ranks = len(attribution.ranks)
    text = fmt.plural(story.windows, "step window")
    return f"{text} of {fmt.plural(ranks, 'rank')}" if ranks > 1 else text


def _binned(attribution: Attributed) -> str | None:
    steps = len({int(i) for i in attribution.windows["step_index"].to_pylist()})
    return fmt.count(steps) if steps > figures.MAX_BARS else None


def _composition(attribution: Attributed, story: Story) -> list[dict[str, Any]]:
    rows = sorted(attribution.leaves(), key=lambda r: LEAVES.index(r.id))
    return [
        {
            "id": row.id,
            "label": full_label(row.id),
            "color": color(row.id),
            "ink": ink(color(row.id)),
            "flex": row.time_ns,
            "time": fmt.duration(row.time_ns / story.windows),
            "share": fmt.ratio(row.share_ratio),
            "wide": (row.share_ratio or 0) >= _WIDE_RATIO,
        }
        for row in rows
        if row.time_ns > 0
    ]


_FAMILY_PARTS = 4


def _families(attribution: Attributed, story: Story) -> list[dict[str, Any]]:
    """Causes at the top of the tree, each with its largest leaves."""
    rows = [r for r in attribution.causes() if r.time_ns > 0]
    leaves = [r for r in attribution.leaves() if r.time_ns > 0]
    families = []
    for row in rows:
        if row.parent is not None:
            continue
        mine = [leaf for leaf in leaves if leaf.id == row.id or leaf.id.startswith(row.id + ".")]
        shown = mine[:_FAMILY_PARTS]
        parts = [
            {
                "id": p.id,
                "label": full_label(p.id),
                "color": color(p.id),
                "share": fmt.ratio(p.share_ratio),
            }
            for p in shown
        ]
        if len(mine) > len(shown):
            rest = sum(p.time_ns for p in mine[len(shown) :])
            parts.append(
                {
                    "id": "",
                    "label": f"{len(mine) - len(shown)} more",
                    "color": "transparent",
                    "share": fmt.ratio(rest / attribution.observed_ns),
                }
            )
        families.append(
            {
                "label": row.label,
                "time": fmt.duration(row.time_ns / story.windows),
                "share": fmt.ratio(row.share_ratio),
                "parts": parts,
            }
        )
    return families


def _top_title(attribution: Attributed, story: Story) -> str:
    noun = "cause" if len(story.top) == 1 else "causes"
    if story.ideal_per_window_ns is not None:
        return f"The largest {noun} of the gap"
    # What a model could not split may be larger, but is no cause.
    known = bool(story.top) and attribution.leaves()[0].id == story.top[0].id
    return f"The largest {noun}" if known else f"The largest known {noun}"


def _top(cause: TopCause) -> dict[str, Any]:
    interval = None
    if cause.ci95_per_window_ns is not None:
        low, high = cause.ci95_per_window_ns
        interval = f"{fmt.duration(low)} to {fmt.duration(high)}"
    return {
        "label": cause.label,
        "path": cause.path,
        "color": color(cause.id),
        "time": fmt.duration(cause.per_window_ns),
        "share": fmt.ratio(cause.share_ratio),
        "interval": interval,
        "how": "measured" if cause.measured else "model",
        "meaning": cause.meaning,
        "advice": advice(cause.id),
        "evidence": [(e.label, e.shown, e.value, e.name) for e in cause.evidence],
    }


def _tree(attribution: Attributed, story: Story) -> list[dict[str, Any]]:
    back = attribution.recoverable()
    rows = [row for row in attribution.causes() if row.time_ns > 0]
    return [_tree_row(row, back[row.id], story) for row in rows]


def _tree_row(row: CauseRow, back: Recoverable, story: Story) -> dict[str, Any]:
    interval = fmt.UNKNOWN
    if row.ci95_ns is not None:
        low, high = (v / story.windows for v in row.ci95_ns)
        interval = f"{fmt.duration(low)} to {fmt.duration(high)}"
    return {
        "id": row.id,
        "label": row.label,
        "depth": row.id.count("."),
        "leaf": row.id in LEAVES,
        "color": color(row.id),
        "time": fmt.duration(row.time_ns / story.windows),
        "share": fmt.ratio(row.share_ratio),
        "width": round(100 * (row.share_ratio or 0), 2),
        "interval": interval,
        "back": fmt.duration(None if back.time_ns is None else back.time_ns / story.windows),
        "back_reason": back.reason or "less time if this alone were gone, by a replay",
        "doc": CAUSES[row.id].doc,
        "basis": row.basis,
        "measured": row.measured,
        "kind": "not supported"
        if row.withheld is not None
        else "measured"
        if row.measured
        else "model",
    }


def _no_telemetry(attribution: Attributed) -> str:
    if attribution.run.manifest.kind == "imported":
        return "imported traces hold none. Record with chopper to see CPU, memory and network here."
    return "no telemetry collector ran; the collectors below say why."


def _coverage(name: str, value: float | None) -> dict[str, Any]:
    return {
        "label": coverage_label(name),
        "text": fmt.ratio(value) if value is not None else "not known",
        "width": None if value is None else round(100 * min(max(value, 0), 1), 1),
    }


def _ranks_text(ranks: list[int]) -> str:
    """``0–3, 7``."""
    parts: list[str] = []
    start = previous = ranks[0]
    for rank in [*ranks[1:], None]:
        if rank is not None and rank == previous + 1:
            previous = rank
            continue
        parts.append(str(start) if start == previous else f"{start}–{previous}")
        if rank is not None:
            start = previous = rank
    return ", ".join(parts)


_ENVIRONMENT = {
    "affinity": "Cores it may use",
    "cores_by_numa_node": "Cores by NUMA node",
    "cpu": "CPU",
    "cuda": "CUDA",
    "hip": "HIP",
    "nccl": "NCCL",
    "platform": "Platform",
    "python": "Python",
    "torch": "PyTorch",
    "torch_threads": "PyTorch's threads",
}


def _environment(attribution: Attributed) -> list[tuple[str, str, bool]]:
    run = attribution.run.manifest
    facts: list[tuple[str, str, bool]] = [("Run", run.name, False)]
    if run.command:
        import shlex

        facts.append(("Command", shlex.join(run.command), True))
    if run.workload:
        facts.append(("Workload", run.workload, False))
    if run.created_ns:
        moment = dt.datetime.fromtimestamp(run.created_ns / 1e9, tz=dt.UTC)
        facts.append(("Recorded", moment.strftime("%Y-%m-%d %H:%M:%S UTC"), False))
    if run.exit_code is not None:
        facts.append(("Exit code", str(run.exit_code), False))
    world = sorted({p.world_size for p in run.ranks if p.world_size})
    if world:
        facts.append(("World size", ", ".join(map(str, world)), False))
    for title, values in (
        ("Hosts", [p.hostname for p in run.ranks]),
        ("Backend", [p.backend for p in run.ranks]),
        ("Steps found by", [p.steps_source for p in run.ranks]),
        ("Recorded by chopper", [p.chopper_version for p in run.ranks]),
    ):
        distinct = list(dict.fromkeys(v for v in values if v))
        if distinct:
            facts.append((title, _few(distinct), False))
    facts += _devices(attribution)
    merged: dict[str, list[str]] = {}
    for part in run.ranks:
        for key, value in part.environment.items():
            if value not in merged.setdefault(key, []):
                merged[key].append(value)
    facts += [(_ENVIRONMENT.get(k, k), _few(values), False) for k, values in merged.items()]
    traces = [Path(t).name for p in run.ranks for t in p.traces]
    if traces and run.kind == "imported":
        facts.append(("Traces", _few(traces), False))
    return facts


def _few(values: list[str], limit: int = 4) -> str:
    more = f" and {len(values) - limit} more" if len(values) > limit else ""
    return ", ".join(values[:limit]) + more


def _devices(attribution: Attributed) -> list[tuple[str, str, bool]]:
    counted: dict[str, int] = {}
    for part in attribution.run.manifest.ranks:
        for device in part.devices:
            if part.device_id is not None and device.device_id != part.device_id:
                continue
            words = [device.name or "unknown device"]
            if device.memory_bytes:
                words.append(fmt.bytes_(device.memory_bytes))
            if device.multiprocessor_count:
                words.append(fmt.plural(device.multiprocessor_count, "multiprocessor"))
            text = ", ".join(words)
            counted[text] = counted.get(text, 0) + 1
    return [("Device", text if n == 1 else f"{n} × {text}", False) for text, n in counted.items()]


def _collectors(attribution: Attributed) -> list[dict[str, Any]]:
    """One row per collector and outcome, ranks that agree together."""
    rows: dict[tuple[object, ...], tuple[CollectorReport, list[int]]] = {}
    for part in attribution.run.manifest.ranks:
        for report in part.collectors:
            # What was sampled differs by rank; a refusal is the same everywhere.
            alone = part.rank if report.samples_count is not None else None
            key = (report.name, report.status, report.reason, alone)
            first, ranks = rows.setdefault(key, (report, []))
            ranks.append(part.rank)
            worst = max(first.clock_alignment_error_ns or 0, report.clock_alignment_error_ns or 0)
            if worst:
                rows[key] = msgspec.structs.replace(first, clock_alignment_error_ns=worst), ranks
    tones = {"obtained": "ok", "refused": "warning", "failed": "error"}
    return [
        {
            "name": report.name,
            "ranks": _ranks_text(ranks),
            "status": report.status,
            "tone": tones[report.status],
            "reason": report.reason,
            "remedy": report.remedy,
            "rate": _rate(report),
            "samples": fmt.count(report.samples_count),
            "dropped": fmt.count(report.dropped_count),
            "jitter": _pair(report.jitter_p50_ns, report.jitter_p99_ns),
            "call": _pair(report.call_p50_ns, report.call_p99_ns),
            "cpu": fmt.ratio(report.cpu_ratio),
            "clock": _within(report.clock_alignment_error_ns),
            "absent": [f"{name}: {why}" for name, why in sorted(report.absent.items())],
        }
        for report, ranks in sorted(rows.values(), key=lambda r: (r[0].name, r[1]))
    ]


def _rate(report: CollectorReport) -> str:
    if report.achieved_hz is None:
        return fmt.UNKNOWN
    if report.requested_hz is None:
        return fmt.hertz(report.achieved_hz)
    return f"{fmt.hertz(report.achieved_hz)} of {fmt.hertz(report.requested_hz)}"


def _within(error_ns: int | None) -> str:
    return fmt.UNKNOWN if error_ns is None else f"± {fmt.duration(error_ns)}"


def _pair(low: int | None, high: int | None) -> str:
    return (
        fmt.UNKNOWN
        if low is None and high is None
        else f"{fmt.duration(low)} / {fmt.duration(high)}"
    )


def _overhead(attribution: Attributed) -> list[dict[str, str]]:
    rows = []
    step = attribution.step_time()
    for part in attribution.run.manifest.ranks:
        cost: Overhead | None = part.overhead
        if cost is None:
            continue
        traced_ns, untraced_ns = step.traced_ns, step.headline_ns
        if step.untraced is None:
            # What the recording itself counted, as older ones did not say of each step.
            traced_ns, untraced_ns = cost.traced_step_ns, cost.untraced_step_ns
        rows.append(
            {
                "ranks": str(part.rank),
                "setup": fmt.duration(cost.setup_ns),
                "per_step": fmt.duration(cost.per_step_ns),
                "export": fmt.duration(cost.export_ns),
                "traced": fmt.duration(traced_ns),
                "untraced": fmt.duration(untraced_ns),
                "cost": fmt.UNKNOWN
                if not traced_ns or not untraced_ns
                else f"{100 * (traced_ns / untraced_ns - 1):+.1f} %".replace("-", "−"),
            }
        )
    return rows[:16]
