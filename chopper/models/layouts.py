"""Layouts: how a training is divided over its ranks, by names of its groups or as the user says."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from chopper.errors import UsageError
from chopper.quantities import digits, one_of
from chopper.storage.manifest import DIMENSIONS, Coordinate, Dimension
from chopper.tables.ranges import MOST_RANKS

_OF_PARTS: tuple[tuple[Dimension, str, str], ...] = (
    ("tensor", "", "tp tensor tensor_parallel tensor_model_parallel_group"),
    ("pipeline", "", "pp pipe pipeline pipeline_parallel pipeline_model_parallel_group"),
    ("context", "", "cp sp context context_parallel sequence_parallel context_parallel_group"),
    ("expert", "", "ep expert expert_parallel expert_model_parallel_group"),
    ("data", "", "dp data data_parallel batch data_parallel_group"),
    ("data", "outer", "dp_replicate replicate ddp"),
    ("data", "inner", "dp_shard shard"),
    # These shard over context parallelism as well, where there is any.
    ("data", "mixed", "fsdp dp_shard_cp"),
    ("data", "around_experts", "dp_shard_mod_ep"),
    ("data", "within_experts", "dp_shard_in_ep"),
)
_NAMES = {name: (dimension, part) for dimension, part, names in _OF_PARTS for name in names.split()}
"""Names of groups and mesh dimensions → what they divide.

From the sources of torchtitan (``parallel_dims.py``), Megatron-LM (``parallel_state.py``),
DeepSpeed, Lightning, Accelerate, Transformers and the examples of torch. ``data`` may be a product
of parts.
"""


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place in a group, or along a dimension of a mesh.

    ``name`` is of the group or dimension; torch's group of a mesh dimension is ``mesh_`` and its
    name.
    """

    name: str
    index: int
    size: int


def dimension_of(name: str) -> Dimension | None:
    """Return what a group or mesh dimension divides, or a part of it; None for no such name."""
    known = _NAMES.get(_plain(name))
    return known and known[0]


@dataclass(frozen=True, slots=True)
class GroupDimensions:
    """Dimensions that the process groups of a rank divide, as far as they are known.

    Attributes:
        by_name: of groups with a telling name; None for one that divides no single dimension.
        by_members: of the groups of ranks that differ in one dimension only.
    """

    by_name: Mapping[str, Dimension | None]
    by_members: Mapping[tuple[int, ...], tuple[Dimension, ...]]

    def of(self, name: str | None, members: tuple[int, ...], *, to_all: bool) -> Dimension | None:
        """Return the dimension that a group divides; None where that is not known.

        Args:
            name: of the group.
            members: its ranks, in order.
            to_all: of an all-to-all: where experts lie across other dimensions, their tokens'.
        """
        if name is not None and name in self.by_name:
            return self.by_name[name]
        along = self.by_members.get(members, ())
        return next((one for one in along if to_all or one != "expert"), None)


def _plain(name: str) -> str:
    return name.lower().removeprefix("mesh_")


def coordinates_of_names(places: Iterable[Place], source: str) -> list[Coordinate]:
    """Return a rank's coordinates, as far as names of groups or mesh dimensions tell them.

    Several of one dimension contradict each other.

    Args:
        places: of one rank.
        source: kind of what is named: ``device mesh``.
    """
    parts: dict[tuple[Dimension, str], dict[tuple[int, int], str]] = {}
    for place in places:
        known = _NAMES.get(_plain(place.name))
        if known is not None and 0 <= place.index < place.size <= MOST_RANKS:
            parts.setdefault(known, {}).setdefault((place.index, place.size), place.name)
    found = [
        Coordinate(dimension=dimension, index=index, size=size, source=f"{source} {name}")
        for (dimension, part), each in parts.items()
        if not part
        for (index, size), name in each.items()
    ]
    if ("data", "") not in parts:
        found += _data_of_parts(parts, source)
    return found


def _data_of_parts(
    parts: dict[tuple[Dimension, str], dict[tuple[int, int], str]], source: str
) -> list[Coordinate]:
    """Return the place in data parallelism as a product of its parts, the outer one first."""
    every = {part for dimension, part in parts if dimension == "data"}
    inner: list[str] = [
        part for part in ("inner", "around_experts", "within_experts") if part in every
    ]
    if inner == ["within_experts"]:
        return []  # in some versions of torchtitan it is what shards the experts
    if not inner and "mixed" in every:
        if ("context", "") in parts:
            return []
        inner = ["mixed"]
    chosen = [part for part in ("outer", *inner) if part in every]
    found = []
    each = [parts["data", part].items() for part in chosen]
    for factors in itertools.product(*each) if chosen else ():
        index, size = 0, 1
        for (inner_index, inner_size), _ in factors:
            index, size = index * inner_size + inner_index, size * inner_size
        names = " × ".join(name for _, name in factors)
        found.append(
            Coordinate(dimension="data", index=index, size=size, source=f"{source} {names}")
        )
    return found


def merged(coordinates: Iterable[Coordinate]) -> list[Coordinate]:
    """Return coordinates in the order of dimensions, those that agree as one.

    The first source is kept, with the stages that any of them says.
    """
    kept: list[Coordinate] = []
    for one in coordinates:
        at = next((i for i, first in enumerate(kept) if _agree(first, one)), None)
        if at is None:
            kept.append(one)
        elif not kept[at].stages:
            stages = {"stages": one.stages, "stages_count": one.stages_count}
            kept[at] = msgspec.structs.replace(kept[at], **stages)
    return sorted(kept, key=lambda one: DIMENSIONS.index(one.dimension))


def _agree(a: Coordinate, b: Coordinate) -> bool:
    stages = not a.stages or not b.stages or a.stages == b.stages
    return stages and (a.dimension, a.index, a.size) == (b.dimension, b.index, b.size)


_SHORT: dict[str, Dimension] = {
    "tp": "tensor",
    "cp": "context",
    "dp": "data",
    "pp": "pipeline",
    "ep": "expert",
}
_VIRTUAL = "vp"
_EXAMPLE = "tp=4,pp=4,dp=4"


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of the dimensions of a job, the one that varies fastest first."""

    text: str
    sizes: tuple[tuple[Dimension, int], ...]
    """Of the dimensions that multiply to the number of ranks."""
    experts: int | None = None
    """Ranks that the experts of a layer are divided over; None where not stated."""
    virtual: int | None = None
    """Stages of the model on one rank; None where not stated."""

    @property
    def ranks_count(self) -> int:
        """Ranks of the job."""
        return math.prod(size for _, size in self.sizes)

    def coordinates(self, rank: int, source: str) -> list[Coordinate]:
        """Return the coordinates of a rank of the job.

        Experts are divided over consecutive places of data and context parallelism together.
        Virtual stages go round the ranks of a pipeline, as Megatron's interleaved schedule has it.
        """
        found, rest = [], rank
        shared, stride = 0, 1
        for dimension, size in self.sizes:
            rest, index = divmod(rest, size)
            stages: tuple[int, ...] = ()
            if dimension == "pipeline" and self.virtual:
                stages = tuple(index + size * chunk for chunk in range(self.virtual))
            if dimension in ("data", "context"):
                shared, stride = shared + index * stride, stride * size
            found.append(
                Coordinate(
                    dimension=dimension,
                    index=index,
                    size=size,
                    source=source,
                    stages=stages,
                    stages_count=size * len(stages) or None,
                )
            )
        if self.experts:
            expert = Coordinate(
                dimension="expert", index=shared % self.experts, size=self.experts, source=source
            )
            found.append(expert)
        return merged(found)


def parse_layout(text: str, name: str = "--layout") -> Layout:
    """Read a layout: ``tp=4,pp=4,dp=4``, the first varying fastest from rank to rank.

    Raises:
        UsageError: a dimension is unknown, named twice or without a size, or sizes do not fit.
    """
    sizes: dict[str, int] = {}
    for item in text.split(","):
        key, equals, number = (part.strip() for part in item.partition("="))
        size = digits(number)
        if not equals or size is None or not 0 < size <= MOST_RANKS:
            raise UsageError(f"{name} {text!r}: {item.strip()!r} is no size; write {_EXAMPLE}")
        long: dict[str, str] = {dimension: short for short, dimension in _SHORT.items()}
        short = long.get(key) or one_of("dimension", key, [*_SHORT, _VIRTUAL])
        if short in sizes:
            raise UsageError(f"{name} {text!r}: {short} is named twice; name each dimension once")
        sizes[short] = size
    experts, virtual = sizes.pop("ep", None), sizes.pop(_VIRTUAL, None)
    if not sizes:
        raise UsageError(f"{name} {text!r}: names no dimension of the ranks; write {_EXAMPLE}")
    if (shared := sizes.get("dp", 1) * sizes.get("cp", 1)) % (experts or 1):
        raise UsageError(f"{name} {text!r}: ep={experts} does not divide dp × cp = {shared}")
    if virtual and sizes.get("pp", 1) == 1:
        raise UsageError(f"{name} {text!r}: vp={virtual} needs a pipeline of two ranks or more")
    layout = Layout(
        text=text,
        sizes=tuple((_SHORT[short], size) for short, size in sizes.items()),
        experts=experts,
        virtual=virtual,
    )
    if layout.ranks_count * (virtual or 1) > MOST_RANKS:
        raise UsageError(f"{name} {text!r}: more than {MOST_RANKS} ranks or stages; specify less")
    return layout
