"""The two ways of sharding train the same model: against each other, and against none."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from chopper.workloads.llama import SIZES, Llama, initial_value  # noqa: E402
from chopper.workloads.tokens import token_loader  # noqa: E402

STEPS, BATCH, SEQUENCE = 3, 1, 32
SHORT = ["--steps", f"{STEPS}", "--batch", f"{BATCH}", "--sequence", f"{SEQUENCE}"]


def trained(workload, output, *options, ranks=2):
    """Losses that rank 0 prints, by a launch with torchrun itself."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    words = [*SHORT, "--device", "cpu", "--output", str(output)]
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, f"chopper.workloads.{workload}", *words, *options],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"s per step, [\d,]+ tokens/s", done.stdout)
    assert "Warning" not in done.stderr
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]


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
            vocabulary=config.vocabulary,
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
@pytest.mark.parametrize("checkpoint", ["none", "full"])
@pytest.mark.parametrize("workload", ["fsdp1", "fsdp2"])
def test_sharded_losses_are_those_of_an_unsharded_model(workload, checkpoint, reference, tmp_path):
    losses = trained(workload, tmp_path / "run", "--checkpoint", checkpoint)
    assert losses == pytest.approx(reference, abs=2e-4)  # four decimals are printed
    assert losses[0] > losses[-1]


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["fsdp1", "fsdp2"])
def test_bfloat16_losses_are_near(workload, reference, tmp_path):
    losses = trained(workload, tmp_path / "run", "--dtype", "bfloat16")
    assert losses == pytest.approx(reference, abs=0.02)
    assert losses != pytest.approx(reference, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["fsdp1", "fsdp2"])
def test_one_rank_is_a_world_too(workload, tmp_path):
    losses = trained(workload, tmp_path / "run", ranks=1)
    assert len(losses) == STEPS


@pytest.mark.parametrize("workload", ["fsdp1", "fsdp2"])
def test_outside_torchrun_it_says_how_to_start_it(workload):
    done = subprocess.run(
        [sys.executable, "-m", f"chopper.workloads.{workload}"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"{workload}: start it with `chopper run {workload}` or through torchrun\n"
    )
