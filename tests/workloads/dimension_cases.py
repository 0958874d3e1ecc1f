"""What ranks do in the tests of the workloads of one dimension; each runs in all of them."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from chopper.workloads import ring, tensor, timeline
from chopper.workloads.llama import SIZES
from chopper.workloads.mixture import Mixture

CPU, CONFIG = torch.device("cpu"), SIZES["debug"]


def ring_errors() -> list[float]:
    """Errors of ring attention against whole attention, contiguous and zigzag."""
    spans = timeline.Timeline(CPU)
    rings = (ring.Ring(24, 4, zigzag=zigzag, timeline=spans) for zigzag in (False, True))
    return [ring.error_of(place, CPU, torch.float32) for place in rings]


def mixture_errors(shares: list[float]) -> list[float]:
    """Errors of a mixture's answers and gradients against experts that are all on one rank."""
    tokens = torch.randn(256, CONFIG.width)
    layer = Mixture(CONFIG, shares, timeline.Timeline(CPU))
    dist.broadcast(layer.gate.weight.data, 0)
    x = tokens.clone().requires_grad_()
    found = layer(x)
    found.square().sum().backward()

    y = tokens.clone().requires_grad_()
    normed = F.rms_norm(y, y.shape[-1:])
    scores = layer.gate(normed)
    chosen = (scores + layer.bias).argmax(1)
    answers = torch.stack(
        [
            F.linear(F.silu(F.linear(normed, w1)) * F.linear(normed, w3), w2)
            for w1, w2, w3 in zip(*map(_of_all_ranks, ("w1", "w2", "w3"), [layer] * 3), strict=True)
        ]
    )
    weight = scores.softmax(1).gather(1, chosen[:, None])
    exact = y + weight * answers[chosen, torch.arange(len(tokens))]
    exact.square().sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    return [_error(found, exact), _error(x.grad, y.grad)]


def mixture_loads(shares: list[float]) -> list[int]:
    """Tokens that each of this rank's experts has."""
    layer = Mixture(CONFIG, shares, timeline.Timeline(CPU))
    dist.broadcast(layer.gate.weight.data, 0)
    layer(torch.randn(512, CONFIG.width).requires_grad_())
    loads: list[int] = layer.loads.tolist()
    return loads


def cut_errors() -> list[float]:
    """Errors of blocks that are cut over the ranks against whole ones."""
    torch.manual_seed(5)
    x = torch.randn(2, 8, CONFIG.width)
    args = argparse.Namespace(size="debug", blocks=2, seed=3, dtype="float32")
    whole = timeline.stack(CONFIG, range(2), seed=3, device=CPU, dtype=torch.float32)
    cut = tensor.cut(args, CPU)
    found, exact = cut(x), whole(x)
    for out in (found, exact):
        out.square().sum().backward()
    errors = [_error(found, exact)]
    for mine, whole_one in zip(cut.parameters(), whole.parameters(), strict=True):
        assert mine.grad is not None
        assert whole_one.grad is not None
        grad = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
        errors.append(_error(grad, whole_one.grad))
    return errors


def _of_all_ranks(name: str, layer: Mixture) -> list[Tensor]:
    own = torch.stack([getattr(expert, name).weight.data for expert in layer.experts])
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return [*torch.cat(parts)]


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())
