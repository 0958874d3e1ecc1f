"""Patterns that are the time of some causes, as ``detectors.toml`` declares them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

import msgspec

from chopper.analyzers import detectors
from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Detector, Sighting, spent_in
from chopper.analyzers.events.places import place_of
from chopper.analyzers.replay.whatif_options import Changes
from chopper.analyzers.trace.join import Links
from chopper.wording import percent


@cache
def declared() -> dict[str, Detector]:
    """Return all of these patterns by name."""
    return {name: one for name, one in detectors.declared().items() if one.causes}


def detector(name: str) -> Detector:
    """Return the declaration of one of these patterns, with the share in its condition."""
    one = declared()[name]
    share = percent(one.least_ratio, ".0f")
    condition = f"{one.condition} Seen from {share} of the observed time on."
    return msgspec.structs.replace(one, condition=condition)


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
