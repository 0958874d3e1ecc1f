from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from chopper import experiment as ex  # noqa: E402
from chopper._workloads import WORKLOADS, WorkloadUnavailable, prepare  # noqa: E402
from chopper.reports import experiment as report  # noqa: E402
from chopper.workloads import options  # noqa: E402


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (2, ["--m", "100"], "--m 100: its rows do not divide into 2 ranks of 8 chunks"),
        (3, ["--m", "96", "--k", "32"], "--k 32: does not divide among 3 ranks"),
        (1, [], "one rank has nobody to exchange with"),
        (2, ["--m", "1048576", "--n", "1048576"], "take smaller matrices"),
    ],
)
def test_impossible_shapes_are_refused(ranks, options, message):
    with pytest.raises(WorkloadUnavailable, match=message):
        prepare("overlap", ranks=ranks, options=[*options, "--device", "cpu"])


def test_variants_for_gpus_are_left_out_with_a_note_or_refused():
    launch = prepare("overlap", options=["--device", "cpu"])
    assert [v.name for v in launch.variants] == ["sequential", "library", "chunked", "unswizzled"]
    assert (
        "left out: symmetric, triton, triton-unswizzled: needs a GPU, none is used here"
        in launch.notes
    )
    with pytest.raises(WorkloadUnavailable, match="overlap triton: needs a GPU, none is used here"):
        prepare("overlap", variants="triton", options=["--device", "cpu"])


@pytest.mark.parametrize(
    ("ranks", "reach", "left"),
    [
        (1, True, ["sequential", "chunked", "unswizzled", "triton", "triton-unswizzled"]),
        (4, True, ["sequential", "library", "chunked", "unswizzled", "symmetric"]),
        (4, False, ["sequential", "library", "chunked", "unswizzled"]),
    ],
)
def test_on_gpus_each_number_of_ranks_has_its_variants(monkeypatch, ranks, reach, left):
    from chopper.workloads import overlap

    asked = []

    def can_reach(one, other):
        asked.append((one, other))
        return reach

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", can_reach)
    args = options.parse(options.OVERLAP, [], prog="overlap")
    absent = overlap.needs(args, ranks, "cuda").absent
    assert [v.name for v in WORKLOADS["overlap"].variants if v.name not in absent] == left
    assert asked == ([] if ranks == 1 else [(0, 1), (0, 2), (0, 3)] if reach else [(0, 1)])


RANK = """
import argparse, sys, torch, torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from chopper.workloads.overlap import GatherMatmul, MatmulScatter

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(rank)
# What torch puts in place of the operators where they are only traced: the same sums, on any device.
for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
    symmetric.lib.impl(name, getattr(symmetric, f"_{name}_fallback"), "CPU")
args = argparse.Namespace(m=24, k=20, n=12, chunks=3, dtype="float32")
for kind in (GatherMatmul, MatmulScatter):
    problem = kind(args, torch.device("cpu"))
    for variant in ("sequential", "library", "chunked", "unswizzled", "symmetric"):
        error = problem.error(problem.operation(variant))
        assert error < 1e-6, (kind.__name__, variant, error)
print("ok")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_every_order_computes_the_same(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in (0, 1)
    ]
    for process in ranks:
        out, err = process.communicate(timeout=120)
        assert out == "ok\n", err[-2000:]


@pytest.mark.slow
def test_it_is_checked_timed_and_held_against_its_bound(tmp_path):
    from chopper.cli.run_ import command

    words = ["overlap", "-o", str(tmp_path / "run"), "--repeats", "1", "--steps", "2", "--json"]
    words += ["--variants", "sequential,chunked"]
    words += ["--", "--m", "64", "--k", "96", "--n", "40", "--chunks", "4", "--rate", "1gbit"]
    done = CliRunner().invoke(
        command, [*words, "--device", "cpu"], standalone_mode=False, catch_exceptions=False
    )
    assert done.return_value == 0, done.output
    document = json.loads(done.stdout)
    found = ex.load(tmp_path / "run")
    for variant in found.variants:
        for operation in ("all_gather_matmul", "matmul_reduce_scatter"):
            # Checked by the workload itself: it ends when a variant is wrong.
            error = found.find("relative_error", variant, operation=operation)
            assert error is not None
            assert 0 <= error.estimate.value < 1e-5
    claims = {(h["system"], h["claim"].partition(":")[0]) for h in document["headlines"]}
    operations = ("all gather matmul", "matmul reduce scatter")
    assert claims == {("Triton-distributed", o) for o in operations}
    assert "sequential" in report.render(found, "html")
