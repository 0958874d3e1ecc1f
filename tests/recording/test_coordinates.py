"""The places of ranks that a recording takes from the program's own objects."""

from __future__ import annotations

import gc
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from chopper import pipeline
from chopper.hardware import parallelism
from tests.recording.test_record_command import Recorder, record

__all__ = ["record"]

pytestmark = pytest.mark.slow

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
TORCHRUN += ["--rdzv-endpoint", "127.0.0.1:0", "--nproc-per-node"]

MESH = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
line = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(7):
    model(torch.ones(4, 8)).sum().backward()
    dist.all_reduce(model.weight.grad, group=mesh["dp"].get_group())
    optimizer.step()
dist.destroy_process_group()
"""

STAGES = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

dist.init_process_group("gloo")
rank = dist.get_rank()
layers = [torch.nn.Linear(8, 8) for _ in range(2)]
stages = [
    PipelineStage(layer, rank + 2 * i, 4, torch.device("cpu")) for i, layer in enumerate(layers)
]
schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=lambda y, t: (y - t).square().mean())
optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
for _ in range(7):
    if rank == 0:
        schedule.step(torch.ones(4, 8))
    else:
        schedule.step(target=torch.zeros(4, 8), losses=[])
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def told(record: Recorder) -> dict[int, list[tuple[Any, ...]]]:
    """As recorded: dimension, index, size, stages and their number."""
    return {
        part.rank: [
            (c.dimension, c.index, c.size, c.stages, c.stages_count) for c in part.coordinates
        ]
        for part in record.run().manifest.ranks
    }


@pytest.mark.long
def test_device_meshes_tell_places_also_where_a_dimension_has_all_ranks(record: Recorder) -> None:
    done = record(*TORCHRUN, "4", record.script(MESH, begin=""))
    assert done.returncode == 0, done.stderr
    assert told(record) == {
        rank: [
            ("data", rank // 2, 2, (), None),
            ("expert", rank, 4, (), None),
            ("tensor", rank % 2, 2, (), None),
        ]
        for rank in range(4)
    }
    run = pipeline.read(record.directory / "run")
    assert run.manifest.findings == []
    assert run.part(3).name == "3 (data 1, expert 3, tensor 1)"
    assert [c.source for c in run.part(3).coordinates] == [
        f"device mesh {n}" for n in ("dp", "ep", "tp")
    ]


def test_stages_of_a_pipeline_tell_virtual_ones(record: Recorder) -> None:
    done = record(*TORCHRUN, "2", record.script(STAGES, begin=""))
    assert done.returncode == 0, done.stderr
    assert told(record) == {rank: [("pipeline", rank, 2, (rank, rank + 2), 4)] for rank in range(2)}


class Group(SimpleNamespace):
    """Stands for a process group of a trainer that is not installed here."""


def test_groups_of_trainers_are_named_by_who_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class ParallelContext:
        def __init__(self) -> None:
            self.tp_pg, self.pp_pg = Group(rank=1, size=2), Group(rank=2, size=4)
            self.mp_pg = Group(rank=0, size=8)

    nanotron, megatron = ModuleType("context"), ModuleType("parallel_state")
    nanotron.ParallelContext = ParallelContext  # type: ignore[attr-defined]
    vars(megatron).update(
        _PIPELINE_MODEL_PARALLEL_GROUP=Group(rank=2, size=4),
        _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE=2,
        _CONTEXT_PARALLEL_GROUP=None,
    )
    monkeypatch.setitem(sys.modules, "nanotron.parallel.context", nanotron)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", megatron)
    dist = SimpleNamespace(
        ProcessGroup=Group, get_rank=lambda g: g.rank, get_world_size=lambda g: g.size
    )
    held = ParallelContext()
    found = parallelism.coordinates(dist)
    del held
    assert [(c.dimension, c.index, c.size, c.stages) for c in found] == [
        ("pipeline", 2, 4, (2, 6)),
        ("tensor", 1, 2, ()),
    ]


def test_looking_takes_little_for_each_object_of_the_program() -> None:
    objects: list[list[int]] = [[] for _ in range(300_000)]
    gc.collect()
    dist = SimpleNamespace(ProcessGroup=Group)
    import torch.distributed.device_mesh  # noqa: F401

    began_s = time.process_time()
    parallelism.coordinates(dist)
    # A tenth of a microsecond each; a machine that is ten times as slow still passes.
    assert time.process_time() - began_s < 1e-6 * len(objects) + 0.5
