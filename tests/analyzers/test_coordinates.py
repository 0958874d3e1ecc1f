"""Each rank's place in the dimensions of parallelism, from what programs call their groups."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from chopper import pipeline
from chopper.analyzers.coordinates import groups_along, why_unknown, with_coordinates
from chopper.errors import UsageError
from chopper.models.layouts import parse_layout
from chopper.storage.manifest import Coordinate, RankManifest, RunManifest

Group = tuple[str, tuple[int, ...]]


def listed(groups: list[Group], world: int, *, ranks: list[int] | None = None) -> RunManifest:
    """A run whose ranks list the groups that they are in, as torch does: of all without members."""
    parts = []
    for rank in range(world) if ranks is None else ranks:
        mine = [
            {
                "pg_name": str(number),
                "pg_desc": name,
                "ranks": [] if len(members) == world else list(members),
                "group_size": len(members),
            }
            for number, (name, members) in enumerate(groups)
            if rank in members
        ]
        parts.append(RankManifest(rank=rank, world_size=world, process_groups=mine))
    return RunManifest(kind="imported", name="made", ranks=parts)


def along(sizes: dict[str, int], *names: str) -> list[tuple[int, ...]]:
    """The groups of ranks that differ in these dimensions only; the first varies fastest."""
    grid: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(sizes.values())):
        rest, others = rank, []
        for name, size in sizes.items():
            rest, index = divmod(rest, size)
            others += [] if name in names else [index]
        grid.setdefault(tuple(others), []).append(rank)
    return [tuple(ranks) for ranks in grid.values()]


def megatron(tp: int, cp: int, dp: int, pp: int, ep: int) -> list[Group]:
    """The groups of Megatron-LM's parallel_state, in its default order tp-cp-ep-dp-pp."""
    sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
    experts = {"tp": tp, "ep": ep, "edp": cp * dp // ep, "pp": pp}
    named = [
        ("DATA_PARALLEL_GROUP_WITH_CP", along(sizes, "dp", "cp")),
        ("DATA_PARALLEL_GROUP_GLOO", along(sizes, "dp")),
        ("DATA_PARALLEL_GROUP", along(sizes, "dp")),
        ("CONTEXT_PARALLEL_GROUP", along(sizes, "cp")),
        ("MODEL_PARALLEL_GROUP", along(sizes, "tp", "pp")),
        ("TENSOR_MODEL_PARALLEL_GROUP", along(sizes, "tp")),
        ("PIPELINE_MODEL_PARALLEL_GROUP", along(sizes, "pp")),
        ("TENSOR_AND_DATA_PARALLEL_GROUP", along(sizes, "tp", "dp")),
        ("EXPERT_MODEL_PARALLEL_GROUP", along(experts, "ep")),
        ("EXPERT_DATA_PARALLEL_GROUP", along(experts, "edp")),
        ("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", along(experts, "tp", "ep")),
    ]
    named += [("EMBEDDING_GROUP", [(of[0], of[-1]) for of in along(sizes, "pp")])]
    return [(name, ranks) for name, groups in named for ranks in groups]


def mesh(sizes: dict[str, int], **flattened: tuple[str, ...]) -> list[Group]:
    """The groups of a torch device mesh, its last dimension varying fastest, and of flat ones.

    A dimension with all ranks uses the default group, which says nothing.
    """
    dimensions = dict(reversed(sizes.items()))
    world = math.prod(sizes.values())
    named = {name: (name,) for name in sizes} | flattened
    groups = [(f"mesh_{n}", ranks) for n, of in named.items() for ranks in along(dimensions, *of)]
    return [("default_pg", tuple(range(world))), *(g for g in groups if len(g[1]) < world)]


def places(manifest: RunManifest) -> dict[int, dict[str, tuple[int, int]]]:
    return {
        part.rank: {one.dimension: (one.index, one.size) for one in part.coordinates}
        for part in manifest.ranks
    }


def as_stated(text: str, world: int) -> dict[int, dict[str, tuple[int, int]]]:
    layout = parse_layout(text)
    return {
        rank: {one.dimension: (one.index, one.size) for one in layout.coordinates(rank, "")}
        for rank in range(world)
    }


def codes(manifest: RunManifest) -> list[str]:
    return [one.code for one in manifest.findings]


@pytest.mark.parametrize(
    "sizes", [(2, 2, 2, 2, 2), (4, 1, 4, 4, 2), (1, 2, 4, 1, 8), (1, 1, 4, 1, 1)]
)
def test_megatrons_groups_tell_every_dimension(sizes: tuple[int, int, int, int, int]) -> None:
    tp, cp, dp, pp, ep = sizes
    world = tp * cp * dp * pp
    found = with_coordinates(listed(megatron(*sizes), world))
    assert found.findings == []
    stated = f"tp={tp},cp={cp},dp={dp},pp={pp},ep={ep}"
    assert places(found) == as_stated(stated, world)
    source = {one.dimension: one.source for one in found.ranks[-1].coordinates}["tensor"]
    assert source == "process group TENSOR_MODEL_PARALLEL_GROUP"


def test_one_rank_of_a_job_knows_its_place() -> None:
    found = with_coordinates(listed(megatron(2, 1, 2, 2, 1), 8, ranks=[5]))
    (part,) = found.ranks
    assert part.name == "5 (pipeline 1, data 0, tensor 1)"
    assert places(found)[5] == as_stated("tp=2,cp=1,dp=2,pp=2,ep=1", 8)[5]


def test_torchtitans_meshes_tell_data_as_a_whole_or_by_its_parts() -> None:
    sizes = {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2}
    flat = {"dp": ("dp_replicate", "dp_shard"), "dp_shard_cp": ("dp_shard", "cp")}
    expected = as_stated("tp=2,cp=2,dp=4,pp=2", 32)
    for flattened in (flat, {}):
        found = with_coordinates(listed(mesh(sizes, **flattened), 32))
        assert found.findings == []
        assert places(found) == expected


@pytest.mark.parametrize(
    ("sizes", "data"),
    [
        ({"dp_replicate": 2, "dp_shard": 4}, "dp=8"),  # HSDP: the flat one has all ranks
        ({"replicate": 2, "shard": 2}, "dp=4"),
        ({"ddp": 2, "fsdp": 2, "tp": 2}, "tp=2,dp=4"),
        ({"data_parallel": 2, "tensor_parallel": 2}, "tp=2,dp=2"),
        ({"dp_replicate": 2, "dp_shard_mod_ep": 2, "dp_shard_in_ep": 2}, "dp=8"),
        ({"pp": 2, "fsdp": 2, "tp": 2}, "tp=2,dp=2,pp=2"),
    ],
)
def test_meshes_of_other_programs(sizes: dict[str, int], data: str) -> None:
    world = math.prod(sizes.values())
    found = with_coordinates(listed(mesh(sizes), world))
    assert places(found) == as_stated(data, world)


@pytest.mark.parametrize(
    ("sizes", "known"),
    [
        # What shards over context parallelism, too, is no place in data parallelism.
        ({"fsdp": 4, "cp": 2}, {"context"}),
        ({"dp_shard_in_ep": 2, "ep": 2}, {"expert"}),
        ({"x": 2, "y": 2}, set()),
        ({"dim_0": 2, "dim_1": 2}, set()),
    ],
)
def test_names_that_tell_nothing_for_certain(sizes: dict[str, int], known: set[str]) -> None:
    found = with_coordinates(listed(mesh(sizes), math.prod(sizes.values())))
    assert {name for of in places(found).values() for name in of} == known
    assert found.findings == []


def test_groups_without_names_tell_nothing_and_say_so() -> None:
    # DeepSpeed and nanotron make groups by new_group alone, as the grid of a pipeline.
    sizes = {"data": 2, "pipe": 2}
    groups = [("undefined", of) for name in sizes for of in along(sizes, name)]
    found = with_coordinates(listed(groups, 4))
    assert not any(places(found).values())
    assert why_unknown(found, "pipeline") == (
        "process groups of 2 ranks have no name that tells what they divide"
    )


def test_why_a_dimension_is_unknown() -> None:
    whole = with_coordinates(listed(mesh({"dp": 2, "tp": 2}), 4))
    assert why_unknown(whole, "pipeline") == "data 2 × tensor 2 are all 4 ranks"
    assert why_unknown(whole, "expert") == "neither process groups nor the recording tell it"
    assert why_unknown(listed([], 1), "data") == "the run has one rank"
    everyone = with_coordinates(listed([("default_pg", (0, 1))], 2))
    assert why_unknown(everyone, "data") == "no process group divides the 2 ranks"


REAL = {
    "hta/a100-ddp-rank0of2-nccl-metadata.json.gz": "no process group divides the 2 ranks",
    "hta/cpu-only-gloo-rank34of300.json.gz": "no process group divides the 300 ranks",
    "tracelens/mi300x-resnet-train-rank0of8-act-checkpoint.json.gz": (
        "no process group divides the 8 ranks"
    ),
    "hta/a100-recsys-rank3of8.json.gz": "neither process groups nor the recording tell it",
    "tracelens/mi300x-vllm-graph-capture.json.gz": "the run has one rank",
}
"""Recorded traces of several programs, none of which named what its groups divide."""


@pytest.mark.parametrize("name", REAL)
def test_recorded_traces_tell_no_more_than_they_say(traces_dir: Path, name: str) -> None:
    manifest = pipeline.read(traces_dir / name).manifest
    assert not any(part.coordinates for part in manifest.ranks)
    assert why_unknown(manifest, "data") == REAL[name]


def coordinate(dimension: Any, index: int, size: int, **more: Any) -> Coordinate:
    return Coordinate(dimension=dimension, index=index, size=size, source="the hook", **more)


def test_what_was_recorded_joins_the_groups() -> None:
    manifest = listed(mesh({"pp": 2, "tp": 2}), 4)
    for part in manifest.ranks:
        stages = (part.rank // 2, part.rank // 2 + 2)
        part.coordinates = [
            coordinate("pipeline", part.rank // 2, 2, stages=stages, stages_count=4)
        ]
    found = with_coordinates(manifest)
    assert places(found) == as_stated("tp=2,pp=2", 4)
    assert found.ranks[3].coordinates[0].stages == (1, 3)


def test_a_place_beyond_its_dimension_is_none() -> None:
    manifest = listed([], 4)
    manifest.ranks[0].coordinates = [coordinate("tensor", 2, 2)]
    assert not any(places(with_coordinates(manifest)).values())


def test_two_places_of_one_rank_are_a_finding() -> None:
    manifest = listed([*mesh({"pp": 2, "tp": 2}), ("TENSOR_MODEL_PARALLEL_GROUP", (0, 2))], 4)
    found = with_coordinates(manifest)
    assert {name for of in places(found).values() for name in of} == {"pipeline"}
    (said,) = found.findings
    assert (said.code, said.rank) == ("layout.contradiction", 2)
    assert said.message == (
        "tensor parallelism is left out: process group TENSOR_MODEL_PARALLEL_GROUP says tensor 1 "
        "of 2, process group mesh_tp tensor 0 of 2; name the layout with --layout"
    )
    assert why_unknown(found, "tensor") == said.message


def test_sizes_that_differ_between_ranks_are_a_finding() -> None:
    found = with_coordinates(listed([("tp", (0, 1)), ("tp", (2, 3, 4, 5))], 6))
    assert not any(places(found).values())
    assert "tensor 0 of 2 of rank 0, process group tp tensor 0 of 4 of rank 2" in (
        found.findings[0].message
    )


@pytest.mark.parametrize(
    ("groups", "world", "message"),
    [
        ([("tp", (0, 1, 2))], 4, "tensor 3 do not multiply to the 4 ranks of the job"),
        (
            [("tp", (0, 1)), ("tp", (2, 3)), ("dp", (0, 1)), ("dp", (2, 3))],
            4,
            "ranks 0 and 2 have the same place (data 0 of 2, tensor 0 of 2)",
        ),
    ],
)
def test_sizes_that_fit_no_grid_are_a_finding(
    groups: list[Group], world: int, message: str
) -> None:
    found = with_coordinates(listed(groups, world))
    assert codes(found) == ["layout.contradiction"]
    assert message in found.findings[0].message
    assert not any(places(found).values())


def test_a_stated_layout_counts_and_says_what_it_contradicts() -> None:
    manifest = listed(mesh({"dp": 2, "tp": 2}), 4)
    agrees = with_coordinates(manifest, "tp=2,dp=2,ep=2")
    assert agrees.findings == []
    assert places(agrees) == as_stated("tp=2,dp=2,ep=2", 4)
    assert agrees.ranks[0].coordinates[0].source == "named by the user: tp=2,dp=2,ep=2"
    other = with_coordinates(manifest, "dp=2,tp=2")
    assert places(other) == as_stated("dp=2,tp=2", 4)
    assert codes(other) == ["layout.contradicted"] * 2
    assert other.findings[0].message == (
        "the named layout says data 1 of 2, but process group mesh_dp says data 0 of 2: the layout "
        "counts"
    )
    # Kept in a run that was imported with it; the next user may know better.
    assert with_coordinates(other) == other
    assert places(with_coordinates(other, "tp=2,dp=2")) == as_stated("tp=2,dp=2", 4)
    assert with_coordinates(other, "tp=2,dp=2").findings == []


def test_a_layout_of_a_job_that_is_known_in_part() -> None:
    parts = [RankManifest(rank=rank) for rank in (0, 4, 12)]
    sparse = RunManifest(kind="imported", name="made", ranks=parts)
    found = with_coordinates(sparse, "tp=4,pp=4,vp=2")
    assert [part.name for part in found.ranks] == [
        f"{rank} (pipeline {rank // 4}, tensor 0)" for rank in (0, 4, 12)
    ]
    assert found.ranks[1].coordinates[0].stages == (1, 5)
    assert found.ranks[1].coordinates[0].stages_count == 8
    with pytest.raises(UsageError, match="multiply to 8, expected 13 or more, one for each rank"):
        with_coordinates(sparse, "tp=4,pp=2")
    with pytest.raises(UsageError, match=r"its sizes multiply to 8, expected 4$"):
        with_coordinates(listed([], 4), "tp=4,pp=2")


def test_ranks_along_a_dimension() -> None:
    grid = with_coordinates(listed(mesh({"dp": 2, "tp": 2}), 4))
    assert groups_along(grid, "tensor") == [(0, 1), (2, 3)]
    assert groups_along(grid, "data") == [(0, 2), (1, 3)]
    stated = with_coordinates(listed([], 4), "dp=2,tp=2")
    assert groups_along(stated, "tensor") == [(0, 2), (1, 3)]
    some = with_coordinates(listed([("tp", (0, 1)), ("tp", (2, 3))], 8))
    assert groups_along(some, "tensor") == [(0, 1), (2, 3)]


def test_every_rank_of_a_layout_has_a_place_of_its_own() -> None:
    for order in itertools.permutations(("tp=2", "cp=3", "dp=2", "pp=2")):
        every = as_stated(",".join(order), 24).values()
        assert len({tuple(sorted(of.items())) for of in every}) == 24


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=4,pp", "'pp' is no size; write tp=4,pp=4,dp=4"),
        ("tp=0", "'tp=0' is no size"),
        ("", "'' is no size"),
        ("tp=2²", "is no size"),
        ("tp=99999999999", "is no size"),
        ("xp=2", "no dimension is called 'xp'"),
        ("tp=2,tensor=2", "tp is named twice"),
        ("ep=2", "names no dimension of the ranks"),
        ("tp=2,dp=4,ep=3", "ep=3 does not divide dp × cp = 4"),
        ("tp=4,vp=2", "vp=2 needs a pipeline of two ranks or more"),
        ("tp=1048576,dp=2", "more than 1048576 ranks or stages"),
    ],
)
def test_what_is_no_layout(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_layout(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
