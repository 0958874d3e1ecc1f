"""What a rank says about its cores and its device's place."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from chopper.hardware import environment
from chopper.wording import ranges


def test_sets_of_cores_are_written_as_the_kernel_does() -> None:
    assert ranges([8, 0, 1, 2, 3, 10]) == "0-3,8,10"
    assert ranges([]) == ""


def test_the_manifest_names_the_cores_that_this_process_may_use() -> None:
    told = environment.environment()
    assert told["affinity"] == ranges(os.sched_getaffinity(0))
    assert told["cores_allowed"] == str(len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), ("", None)])
def test_the_numa_node_of_a_device_is_that_of_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, node: int | None
) -> None:
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    fake = SimpleNamespace(cuda=SimpleNamespace(get_device_properties=lambda _index: properties))
    monkeypatch.setitem(sys.modules, "torch", fake)
    folder = tmp_path / "sys/bus/pci/devices/0000:c1:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(text)
    assert environment.device_numa_node("cuda:0", str(tmp_path)) == node


def test_a_device_without_an_address_has_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(cuda=SimpleNamespace(get_device_properties=lambda _index: object()))
    monkeypatch.setitem(sys.modules, "torch", fake)
    assert environment.device_numa_node("cuda:0") is None


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 0, 1, False)),
        # torchrun, accelerate, deepspeed, Ray Train; started by hand without a local rank
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (5, 1, 8, True)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 1, 2, True)),
        # no rank of any job
        ({"RANK": "5", "WORLD_SIZE": "2"}, (0, 0, 1, False)),
        ({"RANK": "0", "WORLD_SIZE": "0"}, (0, 0, 1, False)),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, (0, 0, 1, False)),
        ({"RANK": "0", "WORLD_SIZE": "²"}, (0, 0, 1, False)),
        ({"RANK": "1", "WORLD_SIZE": "two"}, (0, 0, 1, False)),
        ({"RANK": "1", "WORLD_SIZE": "9" * 5000}, (0, 0, 1, False)),
        ({"LOCAL_RANK": "-1"}, (0, 0, 1, False)),
        # Lightning's and Fabric's subprocesses, on the first node; on others nobody can say
        ({"NODE_RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}, (3, 3, 4, True)),
        ({"NODE_RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, (0, 0, 1, False)),
        # mpirun
        (
            {
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            },
            (3, 1, 4, True),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}, (1, 0, 2, True)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, (0, 0, 1, False)),
        # srun; a script of sbatch has the job's variables, but is no task of a step
        (
            {"SLURM_PROCID": "6", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "2"},
            (6, 2, 8, True),
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"},
            (0, 0, 1, False),
        ),
    ],
)
def test_ranks_as_launchers_say_them(
    variables: dict[str, str], expected: tuple[int, int, int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*os.environ]:
        if name.startswith(
            ("RANK", "WORLD_", "LOCAL_", "NODE_", "OMPI_", "PMI_", "MPI_", "SLURM_")
        ):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    info = environment.rank_info()
    assert (info.rank, info.local_rank, info.world_size, info.known) == expected
    # Said in a finding, where the launcher claims that there is a rank.
    assert (info.ignored is not None) == (not info.known and "RANK" in variables)
