"""Patterns in a run that its author can mend, as ``detectors.toml`` declares them.

Most are the time of some causes (:func:`by_cause`). For any other, a function of its name in a
module here finds the places, and takes what it needs of :class:`chopper.analyzers.actions.Material`
by name. What mending a place would give back is predicted by a replay, never by adding up times.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.events.places import place_of
from chopper.analyzers.replay.whatif_options import Changes
from chopper.analyzers.trace.columns import ints, strings
from chopper.analyzers.trace.join import Links
from chopper.wording import percent


class Detector(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pattern that is looked for.

    Attributes:
        title: what is seen, in a few words; a format string of the evidence.
        condition: when it is said to be seen, exactly.
        without: what a run without it is taken to be, which the replay predicts.
        evidence: the sentence of numbers; a format string of the evidence.
        remedy: how to try it.
        view: the detailed table that shows the rows.
        in_every_step: kernels alone show it, alike in each step, so that one step is enough; a
            first iteration allocates, compiles and waits as no later one does.
        causes: those whose time it is; none where a function finds it.
        link_ratio: bandwidth of the link without it, as a multiple; else the causes take no time.
        module: that has the function.
        limits: of the condition, by name; shares are shown in percent.
        remedies: what the evidence may add to the remedy, by what was seen.
        on: runs that it is looked for in, with ``causes``.
    """

    title: str
    condition: str
    without: str
    evidence: str
    remedy: str
    view: str
    in_every_step: bool = False
    causes: tuple[str, ...] = ()
    link_ratio: float | None = None
    module: str = ""
    limits: dict[str, float] = {}
    remedies: dict[str, str] = {}
    on: Literal["any", "device", "host"] = "any"


@cache
def declared() -> dict[str, Detector]:
    """Return all patterns by name."""
    text = Path(__file__).parent.with_suffix(".toml").read_bytes()
    return msgspec.toml.decode(text, type=dict[str, Detector])


def limits_of(name: str) -> dict[str, float]:
    """Return the limits of a pattern, by name."""
    return declared()[name].limits


def detector(name: str) -> Detector:
    """Return the declaration of a pattern, with the limits in its condition."""
    one = declared()[name]
    shown = {
        limit: percent(value, ".0f") if limit.endswith("_ratio") else f"{value:g}"
        for limit, value in one.limits.items()
    }
    return msgspec.structs.replace(one, condition=one.condition.format(**shown))


def function_of(name: str) -> Callable[..., Iterator[Sighting]]:
    """Return the function that sees a pattern: its parameters say what it needs."""
    one = declared()[name]
    if one.causes:
        return partial(by_cause, name)
    found: Callable[..., Iterator[Sighting]] = getattr(
        importlib.import_module(f"{__name__}.{one.module}"), name
    )
    return found


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """A pattern seen in a run, and what would be different without it.

    Attributes:
        events: rank → rows of `device_event` that it is about.
        calls: rank → rows of `host_span` that it is about.
        phase, op, line: the place, where it is not that of the events and of the calls; an empty
            ``op`` where several share it.
        evidence: numbers and names for the sentences of the detector.
        gone: rank → rows of `device_event` that would not run.
        run_ns: rank → (rows of `device_event`, how long each would run).
        host_gone: rank → mask of the rows of `host_span` whose own work would take no time.
        calm: rank → rows of `host_span` (calls) at which the host would not wait for the device.
        changes: what else would change, as a prediction takes it.
        saved_ns: time that would be gone over all steps, mean over ranks, where no replay can tell.
        of: what ``saved_ns`` is a part of: the traced steps, or the whole recorded loop.
    """

    events: Mapping[int, np.ndarray]
    calls: Mapping[int, np.ndarray] = {}
    phase: str | None = None
    op: str | None = None
    line: str | None = None
    evidence: Mapping[str, Any] = {}
    gone: Mapping[int, np.ndarray] = {}
    run_ns: Mapping[int, tuple[np.ndarray, np.ndarray]] = {}
    host_gone: Mapping[int, np.ndarray] = {}
    calm: Mapping[int, np.ndarray] = {}
    changes: Changes | None = None
    saved_ns: int | None = None
    of: Literal["step", "loop"] = "step"


def pieces_in(run: Attribution, causes: tuple[str, ...]) -> pa.Table:
    """Return the pieces of some leaf causes. PIECE -> PIECE."""
    code, names = strings(run.pieces, "cause")
    return run.pieces.filter(np.isin(code, [names.index(c) for c in causes if c in names]))


def spent_in(run: Attribution, causes: tuple[str, ...]) -> tuple[int, dict[int, np.ndarray]]:
    """Return the time in some leaf causes, and by rank the device events that it belongs to."""
    pieces = pieces_in(run, causes)
    rank, row = ints(pieces, "rank"), ints(pieces, "event_row")
    rows = {int(r): np.unique(row[(rank == r) & (row >= 0)]) for r in np.unique(rank)}
    return int(ints(pieces, "time_ns").sum()), rows


def by_cause(name: str, run: Attribution, links: Mapping[int, Links]) -> Iterator[Sighting]:
    """PIECE, GAP -> at most one sighting."""
    one = declared()[name]
    on_host = all(joined.host_only for joined in run.joined.values())
    time_ns, rows = spent_in(run, one.causes)
    if time_ns < one.limits["least_ratio"] * run.observed_ns or one.on == (
        "device" if on_host else "host"
    ):
        return
    where = place_of(run, links, one.causes)
    place = where.line or (where.layer and f"layer {where.layer}") or where.op
    spent = {row.id for row in run.causes() if row.time_ns}
    fix = tuple(cause for cause in one.causes if cause in spent)
    changes = Changes(bandwidth_ratio=one.link_ratio) if one.link_ratio else Changes(fix=fix)
    yield Sighting(
        events=rows,
        changes=changes,
        phase=where.phase,
        op=where.op or "",
        line=where.line,
        evidence={
            "time_ns": time_ns // max(run.windows.num_rows, 1),
            "share_ratio": time_ns / run.observed_ns,
            "place": place,
            "in_place": f", most of it in {place}" if place else "",
        },
    )
