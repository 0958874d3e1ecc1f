"""Coordinates: each rank's place in the dimensions of parallelism, from all that tells it.

Process groups tell it by their names and the order of their members, recordings by the program's
device meshes and pipeline stages, users by a layout. Nothing is guessed: groups without a name may
form a grid, and still nobody knows which of its sides is which.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import msgspec

from chopper.errors import UsageError
from chopper.models.layouts import (
    GroupDimensions,
    Layout,
    Place,
    coordinates_of_names,
    dimension_of,
    merged,
    parse_layout,
)
from chopper.storage.findings import finding
from chopper.storage.manifest import (
    DIMENSIONS,
    Coordinate,
    Dimension,
    Finding,
    RankManifest,
    RunManifest,
)
from chopper.tables.ranges import MOST_RANKS
from chopper.wording import plural, some

_CONTRADICTION, _CONTRADICTED = "layout.contradiction", "layout.contradicted"
_STATED = "named by the user"
"""Beginning of the source of coordinates of a stated layout, which count whatever else is told."""
_GRID: tuple[Dimension, ...] = ("pipeline", "data", "context", "tensor")
"""Dimensions whose sizes multiply to the ranks of a job; experts lie across them."""

Members = tuple[int, ...] | range
Told = dict[int, list[Coordinate]]
"""Rank → its coordinates."""


def with_coordinates(manifest: RunManifest, layout: str | None = None) -> RunManifest:
    """Return a run's manifest as it was read with the coordinates of its ranks.

    Each rank has at most one coordinate of a dimension, in the order of dimensions. Dimensions that
    are told in different ways are left out, with a finding.

    Args:
        manifest: with all that was recorded.
        layout: what the user says, which counts whatever is told.

    Raises:
        UsageError: the layout cannot be read, or is of another number of ranks.
    """
    if any(part.process_groups or part.coordinates for part in manifest.ranks):
        manifest = _placed(manifest)
    return manifest if layout is None else _laid_out(manifest, parse_layout(layout, "layout"))


def _placed(manifest: RunManifest) -> RunManifest:
    named = _named(manifest)
    told = {part.rank: _told(part, named.get(part.rank, ())) for part in manifest.ranks}
    world = _world_size(manifest)
    findings: list[Finding] = []
    for check in (_several, _sizes, partial(_product, world), partial(_shared, world)):
        for left_out, found in check(told):
            findings.append(found)
            told = {
                rank: [one for one in each if one.dimension not in left_out]
                for rank, each in told.items()
            }
    return _with(manifest, told, findings)


def _laid_out(manifest: RunManifest, layout: Layout) -> RunManifest:
    world = _world_size(manifest)
    least = world or max((part.rank for part in manifest.ranks), default=0) + 1
    count = layout.ranks_count
    if count < least or (world is not None and count != world):
        expected = f"{world}" if world else f"{least} or more, one for each rank"
        raise UsageError(
            f"layout {layout.text!r}: its sizes multiply to {count}, expected {expected}"
        )
    told: Told = {}
    findings: dict[Dimension, Finding] = {}
    for part in manifest.ranks:
        if part.rank >= count:  # a further device of a rank's process
            told[part.rank] = []
            continue
        each = layout.coordinates(part.rank, f"{_STATED}: {layout.text}")
        stated = {one.dimension: one for one in each}
        kept = []
        for found in part.coordinates:
            one = stated.get(found.dimension)
            unsaid = one is None and found.dimension == "expert"
            if found.source.startswith(_STATED):
                continue
            if unsaid or (found.index, found.size) == ((one.index, one.size) if one else (0, 1)):
                kept.append(found)
            elif found.dimension not in findings:
                findings[found.dimension] = finding(
                    _CONTRADICTED,
                    rank=part.rank,
                    stated=_words(one) if one else f"no {found.dimension} parallelism",
                    source=found.source,
                    found=_words(found),
                )
        told[part.rank] = merged([*stated.values(), *kept])
    known = [one for one in manifest.findings if one.code != _CONTRADICTED]
    manifest = msgspec.structs.replace(manifest, findings=known)
    return _with(manifest, told, findings.values())


def why_unknown(manifest: RunManifest, dimension: str) -> str:
    """Return why no rank's place in a dimension is known, in words."""
    others = tuple(name for name in DIMENSIONS if name != dimension)
    for found in manifest.findings:
        if found.code == _CONTRADICTION and not found.message.startswith(others):
            return found.message
    world = _world_size(manifest) or len(manifest.ranks)
    sizes = {one.dimension: one.size for one in _every(manifest) if one.dimension in _GRID}
    if sizes and math.prod(sizes.values()) == world and dimension in _GRID:
        return f"{_product_words(sizes)} are all {plural(world, 'rank')}"
    if world == 1:
        return "the run has one rank"
    sizes_unnamed = {n for _, n in _unnamed(manifest)}
    if dividing := sorted(sizes_unnamed - {1, world}):
        return f"process groups of {some(dividing)} ranks have no name that tells what they divide"
    if sizes_unnamed and not sizes:
        return f"no process group divides the {plural(world, 'rank')}"
    return "neither process groups nor the recording tell it"


def groups_along(manifest: RunManifest, dimension: Dimension) -> list[tuple[int, ...]]:
    """Return the groups of ranks that differ in their place along a dimension only.

    Where not all dimensions are known, these are the process groups that are named so.
    """
    told = {part.rank: part.coordinates for part in manifest.ranks}
    if dimension != "expert" and math.prod(_grid(told).values()) == _world_size(manifest):
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, each in told.items():
            others = (o.index for o in each if o.dimension in _GRID and o.dimension != dimension)
            if each:
                groups.setdefault(tuple(others), []).append(rank)
        return [tuple(ranks) for ranks in groups.values() if len(ranks) > 1]
    of_parts = (group for part in manifest.ranks for group in _groups(part))
    named = dict.fromkeys(ranks for name, ranks in of_parts if dimension_of(name) == dimension)
    return [tuple(ranks) for ranks in named]


def group_dimensions(manifest: RunManifest) -> dict[int, GroupDimensions]:
    """Return by rank which dimensions its process groups divide; empty where nothing tells any.

    Of tensor, context and expert parallelism, whose transfers are causes of their own.
    """
    along: dict[int, dict[tuple[int, ...], tuple[Dimension, ...]]] = {}
    for dimension in _OF_TRANSFERS:
        for members in (*groups_along(manifest, dimension), *_experts(manifest, dimension)):
            for rank in members:
                of_rank, key = along.setdefault(rank, {}), tuple(sorted(members))
                of_rank[key] = (*of_rank.get(key, ()), dimension)
    found = {}
    for part in manifest.ranks:
        by_name = {
            str(group.get("pg_name", "")): _of_transfers(str(group.get("pg_desc", "")))
            for group in part.process_groups
            if group.get("pg_desc") not in _UNTOLD
        }
        if part.rank in along or any(by_name.values()):
            found[part.rank] = GroupDimensions(by_name, along.get(part.rank, {}))
    return found


def _experts(manifest: RunManifest, dimension: Dimension) -> Iterator[tuple[int, ...]]:
    """Yield the groups of ranks that hold all experts: neighbours along data and context."""
    if dimension != "expert":
        return
    rows: dict[tuple[int, ...], list[tuple[tuple[int, ...], int, int]]] = {}
    for part in manifest.ranks:
        index = {one.dimension: one.index for one in part.coordinates}
        if "expert" in index:
            apart, along = (
                tuple(index.get(name, 0) for name in names)
                for names in (("pipeline", "tensor"), ("data", "context"))
            )
            rows.setdefault(apart, []).append((along, index["expert"], part.rank))
    size = max((o.size for o in _every(manifest) if o.dimension == "expert"), default=1)
    for each in rows.values():
        each.sort()
        for first in range(0, len(each) - size + 1, size):
            group = each[first : first + size]
            if [expert for _, expert, _ in group] == [*range(size)] and size > 1:
                yield tuple(rank for *_, rank in group)


_OF_TRANSFERS: tuple[Dimension, ...] = ("tensor", "context", "expert")
_UNTOLD = (None, "", "undefined", "default_pg")
"""Descriptions of groups that tell nothing."""


def _of_transfers(name: str) -> Dimension | None:
    dimension = dimension_of(name)
    return dimension if dimension in _OF_TRANSFERS else None


def _with(manifest: RunManifest, told: Told, findings: Iterable[Finding]) -> RunManifest:
    parts = [msgspec.structs.replace(part, coordinates=told[part.rank]) for part in manifest.ranks]
    known = manifest.findings
    new = [one for one in findings if one not in known]
    return msgspec.structs.replace(manifest, ranks=parts, findings=[*known, *new])


def _world_size(manifest: RunManifest) -> int | None:
    """Return the ranks of the job as recorded, None when nothing says."""
    return max((part.world_size for part in manifest.ranks if part.world_size), default=None)


def _every(manifest: RunManifest) -> Iterator[Coordinate]:
    return itertools.chain.from_iterable(part.coordinates for part in manifest.ranks)


def _told(part: RankManifest, places: Iterable[Place]) -> list[Coordinate]:
    """Return all that tells a rank's coordinates; what the user stated stands alone."""
    recorded = [one for one in part.coordinates if one.index < one.size]
    stated = [one for one in recorded if one.source.startswith(_STATED)]
    dimensions = {one.dimension for one in stated}
    found = [*recorded, *coordinates_of_names(places, "process group")]
    return merged([*stated, *(one for one in found if one.dimension not in dimensions)])


def _named(manifest: RunManifest) -> dict[int, list[Place]]:
    """Return the places of ranks in process groups whose names tell what they divide.

    A group that one rank lists tells the places of all its members.
    """
    places: dict[int, list[Place]] = {}
    seen: set[tuple[str, Members]] = set()
    for part in manifest.ranks:
        for name, members in _groups(part):
            if dimension_of(name) and (name, members) not in seen:
                seen.add((name, members))
                for index, rank in enumerate(members):
                    places.setdefault(rank, []).append(Place(name, index, len(members)))
    return places


def _unnamed(manifest: RunManifest) -> Iterator[tuple[str, int]]:
    for part in manifest.ranks:
        yield from ((name, len(of)) for name, of in _groups(part) if dimension_of(name) is None)


def _groups(part: RankManifest) -> Iterator[tuple[str, Members]]:
    """Yield the description and the members of each process group whose members are known.

    torch lists no members of groups that have all ranks.
    """
    for group in part.process_groups:
        ranks, size = group.get("ranks"), group.get("pg_size", group.get("group_size"))
        members: Members = ()
        if isinstance(ranks, list) and all(type(r) is int and 0 <= r < MOST_RANKS for r in ranks):
            members = tuple(ranks)
        if not ranks and part.world_size is not None and size == part.world_size:
            members = range(part.world_size)
        if members and size in (None, len(members)):
            yield str(group.get("pg_desc", "")), members


Found = Iterator[tuple[tuple[Dimension, ...], Finding]]
"""Dimensions to be left out, and why."""


def _several(told: Told) -> Found:
    """Find dimensions of which one rank is told two places."""
    done: set[Dimension] = set()
    for rank, each in told.items():
        for first, second in itertools.pairwise(each):
            dimension = first.dimension
            if dimension == second.dimension and dimension not in done:
                done.add(dimension)
                yield (dimension,), _contradiction(first, second, rank)


def _sizes(told: Told) -> Found:
    """Find dimensions whose size differs between ranks."""
    firsts: dict[Dimension, tuple[int, Coordinate]] = {}
    done: set[Dimension] = set()
    for rank, each in told.items():
        for one in each:
            other, first = firsts.setdefault(one.dimension, (rank, one))
            if one.size != first.size and one.dimension not in done:
                done.add(one.dimension)
                yield (
                    (one.dimension,),
                    _contradiction(first, one, rank, other),
                )


def _product(world: int | None, told: Told) -> Found:
    """Find sizes that do not multiply to the ranks of the job."""
    sizes = _grid(told)
    product = math.prod(sizes.values())
    if world is None or not sizes or product == world:
        return
    if world % product or len(sizes) == len(_GRID):
        yield _GRID, finding(_CONTRADICTION, "product", sizes=_product_words(sizes), world=world)


def _shared(world: int | None, told: Told) -> Found:
    """Find two ranks at one place of a grid that has a place for each."""
    sizes = _grid(told)
    if math.prod(sizes.values()) != world:
        return
    taken: dict[tuple[int, ...], int] = {}
    for rank, each in told.items():
        place = tuple(one.index for one in each if one.dimension in sizes)
        if len(place) == len(sizes) and taken.setdefault(place, rank) != rank:
            where = ", ".join(_words(one) for one in each if one.dimension in sizes)
            other = taken[place]
            yield _GRID, finding(_CONTRADICTION, "shared", here=rank, other=other, place=where)
            return


def _grid(told: Told) -> dict[Dimension, int]:
    """Return the sizes of the dimensions that multiply to the ranks."""
    every = itertools.chain.from_iterable(told.values())
    return {one.dimension: one.size for one in every if one.dimension in _GRID}


def _contradiction(
    first: Coordinate, second: Coordinate, here: int, other: int | None = None
) -> Finding:
    """Return the finding on two places of one rank, or on two ranks whose sizes differ."""
    return finding(
        _CONTRADICTION,
        None if other is None else "sizes",
        rank=here if other is None else None,
        dimension=first.dimension,
        first=f"{first.source} says {_words(first)}",
        second=f"{second.source} {_words(second)}",
        here=here,
        other=other,
    )


def _words(one: Coordinate) -> str:
    stages = f", stages {some([*map(str, one.stages)])}" if one.stages else ""
    return f"{one.dimension} {one.index} of {one.size}{stages}"


def _product_words(sizes: Mapping[Dimension, int]) -> str:
    return " × ".join(f"{dimension} {size}" for dimension, size in sizes.items())
