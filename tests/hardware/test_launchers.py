"""A rank's place and job, as launchers say them."""

from __future__ import annotations

import os

import pytest

from chopper.hardware import launchers

LAUNCHERS = "RANK WORLD_ LOCAL_ NODE_ GROUP_ OMPI_ PMI MPI_ SLURM_ MV2_ FLUX_ JOB_ MASTER_ PET_"
PREFIXES = tuple(LAUNCHERS.split())


def set_only(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    """Have the environment hold no launcher's variables but these."""
    for name in [*os.environ]:
        if name.startswith(PREFIXES):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


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
    set_only(monkeypatch, variables)
    info = launchers.rank_info()
    assert (info.rank, info.local_rank, info.world_size, info.known) == expected
    # Said in a finding, where the launcher claims that there is a rank.
    assert (info.ignored is not None) == (not info.known and "RANK" in variables)


SLURM = {"SLURM_PROCID": "6", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "2"}
SLURM |= {"SLURM_NODEID": "1", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "n@1"}
PODS = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("variables", "rank", "node", "job"),
    [
        ({"RANK": "5", "WORLD_SIZE": "8", "GROUP_RANK": "1", "MASTER_PORT": "9"}, 5, 1, "port 9"),
        ({"RANK": "5", "WORLD_SIZE": "8", "NODE_RANK": "1"}, 5, 1, None),  # Ray Train
        (SLURM, 6, 1, "job 77.3"),
        # srun's own PMI counts as it does; mpirun's helpers are started by srun, one on each node
        (SLURM | {"PMI_RANK": "6", "PMI_SIZE": "8"}, 6, 1, "job 77.3"),
        (SLURM | {"PMI_RANK": "2", "PMI_SIZE": "64"}, 2, None, None),
        (OPEN_MPI, 3, None, "job n@1"),
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_JOB_ID": "f1"}, 1, None, "job f1"),
        (PODS, 2, 2, None),
        ({"JOB_COMPLETION_INDEX": "2"}, 0, None, None),  # of one experiment each
        ({}, 0, None, None),
    ],
)
def test_nodes_and_jobs_as_launchers_name_them(
    variables: dict[str, str],
    rank: int,
    node: int | None,
    job: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_only(monkeypatch, variables)
    info = launchers.rank_info()
    assert (info.rank, info.node, launchers.job_name()) == (rank, node, job)


def test_a_pod_is_the_only_rank_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, PODS)
    assert launchers.rank_info().local_rank == 0


TORCHRUN = ["torchrun", "--nnodes=2", "--rdzv-endpoint", "a:1", "--rdzv_id=x", "train.py"]


@pytest.mark.parametrize(
    ("variables", "command", "job"),
    [
        ({}, TORCHRUN, "rdzv_id x, rdzv_endpoint a:1"),
        ({}, ["torchrun", "--nnodes", "2", "--master-addr", "a"], "master_addr a"),
        ({"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "a:1"}, ["torchrun"], "rdzv_endpoint a:1"),
        ({}, ["torchrun", "--rdzv-endpoint", "a:1"], None),
        ({}, ["torchrun", "--nnodes", "1:1", "--rdzv-endpoint", "a:1"], None),
        ({}, ["torchrun", "--nnodes"], None),
        (SLURM, ["python", "train.py"], "job 77.3"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, [], "port 1 a"),
        ({"MASTER_PORT": "1"}, ["python", "train.py"], None),
    ],
)
def test_recorders_of_one_job_know_each_other(
    variables: dict[str, str], command: list[str], job: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_only(monkeypatch, variables)
    assert launchers.recorders_job(command) == job
