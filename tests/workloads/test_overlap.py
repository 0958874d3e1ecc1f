from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import types

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from chopper.errors import UsageError  # noqa: E402
from chopper.experiments.loading import load  # noqa: E402
from chopper.experiments.prepare import (  # noqa: E402
    WorkloadUnavailable,
    find,
    prepare,
)
from chopper.reports import experiment as report  # noqa: E402
from tests.waiting import PATIENCE_S  # noqa: E402

KERNELS = ["triton", "triton-unswizzled"]


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (2, ["--m", "100"], "--m 100: its rows do not divide into 2 ranks of 8 chunks"),
        (3, ["--m", "96", "--k", "32"], "--k 32: does not divide among 3 ranks"),
        (1, [], "one rank has no peer to exchange with, except on a GPU"),
        (2, ["--m", "1048576", "--n", "1048576"], "choose smaller matrices"),
    ],
)
def test_impossible_shapes_are_refused(ranks, options, message):
    with pytest.raises((UsageError, WorkloadUnavailable), match=message):
        prepare("overlap", ranks=ranks, options=[*options, "--device", "cpu"])


def test_variants_for_gpus_are_left_out_with_a_note_or_refused():
    launch = prepare("overlap", options=["--device", "cpu"])
    assert [v.name for v in launch.variants] == [
        "sequential",
        "library",
        "chunked",
        "unswizzled",
        *KERNELS,
    ]
    assert "left out: symmetric: needs a GPU, none is used here" in launch.notes
    why = "overlap symmetric: needs a GPU, none is used here"
    with pytest.raises(WorkloadUnavailable, match=why):
        prepare("overlap", variants="symmetric", options=["--device", "cpu"])


@pytest.mark.parametrize(
    ("ranks", "reach", "left"),
    [
        (1, True, ["sequential", "chunked", "unswizzled", *KERNELS]),
        (4, True, ["sequential", "library", "chunked", "unswizzled", "symmetric", *KERNELS]),
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
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: H100)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    args = overlap.WORKLOAD.parse([])
    needs = overlap.needs(args, ranks, "cuda")
    absent = needs.absent
    m, k, n = (needs.chosen[name] for name in "mkn")
    assert f"--m {m} --k {k} --n {n}: product and transfer take equally long" in needs.notes[0]
    # What the user chose stays; the rest balances beside it, of which nothing is said.
    args = overlap.WORKLOAD.parse(["--m", "65536"])
    needs = overlap.needs(args, ranks, "cuda")
    assert (needs.chosen, needs.notes) == ({"k": k, "n": n}, ())
    assert [v.name for v in find("overlap").variants if v.name not in absent] == left
    assert asked == 2 * ([] if ranks == 1 else [(0, 1), (0, 2), (0, 3)] if reach else [(0, 1)])


H100 = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", multi_processor_count=132, total_memory=80 * 10**9
)


def test_on_cpus_the_sizes_are_the_declared_ones_and_the_users_count():
    launch = prepare("overlap", options=["--device", "cpu", "--n", "512"])
    assert [launch.options[name] for name in "mkn"] == [1024, 2048, 512]
    assert launch.expected_s is None
    launch = prepare("overlap", options=["--device", "cpu"])
    assert launch.expected_s == 150
    assert any(note.startswith("--m 1024 --k 2048 --n 1024: balanced") for note in launch.notes)


def test_one_wrong_result_of_several_ends_the_workload():
    from chopper.workloads.exchange import require_exact

    assert require_exact("a", [1e-7, 3e-7, 2e-7], "float32") == 3e-7
    for wrong in (float("nan"), 1e-4):
        with pytest.raises(SystemExit, match=r"a is wrong: relative error (nan|1\.0e-04) "):
            require_exact("a", [1e-7, wrong, 2e-7], "float32")


class Posted:
    """What one rank begins, in order, as NCCL is given it: groups of (kind, other rank)."""

    def __init__(self, kind, rank, ranks, monkeypatch):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
        monkeypatch.setattr(kind, "ahead", False)
        args = argparse.Namespace(m=4 * ranks, k=2 * ranks, n=3, chunks=2, dtype="float32")
        self.problem = kind(args, torch.device("cpu"))
        self.groups = []
        monkeypatch.setattr(self.problem, "post", self.post)

    def post(self, receives=(), sends=()):
        group = [("receive", source) for _, source in receives]
        group += [("send", to) for _, to in sends]
        self.groups += [group] if group else []
        return []


@pytest.mark.parametrize("swizzle", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", ["GatherMatmul", "MatmulScatter"])
def test_what_is_posted_in_order_never_waits_for_what_is_posted_later(
    kind, ranks, swizzle, monkeypatch
):
    """NCCL runs one group after the other: whoever meets must be in both ranks' current group."""
    from chopper.workloads import exchange

    posted = [Posted(getattr(exchange, kind), r, ranks, monkeypatch) for r in range(ranks)]
    for rank in posted:
        rank.problem.chunked(swizzle=swizzle)
    left = [[list(group) for group in rank.groups] for rank in posted]
    assert sum(map(len, left)) > 0
    while any(left):
        met = [
            (r, other)
            for r, groups in enumerate(left)
            for what, other in (groups[0] if groups else ())
            if what == "send" and left[other] and ("receive", r) in left[other][0]
        ]
        assert met, f"each waits for another: {left}"
        for sender, receiver in met:
            left[sender][0].remove(("send", receiver))
            left[receiver][0].remove(("receive", sender))
        left = [[group for group in groups if group] for groups in left]


@pytest.mark.parametrize(
    ("order", "chunks"), [("ring", [4, 5, 2, 3, 0, 1]), ("rows", [0, 1, 2, 3, 4, 5])]
)
def test_on_one_gpu_each_flag_is_raised_behind_its_rows_and_on_their_stream(
    monkeypatch, order, chunks
):
    from chopper.workloads import exchange

    queues: dict[str, list[str]] = {"main": [], "side": []}
    current = ["main"]

    class Stream:
        def __init__(self, *_):
            pass

        def wait_stream(self, _):
            queues["side"].append("wait for main")

    @contextlib.contextmanager
    def on_side(_):
        current.append("side")
        yield
        current.pop()

    def write(flags, chunk, value):
        assert flags.dtype == torch.uint32  # the only one that the operator takes
        flags[chunk] = value
        queues[current[-1]].append(f"flag {chunk}")

    class Product:
        def __init__(self, *args, lanes, rows_per_chunk, **_):
            assert args == (order, 3, 4, 4)
            assert (lanes, rows_per_chunk) == (0, 2)

        def __call__(self, team, x, signals, w, y, step):
            queues["main"].append("kernel")
            assert team[:2].tolist() == [3, 4]
            assert signals.tolist() == [step] * 8
            assert not x.isnan().any()
            return torch.mm(x, w, out=y)

    pytest.importorskip("triton")
    from chopper.workloads.tiles import turns

    module = types.ModuleType("tiles")
    module.WaitingProduct, module.turns = Product, turns  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "chopper.workloads.tiles", module)
    for name, stub in (
        ("Stream", Stream),
        ("stream", on_side),
        ("current_stream", Stream),
        ("synchronize", lambda: None),
    ):
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.ops.symm_mem, "stream_write_value32_", write, raising=False)
    args = argparse.Namespace(m=16, k=6, n=5, chunks=2, dtype="float32")
    problem = exchange.HostShards(args, torch.device("cpu"), 4)
    pull = problem.pull

    def told(first, end):
        pull(first, end)
        queues[current[-1]].append(f"rows {first}")

    monkeypatch.setattr(problem, "pull", told)
    assert problem.flags.tolist() == [0] * 6 + [1] * 2
    assert problem.error(problem.fused(order)) < 1e-6
    expected = [f"{what} {chunk}" for chunk in chunks for what in ("rows", "flag")]
    assert queues == {"side": ["wait for main", *expected], "main": ["kernel"]}


RANK = """
import argparse, sys, torch, torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from chopper.workloads.exchange import GatherMatmul, MatmulScatter, operation

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(rank)
# Torch puts these in place of the operators that are only traced: the same sums, on any device.
for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
    symmetric.lib.impl(name, getattr(symmetric, f"_{name}_fallback"), "CPU")
args = argparse.Namespace(m=24, k=20, n=12, chunks=3, dtype="float32")
for kind, ahead in ((k, a) for k in (GatherMatmul, MatmulScatter) for a in (True, False)):
    kind.ahead = ahead  # receives all at once, as over gloo, or each beside a send, as over NCCL
    problem = kind(args, torch.device("cpu"))
    for variant in ("sequential", "library", "chunked", "unswizzled", "symmetric"):
        error = problem.error(operation(problem, variant, None))
        assert error < 1e-6, (kind.__name__, ahead, variant, error)
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
        out, err = process.communicate(timeout=PATIENCE_S)
        assert out == "ok\n", err[-2000:]


@pytest.mark.long
def test_it_is_checked_timed_and_held_against_its_bound(tmp_path):
    from chopper.cli.bench_ import command

    words = ["overlap", "-o", str(tmp_path / "run"), "--repeats", "1", "--steps", "2", "--json"]
    words += ["--variants", "sequential,triton"]
    words += ["--", "--m", "64", "--k", "96", "--n", "40", "--chunks", "4", "--rate", "1gbit"]
    done = CliRunner().invoke(
        command, [*words, "--device", "cpu"], standalone_mode=False, catch_exceptions=False
    )
    assert done.return_value == 0, done.output
    document = json.loads(done.stdout)
    found = load(tmp_path / "run")
    for operation in ("all_gather_matmul", "matmul_reduce_scatter"):
        # Checked by the workload itself: it ends when a variant is wrong.
        error = found.find("relative_error", "sequential", operation=operation)
        assert error is not None
        assert 0 <= error.estimate.value < 1e-5
        # On a busy machine, times that cannot be are withheld.
        every = [*found.rows, *(row for row, _ in found.impossible)]
        time_ns, core_ns, busy = (
            row.estimate.value
            for name in ("time_ns", "core_time_ns", "cores_busy_ratio")
            for row in every
            if (row.measure, row.variant) == (name, "sequential")
            and dict(row.labels)["operation"] == operation
        )
        assert busy > 0
        assert core_ns / time_ns / busy == pytest.approx(round(core_ns / time_ns / busy))
    claims = {(h["system"], h["claim"].partition(":")[0]) for h in document["headlines"]}
    operations = ("all gather matmul", "matmul reduce scatter")
    assert claims == {("Triton-distributed", o) for o in operations}
    # Checked, and not timed.
    assert {row.measure for row in found.rows if row.variant == "triton"} == {"relative_error"}
    of_kernel = [h for h in document["headlines"] if "one kernel" in h["claim"]]
    assert [h["ours"] for h in of_kernel] == [None, None]
    assert all("Triton's interpreter" in h["why"] for h in of_kernel)
    assert "sequential" in report.render(found, "html")
