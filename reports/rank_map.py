"""The heat map of a run's ranks by its steps."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping

import numpy as np
import pyarrow.compute as pc

from chopper import wording as fmt
from chopper.analyzers.events.collectives import WAIT
from chopper.analyzers.trace.columns import ints
from chopper.analyzers.views.ranks import cube
from chopper.reports.figures import Figure, bin_labels, bins, layout, plain
from chopper.reports.labels import full_label
from chopper.reports.story import Story
from chopper.storage.manifest import RankManifest

_MOST_MEASURES = 8
_LEAST_SHARE_RATIO = 0.002
_LISTED = 4
"""Members of a group that are all named."""
_UNNAMED = ("", "undefined", "default_pg")
"""What torch calls process groups whose maker did not describe them."""


def figure(story: Story) -> Figure:
    """Return a heat map of ranks by steps: of steps without waiting, waiting, causes, the clock.

    Returns:
        A figure with one heat map; ``views``: measure → its values, to be swapped in; ``rows``:
        what ranks can be averaged by → the label of each rank.
    """
    run = story.run
    time_ns, numbers, causes = cube(run)
    parts = {part.rank: part for part in run.recording.manifest.ranks}
    hosts = {rank: part.hostname or "" for rank, part in parts.items()}
    order = sorted(range(len(numbers)), key=lambda i: (hosts.get(int(numbers[i]), ""), numbers[i]))
    time_ns, shown_ranks = time_ns[order], numbers[order].tolist()
    observed = time_ns.sum(axis=2)
    wait = time_ns[:, :, causes.index(WAIT)] if WAIT in causes else np.zeros_like(observed)
    measures = {
        "Step without straggler wait": observed - wait,
        "Step": observed,
        "Straggler wait": wait,
    }
    shares = time_ns.sum(axis=(0, 1)) / max(observed.sum(), 1)
    for i in np.argsort(-shares, kind="stable")[:_MOST_MEASURES].tolist():
        if shares[i] >= _LEAST_SHARE_RATIO and causes[i] != WAIT:
            measures[full_label(causes[i])] = time_ns[:, :, i]
    edges = bins(time_ns.shape[1])
    words = sorted({*run.windows["number"].to_pylist()}, key=lambda n: (n is not None, n))
    steps = bin_labels(["whole trace" if n is None else str(n) for n in words], edges)
    rows = {"rank": [f"rank {rank}" for rank in shown_ranks], **_dimensions(parts, shown_ranks)}
    names = [plain(hosts.get(rank, "")) for rank in shown_ranks]
    if len({*names}) > 1:
        rows["rank"] = [f"{name} · {rank}" for name, rank in zip(names, shown_ranks, strict=True)]
    if 1 < len({*names}) < len(names):
        rows["host"] = names
    views = {
        name: _view(story, values / 1e6, observed > 0, edges, "ms")
        for name, values in measures.items()
    }
    clock_hz = _clock(story, shown_ranks, observed.shape[1])
    if clock_hz is not None:
        views["Clock"] = _view(story, clock_hz / 1e9, ~np.isnan(clock_hz), edges, "GHz")
    heat = {
        "type": "heatmap",
        "x": steps,
        "y": rows["rank"],
        "colorscale": "Viridis",
        "hoverongaps": False,
        **next(iter(views.values())),
    }
    return {
        "data": [heat],
        "views": views,
        "rows": rows,
        "layout": layout(
            int(min(160 + 14 * len(shown_ranks), 560)),
            110,
            8,
            xaxis={"title": {"text": story.unit}, "type": "category", "nticks": 24},
            yaxis={"type": "category", "autorange": "reversed", "nticks": 24},
        ),
    }


def _view(
    story: Story, values: np.ndarray, known: np.ndarray, edges: np.ndarray, unit: str
) -> Figure:
    """Return the cells of a heat map, (ranks, bins of steps), and the range of its colours.

    Colours span all but the hundredth at each end, so that one hiccup does not hide the rest.
    """
    count = np.add.reduceat(known, edges[:-1], axis=1, dtype=np.int64)
    sums = np.add.reduceat(np.where(known, values, 0), edges[:-1], axis=1)
    cells = np.where(count > 0, sums / np.maximum(count, 1), np.nan)
    low, high = np.nanquantile(cells, (0.01, 0.99)).tolist()
    return {
        "z": [[None if np.isnan(v) else float(f"{v:.4g}") for v in row] for row in cells.tolist()],
        "zmin": low,
        "zmax": high if high > low else low + 1e-6,
        "colorbar": {"title": {"text": unit}, "thickness": 12},
        "hovertemplate": f"%{{y}}, {story.unit} %{{x}}: %{{z:.4~g}} {unit}<extra></extra>",
    }


def _clock(story: Story, ranks: list[int], steps_count: int) -> np.ndarray | None:
    """Return the mean clock while computing of (ranks, steps), NaN where unknown; None without."""
    table = story.table("clocks").filter(pc.field("level") == "step")
    numbers = np.unique(ints(story.run.totals.causes, "number"))
    clock_hz = np.full((len(ranks), steps_count), np.nan)
    row_of = {rank: row for row, rank in enumerate(ranks)}
    steps = np.searchsorted(numbers, ints(table, "number")).tolist()
    means = table["clock_mean_hz"].to_pylist()
    for rank, step, mean in zip(table["rank"].to_pylist(), steps, means, strict=True):
        if mean is not None:
            clock_hz[row_of[rank], step] = mean
    return None if np.isnan(clock_hz).all() else clock_hz


def _dimensions(parts: Mapping[int, RankManifest], ranks: list[int]) -> dict[str, list[str]]:
    """Return the parallel dimensions whose process groups divide all ranks, a label per rank.

    A dimension is named by what its groups were described as (DeviceMesh: ``mesh_tp``), or else by
    their size and the distance of their ranks.
    """
    labels_by_dimension: dict[str, dict[int, str]] = {}
    doubled: Counter[str] = Counter()
    groups = {
        (str(group.get("pg_desc", "")), tuple(sorted(group["ranks"])))
        for part in parts.values()
        for group in part.process_groups
        if isinstance(group.get("ranks"), list) and all(type(r) is int for r in group["ranks"])
    }
    for description, members in sorted(groups):
        strides = {b - a for a, b in itertools.pairwise(members)}
        if len(members) < 2 or len(strides) != 1:
            continue
        name = plain(description)
        if description in _UNNAMED:
            name = f"groups of {len(members)} ranks, {strides.pop()} apart"
        of = labels_by_dimension.setdefault(name, {})
        doubled[name] += len(of.keys() & set(members))
        several = len(members) > _LISTED and members[1] > members[0] + 1
        listed = "{}, {} … {}".format(*members[:2], members[-1]) if several else fmt.ranges(members)
        of |= dict.fromkeys(members, f"ranks {listed}")
    return {
        name: [of[rank] for rank in ranks]
        for name, of in labels_by_dimension.items()
        if not doubled[name] and of.keys() >= set(ranks) and len({*of.values()}) > 1
    }
