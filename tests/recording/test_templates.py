"""The templates for Slurm and for nodes without a scheduler, as far as one machine goes.

``srun`` and ``scontrol`` are stand-ins that start a process per node with the variables that Slurm
sets; recorder, torchrun and training are real. Both nodes are this machine, on its loopback.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from chopper import pipeline
from chopper.storage.run import Run
from tests.recording.test_nodes import TRAIN
from tests.waiting import PATIENCE_S

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SRUN = """
#!/bin/bash
# One process on each node, as --ntasks-per-node=1 asks for; ends as the first that failed.
while [[ $1 == --* ]]; do shift; done
for node in $(seq 0 $((SLURM_NNODES - 1))); do
    SLURM_NODEID=$node SLURM_PROCID=$node SLURM_LOCALID=0 SLURM_STEP_ID=0 \\
        SLURM_STEP_NUM_TASKS=$SLURM_NNODES "$@" &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit "${code:-0}"
"""
SCONTROL = """
#!/bin/bash
[[ $* == "show hostnames nodes[0-1]" ]] || exit 1
printf '%s\\n' 127.0.0.1 127.0.0.1
"""
PRINTS = """
#!/bin/bash
printf '%s\\n' "$SLURM_NODEID: $*" >>"$CALLS"
exit "${ENDS:-0}"
"""


def environment(place: Path, **programs: str) -> dict[str, str]:
    """The environment of a batch script of two nodes, with these programs first on its path."""
    folder = place / "programs"
    folder.mkdir()
    torchrun = f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    recorder = f'#!/bin/sh\nexec {sys.executable} -m chopper "$@"\n'
    scripts = {"srun": SRUN, "scontrol": SCONTROL, "torchrun": torchrun, "chopper": recorder}
    for name, text in (scripts | programs).items():
        (folder / name).write_text(text.lstrip())
        (folder / name).chmod(0o755)
    known = ("CHOPPER_", "SLURM_", "MASTER_", "RANK", "WORLD_")
    own = {k: v for k, v in os.environ.items() if not k.startswith(known)}
    return own | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": "4242",
        "SLURM_JOB_NAME": "train",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "nodes[0-1]",
        "RANKS_PER_NODE": "1",
    }


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


@pytest.mark.parametrize("ends", [0, 3])
def test_slurm_starts_one_recorder_on_each_node_and_ends_as_the_training(
    ends: int, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    own = environment(tmp_path, chopper=PRINTS) | {"CALLS": str(calls), "ENDS": str(ends)}
    done = subprocess.run(
        ["bash", EXAMPLES / "slurm.sbatch", "my train.py", "--steps", "2"],
        cwd=tmp_path,
        env=own,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == ends
    node = (
        "{0}: record -o runs/train-4242 -- torchrun --nnodes=2 --node-rank={0} --nproc-per-node=1 "
        "--master-addr=127.0.0.1 --master-port=24242 my train.py --steps 2"
    )
    *nodes, last = calls.read_text().splitlines()
    assert sorted(nodes) == [node.format(0), node.format(1)]
    assert last == ": report runs/train-4242 -o runs/train-4242.html --force"


def test_what_slurm_is_asked_for_is_read_before_the_script() -> None:
    # sbatch stops reading directives at the first command.
    lines = (EXAMPLES / "slurm.sbatch").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    asked = [i for i, line in enumerate(lines) if line.startswith("#SBATCH --")]
    assert len(asked) == 6
    assert max(asked) < first
    assert {"#SBATCH --ntasks-per-node=1", "#SBATCH --nodes=2"} <= {*lines}


def test_nodes_without_a_scheduler_must_be_numbered(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", EXAMPLES / "multi_node.sh", "train.py"],
        env={"PATH": os.environ["PATH"], "NODES": "2", "HEAD": "node0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode != 0
    assert "NODE: number of this node, from 0" in done.stderr


def check_two_ranks(run: Path) -> None:
    parts = Run.open(run).manifest.ranks
    assert [(part.rank, part.node) for part in parts] == [(0, 0), (1, 1)]
    found = pipeline.attribute(run)
    assert sum(leaf.time_ns for leaf in found.leaves()) == found.observed_ns
    assert (found.coverage["collectives_matched_ratio"] or 0) >= 0.75


@pytest.mark.slow
@pytest.mark.long
def test_nodes_without_a_scheduler_are_gathered(tmp_path: Path) -> None:
    own = environment(tmp_path) | {"NODES": "2", "HEAD": "127.0.0.1", "MASTER_PORT": free_port()}
    processes = []
    for node in (0, 1):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        (folder / "train.py").write_text(TRAIN)
        processes.append(
            subprocess.Popen(
                ["bash", EXAMPLES / "multi_node.sh", "train.py"],
                cwd=folder,
                env={k: v for k, v in own.items() if not k.startswith("SLURM_")}
                | {"NODE": str(node)},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = [process.communicate(timeout=PATIENCE_S)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    check_two_ranks(tmp_path / "node0/runs/multi-node")
    assert Run.open(tmp_path / "node1/runs/multi-node").ranks == [1]
