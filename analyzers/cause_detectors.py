"""Patterns that are the time of some causes, as ``cause_detectors.toml`` declares them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Detector, Sighting, spent_in
from chopper.analyzers.events.places import place_of
from chopper.analyzers.replay.whatif_options import Changes
from chopper.analyzers.trace.join import Links
from chopper.wording import percent


class _Declared(msgspec.Struct, frozen=True):
    causes: tuple[str, ...]
    title: str
    condition: str
    without: str
    evidence: str
    remedy: str
    view: str
    least_ratio: float = 0.05
    on: Literal["any", "device", "host"] = "any"


@cache
def declared() -> dict[str, _Declared]:
    """Return all of these patterns by name."""
    text = Path(__file__).with_name("cause_detectors.toml").read_bytes()
    return msgspec.toml.decode(text, type=dict[str, _Declared])


def detector(name: str) -> Detector:
    """Return the declaration of one of these patterns."""
    one = declared()[name]
    return Detector(
        title=one.title,
        condition=f"{one.condition} Seen from {percent(one.least_ratio, '.0f')} of the "
        "observed time on.",
        without=one.without,
        evidence=one.evidence,
        remedy=one.remedy,
        view=one.view,
    )


def by_cause(name: str, run: Attributed, links: Mapping[int, Links]) -> Iterator[Sighting]:
    """PIECE, GAP -> at most one sighting."""
    one = declared()[name]
    on_host = all(joined.host_only for joined in run.joined.values())
    time_ns, rows = spent_in(run, one.causes)
    if time_ns < one.least_ratio * run.observed_ns or one.on == ("device" if on_host else "host"):
        return
    where = place_of(run, links, one.causes)
    place = where.line or (where.layer and f"layer {where.layer}") or where.op
    spent = {row.id for row in run.causes() if row.time_ns}
    yield Sighting(
        detector=name,
        events=rows,
        changes=Changes(fix=tuple(cause for cause in one.causes if cause in spent)),
        phase=where.phase,
        line=where.line,
        evidence={
            "time_ns": time_ns // max(run.windows.num_rows, 1),
            "share_ratio": time_ns / run.observed_ns,
            "place": place,
            "in_place": f", most of it in {place}" if place else "",
        },
    )
