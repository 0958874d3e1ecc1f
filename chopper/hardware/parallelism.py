"""Place of this rank in the dimensions of parallelism, as the program's own objects tell it.

Device meshes, pipeline stages and the process groups of trainers are found among the objects that
Python's garbage collector tracks, and are only read: nothing is imported, wrapped or kept.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from chopper.models.layouts import Place, coordinates_of_names, merged
from chopper.storage.manifest import Coordinate

_MESH = ("torch.distributed.device_mesh", "DeviceMesh")
_STAGE = ("torch.distributed.pipelining.stage", "_PipelineStageBase")
_GROUPS: dict[tuple[str, str], dict[str, str]] = {
    ("deepspeed.runtime.pipe.topology", "PipelineParallelGrid"): {
        "pp_proc_group": "pipe",
        "dp_proc_group": "data",
        "slice_proc_group": "tensor",
    },
    ("deepspeed.utils.groups", ""): {
        "_TENSOR_MODEL_PARALLEL_GROUP": "tensor",
        "_EXPERT_PARALLEL_GROUP": "expert",
    },
    ("megatron.core.parallel_state", ""): {
        "_TENSOR_MODEL_PARALLEL_GROUP": "tensor",
        "_PIPELINE_MODEL_PARALLEL_GROUP": "pipeline",
        "_CONTEXT_PARALLEL_GROUP": "context",
        "_DATA_PARALLEL_GROUP": "data",
        "_EXPERT_MODEL_PARALLEL_GROUP": "expert",
    },
    ("nanotron.parallel.context", "ParallelContext"): {
        "tp_pg": "tensor",
        "pp_pg": "pipeline",
        "cp_pg": "context",
        "dp_pg": "data",
        "ep_pg": "expert",
    },
}
"""Classes, or modules, of trainers → their attributes that hold process groups, and what these
divide. Trainers call their groups by no name that torch knows, or did so once."""
_VIRTUAL = "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"
"""Of Megatron's module: stages of the model on one rank."""
_UNREADABLE = (AttributeError, TypeError, ValueError, IndexError, RuntimeError, AssertionError)
"""Errors of objects of another version, or that are half made."""


def coordinates(dist: Any) -> list[Coordinate]:
    """Return this rank's coordinates; two of one dimension contradict each other.

    Takes some 0.1 µs for each object of the program.

    Args:
        dist: ``torch.distributed``, with a process group.
    """
    living = _living()
    stages = [*_of_stages(living[_STAGE]), *_of_megatron(dist)]
    meshes = coordinates_of_names(_of_meshes(living[_MESH]), "device mesh")
    named: list[Coordinate] = []
    for where, attributes in _GROUPS.items():
        module, name = where
        holders = living[where] if name else filter(None, [sys.modules.get(module)])
        places = [place for holder in holders for place in _of_groups(dist, holder, attributes)]
        named += coordinates_of_names(places, f"{name or module}:")
    return merged([*meshes, *named, *stages])


def _living() -> dict[tuple[str, str], list[Any]]:
    """Return the objects of the classes that are looked for, by module and name of the class.

    Types are told by their identity: comparing them may run code of the program.
    """
    kinds: dict[int, tuple[str, str]] = {}
    for where in (_MESH, _STAGE, *_GROUPS):
        module, name = where
        found = getattr(sys.modules.get(module), name, None) if name else None
        if isinstance(found, type):
            kinds |= {id(one): where for one in _family(found)}
    living: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for one in [one for one in gc.get_objects() if id(type(one)) in kinds] if kinds else ():
        living[kinds[id(type(one))]].append(one)
    return living


def _family(cls: type) -> Iterator[type]:
    """Yield a class and all that derive from it."""
    yield cls
    derived: type
    for derived in type.__subclasses__(cls):
        yield from _family(derived)


def _of_meshes(meshes: list[Any]) -> Iterator[Place]:
    for mesh in meshes:
        with contextlib.suppress(*_UNREADABLE):
            at, names = mesh.get_coordinate(), mesh.mesh_dim_names
            if at and names and len(at) == len(names):
                sizes = [int(mesh.size(dimension)) for dimension in range(len(names))]
                yield from map(Place, map(str, names), map(int, at), sizes)


def _of_stages(stages: list[Any]) -> Iterator[Coordinate]:
    """Yield the pipelines that this rank holds stages of."""
    pipelines: dict[tuple[int, int, int], set[int]] = defaultdict(set)
    for stage in stages:
        with contextlib.suppress(*_UNREADABLE):
            key = stage.group_rank, stage.group_size, stage.num_stages
            if 0 <= stage.group_rank < stage.group_size <= stage.num_stages:
                pipelines[key].add(int(stage.stage_index))
    for (index, size, count), held in pipelines.items():
        yield Coordinate(
            dimension="pipeline",
            index=index,
            size=size,
            source="pipeline stages",
            stages=tuple(sorted(held)),
            stages_count=count,
        )


def _of_groups(dist: Any, holder: Any, attributes: dict[str, str]) -> Iterator[Place]:
    """Yield this rank's places in the process groups that an object holds."""
    for attribute, name in attributes.items():
        held = vars(holder).get(attribute)
        # DeepSpeed has a group of experts for each number of ranks that they are divided over.
        for group in held.values() if isinstance(held, dict) else [held]:
            if isinstance(group, dist.ProcessGroup):
                with contextlib.suppress(*_UNREADABLE):
                    yield Place(name, dist.get_rank(group), dist.get_world_size(group))


def _of_megatron(dist: Any) -> Iterator[Coordinate]:
    """Yield the place in Megatron's pipeline with the virtual stages that go round its ranks."""
    where = "megatron.core.parallel_state"
    module = sys.modules.get(where)
    chunks = vars(module).get(_VIRTUAL) if module is not None else None
    if isinstance(chunks, int) and chunks > 1:
        attributes = {"_PIPELINE_MODEL_PARALLEL_GROUP": "pipeline"}
        for place in _of_groups(dist, module, attributes):
            yield Coordinate(
                dimension="pipeline",
                index=place.index,
                size=place.size,
                source=where,
                stages=tuple(range(place.index, place.size * chunks, place.size)),
                stages_count=place.size * chunks,
            )
