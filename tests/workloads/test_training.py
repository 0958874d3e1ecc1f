"""The two ways of sharding train the same model: against each other, and against none."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from chopper.workloads.llama import (  # noqa: E402
    SIZES,
    Llama,
    initial_value,
    token_loader,
)
from tests.waiting import PATIENCE_S  # noqa: E402

STEPS, BATCH, SEQUENCE = 3, 1, 32
"""As in train_variants.py."""


def trained(directory, *variants, ranks):
    """Losses that rank 0 prints, by variant; one launch with torchrun itself for all of them."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = Path(__file__).parent / "train_variants.py"
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, str(script), str(directory), *variants],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    losses = {}
    for variant in variants:
        printed = (directory / f"{variant}.txt").read_text()
        assert re.search(r"median step [\d.]+ s, [\d,]+ tokens/s", printed)
        losses[variant] = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    return losses


def of_two_ranks(directory, *options):
    variants = [f"{workload}:{words}" for workload in ("fsdp1", "fsdp2") for words in options]
    return trained(directory, *variants, ranks=2)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Losses of two ranks, by workload."""
    return of_two_ranks(tmp_path_factory.mktemp("sharded"), "--checkpoint,none")


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Losses of two ranks, by workload and options."""
    options = ("--checkpoint,full", "--dtype,bfloat16")
    return of_two_ranks(tmp_path_factory.mktemp("others"), *options)


@pytest.fixture(scope="module")
def reference():
    """Rank 0's losses, from one process that sees both ranks' sequences and shards nothing."""
    config = SIZES["debug"]
    model = Llama(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(initial_value(name, weight.shape, config, seed=0, device=weight.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    loaders = [
        token_loader(
            steps=STEPS,
            batch=BATCH,
            sequence=SEQUENCE,
            vocabulary=config.vocabulary_count,
            seed=0,
            rank=rank,
            ranks=2,
            workers=0,
            pin_memory=False,
        )
        for rank in (0, 1)
    ]
    losses = []
    for batches in zip(*loaders, strict=True):
        of_ranks = [
            torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
            for tokens, labels in batches
        ]
        torch.autograd.backward(sum(of_ranks) / 2)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(of_ranks[0].item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["fsdp1", "fsdp2"])
def test_sharded_losses_are_those_of_an_unsharded_model(workload, reference, sharded):
    losses = sharded[f"{workload}:--checkpoint,none"]
    assert losses == pytest.approx(reference, abs=2e-4)  # four decimals are printed
    assert losses[0] > losses[-1]


@pytest.mark.long
@pytest.mark.parametrize("workload", ["fsdp1", "fsdp2"])
def test_so_are_those_of_blocks_that_are_recomputed_and_bfloat16_is_near(
    workload, reference, others
):
    assert others[f"{workload}:--checkpoint,full"] == pytest.approx(reference, abs=2e-4)
    losses = others[f"{workload}:--dtype,bfloat16"]
    assert losses == pytest.approx(reference, abs=0.02)
    assert losses != pytest.approx(reference, abs=1e-5)


@pytest.mark.slow
@pytest.mark.long
def test_one_rank_is_a_world_too(tmp_path):
    losses = trained(tmp_path, "fsdp1", "fsdp2", ranks=1)
    assert [len(found) for found in losses.values()] == [STEPS, STEPS]


@pytest.mark.parametrize("workload", ["fsdp1", "fsdp2"])
def test_outside_torchrun_it_says_how_to_start_it(workload, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr("sys.argv", [workload])
    with pytest.raises(SystemExit) as refused:
        importlib.import_module(f"chopper.workloads.{workload}").main()
    # As the interpreter ends with it: on stderr, with exit code 1.
    assert refused.value.code == (
        f"{workload}: start it with `chopper bench {workload}` or through torchrun"
    )
