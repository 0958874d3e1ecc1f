"""A job on two nodes, which are two network namespaces: one run in the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chopper import pipeline
from chopper.storage.run import Run
from chopper.workloads.link import unavailable
from tests.command import run
from tests.recording.nodes import ADDRESSES, Node, ended, two_nodes

WHY_NOT = unavailable()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]
TRAIN = """
import os, signal, sys, torch
import torch.distributed as dist

dist.init_process_group("gloo")
layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    if step == 10 and sys.argv[1:] == [os.environ["RANK"]]:
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    with two_nodes(tmp_path) as both:
        yield both


def recorded(
    nodes: tuple[Node, Node], directory: Path, *options: str | Path, killed: str = ""
) -> list[tuple[int, str, str]]:
    """Record two ranks on each node: exit code, standard output and error of each command."""
    script = directory / "train.py"
    script.write_text(TRAIN)
    processes = []
    for number, node in enumerate(nodes):
        own = directory / f"node{number}"
        own.mkdir()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        torchrun += ["--nproc-per-node=2", f"--node-rank={number}", "--master-port=29500"]
        torchrun += [f"--master-addr={ADDRESSES[0]}", str(script), *killed]
        record = [sys.executable, "-m", "chopper", "record", *options, "--", *torchrun]
        processes.append(node.popen(record, own))
    return ended(processes)


def check_whole(path: Path, nodes: tuple[Node, Node]) -> None:
    """The run is one of four ranks on two hosts, whose collectives meet."""
    parts = Run.open(path).manifest.ranks
    assert [part.rank for part in parts] == [0, 1, 2, 3]
    assert [part.hostname for part in parts] == [n.name for n in nodes for _ in range(2)]
    assert [part.node for part in parts] == [0, 0, 1, 1]
    found = pipeline.attribute(path)
    assert sum(leaf.time_ns for leaf in found.leaves()) == found.observed_ns
    # All but the two broadcasts with which DDP rebuilds its buckets.
    assert (found.coverage["collectives_matched_ratio"] or 0) >= 0.75
    # The clocks of the two hosts are aligned by their collectives.
    offsets = {r: (one.offset_ns, one.offset_rank) for r, one in found.matched.items()}
    assert offsets.keys() == {0, 1, 2, 3}
    assert offsets[0] == offsets[1]
    assert offsets[2] == offsets[3]


def test_ranks_of_nodes_without_a_shared_disk_are_gathered_by_rank_0(
    nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    first, second = recorded(nodes, tmp_path, "-o", "run", "--gather")
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert "chopper: gathered 2 ranks of other nodes\n" in first[2]
    assert f"rank 2 was gathered into {tmp_path}/node0/run on {nodes[0].name}\n" in second[2]
    check_whole(tmp_path / "node0/run", nodes)
    assert Run.open(tmp_path / "node1/run").ranks == [2, 3]
    page = tmp_path / "report.html"
    assert run("report", tmp_path / "node0/run", "-o", page).code == 0
    assert nodes[1].name in page.read_text()


def test_nodes_with_a_shared_directory_make_one_run(
    nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    shared = tmp_path / "shared/run"
    for code, _, err in recorded(nodes, tmp_path, "-o", shared):
        assert code == 0, err
    check_whole(shared, nodes)
    assert Run.open(shared).manifest.findings == []
    assert [p.name for p in shared.parent.iterdir()] == ["run"]
    assert not [*shared.glob(".*")]


def test_a_rank_that_was_killed_is_named_in_what_is_gathered(
    nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    for code, _, err in recorded(nodes, tmp_path, "-o", "run", killed="3"):
        assert code != 0
        assert "chopper gather run THOSE-OF-OTHER-NODES" in err
    both = tmp_path / "both"
    done = run("gather", tmp_path / "node0/run", tmp_path / "node1/run", "-o", both)
    assert done.code == 0, done.err
    gathered = Run.open(both).manifest
    assert [part.rank for part in gathered.ranks] == [0, 1, 2, 3]
    died = {f.rank: f.message for f in gathered.findings if f.code == "run.rank_died"}
    assert 3 in died
    assert "it was killed" in died[3]
    assert gathered.exit_code != 0
