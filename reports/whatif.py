"""A changed run beside the observed one, for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from chopper import wording as fmt
from chopper.causes import CAUSES
from chopper.errors import printable
from chopper.reports.text import _MIN_WIDTH, _console, _written

if TYPE_CHECKING:
    from rich.console import Console

    from chopper.attribution import Attribution
    from chopper.replaying import WhatIf

_PATH_ROWS = 8
_RECOVERABLE_ROWS = 20


def render(found: WhatIf, *, width: int = 100, color: bool = False) -> str:
    """The prediction as text; without changes, what each cause would give back."""
    width = max(width, _MIN_WIDTH)
    console = _console(width, color)
    _head(console, found)
    if found.changes:
        _causes(console, found)
    else:
        _recoverable(console, found.observed)
    _path(console, found)
    return _written(console)


def _head(console: Console, found: WhatIf) -> None:
    unit = "step" if next(iter(found.steps), None) is not None else "window"
    untraced = found.observed.step_time().untraced
    if untraced is not None:
        unit = f"traced {unit}"
    console.print(Text(printable(found.source), style="bold"))
    for change in found.changes:
        console.print(Text(f"· {printable(change)}"))
    if found.reference_rank is not None and len(found.observed.ranks) > 1:
        console.print(
            Text(f"· every rank taken to be as quick as rank {found.reference_rank}", style="dim")
        )
    console.print()
    observed = fmt.duration(found.observed_step_ns)
    if not found.changes:
        console.print(
            Text(
                f"A {unit} takes {observed}; replayed unchanged, "
                f"{fmt.duration(found.predicted_step_ns)}.",
                style="bold",
            )
        )
    else:
        line = f"A {unit} takes {observed}; predicted {fmt.duration(found.predicted_step_ns)}"
        if found.predicted_ci95_ns:
            low, high = found.predicted_ci95_ns
            line += f" ({fmt.duration(low)} – {fmt.duration(high)})"
        console.print(Text(line + f": {_less(found.saved_ratio)}.", style="bold"))
        if found.saved_ci95_ns:
            low, high = found.saved_ci95_ns
            console.print(
                Text(
                    f"saved per {unit}: {_signed(found.observed_step_ns - found.predicted_step_ns)}, "
                    f"95 % interval over {unit}s {_signed(low)} – {_signed(high)}"
                )
            )
        following = found.next_bottleneck
        if following is not None:
            console.print(
                Text(
                    f"next: {CAUSES[following.id].label} ({following.id}), "
                    f"{fmt.ratio(following.share_ratio)} of what is left"
                )
            )
    if untraced is not None:
        console.print(Text(f"A step without a trace takes {fmt.duration(untraced.value_ns)}."))
    for note in found.notes:
        console.print(Text(f"! {printable(note)}", style="yellow"))
    console.print()


def _less(saved: float) -> str:
    if abs(saved) < 0.0005:
        return "no change"
    return f"{fmt.ratio(abs(saved))} {'less' if saved > 0 else 'more'}"


def _signed(time_ns: float) -> str:
    return f"-{fmt.duration(-time_ns)}" if time_ns < 0 else fmt.duration(time_ns)


def _grid(*headings: str, words: int = 1) -> Table:
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", expand=False)
    for i, heading in enumerate(headings):
        grid.add_column(heading, justify="right" if i >= words else "left", no_wrap=True)
    return grid


def _windows(attribution: Attribution) -> int:
    return max(int(attribution.windows.num_rows), 1)


def _causes(console: Console, found: WhatIf) -> None:
    """Causes of both, per rank and step, in the order of the tree."""
    before = {c.id: c.time_ns / _windows(found.observed) for c in found.observed.causes()}
    after = {c.id: c.time_ns / _windows(found.attribution) for c in found.attribution.causes()}
    grid = _grid("per rank and step", "observed", "predicted", "change")
    total = max(sum(v for c, v in before.items() if "." not in c), 1.0)
    for cause in CAUSES:
        a, b = before.get(cause, 0.0), after.get(cause, 0.0)
        if max(a, b) < total * 5e-4:
            continue
        indent = "  " * cause.count(".")
        grid.add_row(
            Text(indent + CAUSES[cause].label),
            fmt.duration(a),
            fmt.duration(b),
            _signed(b - a) if abs(b - a) >= 500 else "",
        )
    console.print(grid)
    console.print()


def _recoverable(console: Console, attribution: Attribution) -> None:
    """What each cause gives back, the most first."""
    windows = _windows(attribution)
    known = attribution.recoverable()
    leaves = [row for row in attribution.causes() if row.id in known]
    grid = _grid("taken away alone", "time", "gives back", "of the step")
    same = {(row.time_ns, row.parent) for row in leaves}
    # A parent with the time of its only child says nothing more.
    rows = [
        row
        for row in leaves
        if known[row.id].time_ns is not None and (row.time_ns, row.id) not in same
    ]
    rows.sort(key=lambda row: -(known[row.id].time_ns or 0))
    for row in rows[:_RECOVERABLE_ROWS]:
        back = known[row.id].time_ns or 0
        grid.add_row(
            Text(row.id),
            fmt.duration(row.time_ns / windows),
            fmt.duration(back / windows),
            fmt.ratio(back / attribution.observed_ns if attribution.observed_ns else None),
        )
    console.print(grid)
    console.print(Text("These do not add up: what one gives back another may take.", style="dim"))
    for row in leaves:
        reason = known[row.id].reason
        if reason is not None:
            console.print(Text(f"– {row.id}: {reason}", style="dim"))
    console.print()


def _path(console: Console, found: WhatIf) -> None:
    """What the critical path consists of."""
    total = sum(time for _, _, time in found.path)
    if not total:
        return
    grid = _grid(
        "critical path" + (" of the prediction" if found.changes else ""), "cause", "share"
    )
    for cause, name, time in found.path[:_PATH_ROWS]:
        grid.add_row(
            Text(printable(fmt.ellipsize(fmt.kernel_name(name), 44))),
            Text(cause),
            fmt.ratio(time / total),
        )
    console.print(grid)
    if len(found.path) > _PATH_ROWS:
        console.print(
            Text(f"… {len(found.path) - _PATH_ROWS} more: --json has all of them", style="dim")
        )


__all__ = ["render"]
