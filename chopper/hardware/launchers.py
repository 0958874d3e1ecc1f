"""Rank, number of ranks, node and job of this process, as its launcher's environment says them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from chopper.quantities import digits


class Launcher(NamedTuple):
    """Names of the variables by which a launcher tells a process its place."""

    rank: str
    world_size: str
    local_rank: str | None = None
    node: str | None = None
    job: tuple[str, ...] = ()
    """Together they name what was launched, the same on all nodes and for no other job."""


# torchrun and what starts by its rules: accelerate, deepspeed, Ray Train, Kubernetes' operators.
_TORCHRUN = Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")
# Lightning and Fabric count within a node; on further nodes the process group will tell.
_LIGHTNING = Launcher("LOCAL_RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK")
_OTHERS = (
    # Open MPI, which passes on the name that PMIx gives the job.
    Launcher(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        job=("PMIX_NAMESPACE",),
    ),
    Launcher("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    # MPICH, Intel MPI; before Slurm, whose tasks are their helpers of each node, not the ranks.
    Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    # SLURM_NTASKS counts the tasks of the job; within a step of it, this counts the step's.
    Launcher(
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
    Launcher("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", job=("FLUX_JOB_ID",)),
    # An indexed job of Kubernetes, one process in each pod; its manifest sets the number of pods.
    Launcher("JOB_COMPLETION_INDEX", "WORLD_SIZE", node="JOB_COMPLETION_INDEX"),
)
_RENDEZVOUS = (
    *("rdzv_id", "rdzv_endpoint", "master_addr", "master_port"),  # torchrun
    *("main_process_ip", "main_process_port"),  # accelerate
)
_NODES = ("nnodes", "num_machines")


@dataclass(frozen=True, slots=True)
class LaunchEnvironment:
    """Place of this process among the ranks."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    known: bool = True
    """False when this process may yet become another rank (no RANK, no process group so far)."""
    ignored: str | None = None
    """The launcher's variables with their values, where they name no rank."""
    node: int | None = None
    """Number of this process's node in the job; None where the launcher does not say."""


def environment_count(name: str | None) -> int | None:
    """The number, 0 or more, that a variable of the environment holds; None for anything else."""
    return digits(os.environ.get(name or "", "").strip())


def process_group() -> Any:
    """torch.distributed when the program has loaded it and joined a group, else None."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist
    return None


def _launchers() -> list[Launcher]:
    """Return the launcher that started this process as a rank, and others that say the same."""
    several = [one for one in _OTHERS if (environment_count(one.world_size) or 0) > 1]
    several = [one for one in several if environment_count(one.rank) is not None]
    if environment_count(_TORCHRUN.rank) is not None:
        first = _TORCHRUN
    elif environment_count(_LIGHTNING.rank) is not None and environment_count("WORLD_SIZE"):
        if environment_count(_LIGHTNING.node) != 0:
            return []
        first = _LIGHTNING
    elif several:
        first = several[0]
    else:
        return []
    return [
        first,
        *(one for one in several if one is not first and _number(one) == _number(first)),
    ]


def _number(launcher: Launcher) -> tuple[int | None, int | None]:
    return environment_count(launcher.rank), environment_count(launcher.world_size)


def _nonsense(rank: int | None, world_size: int | None) -> str | None:
    """The variables of torchrun's kind as they are set, where they contradict themselves."""
    names = (_TORCHRUN.rank, _TORCHRUN.world_size, str(_TORCHRUN.local_rank))
    named = {name: value for name in names if (value := os.environ.get(name))}
    unreadable = "RANK" in named and any(environment_count(name) is None for name in named)
    if unreadable or (rank is not None and world_size is not None and rank >= world_size):
        return " ".join(f"{name}={value!r}" for name, value in named.items())
    return None


def rank_info() -> LaunchEnvironment:
    """Read the rank from torch.distributed when initialized, else from the launcher's variables."""
    launchers = _launchers() or [Launcher("", "")]
    (rank, world_size), local_rank = (
        _number(launchers[0]),
        environment_count(launchers[0].local_rank),
    )
    if rank is not None and launchers[0].local_rank is None:
        local_rank = 0
    named = [environment_count(name) for name in (*(one.node for one in launchers), "NODE_RANK")]
    node = next((number for number in named if number is not None), None)
    dist = process_group()
    if dist is not None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
    elif ignored := _nonsense(rank, world_size):
        return LaunchEnvironment(known=False, ignored=ignored)
    if rank is None:
        return LaunchEnvironment(known=False)
    if local_rank is None:
        # Without torchrun: right on one host, which is where ranks are started by hand.
        local_rank = rank
    return LaunchEnvironment(rank, local_rank, world_size or max(1, rank + 1), node=node)


def job_name() -> str | None:
    """Return what the launcher calls the job of this rank, the same on all nodes; None: nothing."""
    if port := os.environ.get("MASTER_PORT"):
        return f"port {port}"
    for launcher in _launchers():
        named = [os.environ.get(name, "") for name in launcher.job]
        if named and all(named):
            return f"job {'.'.join(named)}"
    return None


def recorders_job(command: Sequence[str]) -> str | None:
    """Return a name that all recorders of one job on several nodes share; None: there is one.

    Each is started by the job's launcher, or starts the launcher of its own node with the same
    rendezvous in its options or environment.
    """
    info = rank_info()
    if info.known and info.world_size > 1 and (name := job_name()) is not None:
        return f"{name} {os.environ.get('MASTER_ADDR', '')}".strip()
    options = {
        name.removeprefix("PET_").lower(): value
        for name, value in os.environ.items()
        if name.startswith("PET_")
    }
    for word, following in zip(command, [*command[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            options[name[2:].replace("-", "_")] = value if equals else following
    nodes = [options[name] for name in _NODES if name in options]
    named = [f"{name} {options[name]}" for name in _RENDEZVOUS if options.get(name)]
    return ", ".join(named) or None if nodes and nodes[0] not in ("1", "1:1") else None
