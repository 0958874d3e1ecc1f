"""A program: models under fake tensors, and the peaks that PyTorch's trackers see.

    python -m benchmarks._memory_track '{"name": {...}}' [--unmodified]

Prints one JSON object: case → bytes.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, _sharding_prop
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from benchmarks._memory_experts import made
from chopper.workloads.llama import Attention, rotate

KEEP = (
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)


def selective_contexts() -> Any:
    """Every other product is kept, and attention: torchtitan's policy."""
    counts = {False: 0, True: 0}

    def policy(ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if op == KEEP[0]:
            counts[ctx.is_recompute] += 1
            if counts[ctx.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if op in KEEP else CheckpointPolicy.PREFER_RECOMPUTE

    make: Any = create_selective_checkpoint_contexts
    return make(policy)


def attend(self: Attention, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As the model's, with as many heads as this rank has."""
    b, s, _ = x.shape
    q, k, v = (w(x) for w in (self.wq, self.wk, self.wv))
    s = q.shape[1]
    q, k, v = (t.view(b, s, -1, self.head_width).transpose(1, 2) for t in (q, k, v))
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    projected: Tensor = self.wo(out.transpose(1, 2).reshape(b, s, -1))
    return projected


def tensor_parallel(module: Any, mesh: DeviceMesh, *, strategy: str) -> Any:
    """Products cut over ranks; with `tp-sp` what lies between is cut by tokens; with `tp-gathered`
    each rank gets all logits."""
    sequence = strategy == "tp-sp"
    Attention.forward = attend  # type: ignore[method-assign]
    plan: dict[str, Any] = {f"attention.{w}": ColwiseParallel() for w in ("wq", "wk", "wv")}
    plan |= {"ffn.w1": ColwiseParallel(), "ffn.w3": ColwiseParallel()}
    cut = Shard(1)
    if sequence:
        plan |= {
            "attention_norm": SequenceParallel(),
            "ffn_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(cut, None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            "ffn": PrepareModuleInput(input_layouts=(cut,), desired_input_layouts=(Replicate(),)),
        }
    down = RowwiseParallel(output_layouts=cut) if sequence else RowwiseParallel()
    plan |= {"attention.wo": down, "ffn.w2": down}
    for layer in module.layers:
        parallelize_module(layer, mesh, plan)
    outer: dict[str, Any] = {
        "head": ColwiseParallel(
            input_layouts=cut if sequence else Replicate(),
            output_layouts=Replicate() if strategy == "tp-gathered" else Shard(-1),
            use_local_output=strategy == "tp-gathered",
        )
    }
    if sequence:
        outer |= {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=cut),
            "norm": SequenceParallel(),
        }
    else:
        outer |= {"embedding": RowwiseParallel(input_layouts=Replicate())}
    parallelize_module(module, mesh, outer)
    return module


def wrapped(module: Any, case: dict[str, Any], mesh: DeviceMesh) -> Any:
    """Checkpointing, then the strategy."""
    if case["checkpoint"] != "none":
        options: Any = (
            {"context_fn": selective_contexts} if case["checkpoint"] == "selective" else {}
        )
        for i, layer in enumerate(module.layers):
            module.layers[i] = checkpoint_wrapper(layer, **options)
    if case["strategy"] == "fsdp2":
        policy = (
            MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            if case["precision"] == "mixed"
            else MixedPrecisionPolicy()
        )
        for layer in module.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)
    elif case["strategy"].startswith("tp"):
        module = tensor_parallel(module, mesh, strategy=case["strategy"])
    return module


def peak(
    case: dict[str, Any], mesh: DeviceMesh, make: Callable[[], nn.Module] | None = None
) -> int:
    """The tracker's peak of two steps, once what is done only the first time is behind.

    Args:
        case: shapes, strategy and the rest.
        mesh: of the ranks, for what has some.
        make: another model than the case's shapes give.
    """
    original = Attention.forward
    parallel = case["strategy"] in ("tp", "tp-sp")
    several_ranks = case["strategy"].startswith(("tp", "fsdp2"))
    fsdp = case["strategy"] == "fsdp2"
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            torch.set_default_dtype(
                torch.bfloat16 if case["precision"] == "bf16" else torch.float32
            )
            module: nn.Module = make() if make else made(case)
            torch.set_default_dtype(torch.float32)
            module = wrapped(module, case, mesh)
            if case["optimizer"] == "sgd":
                optimizer: Any = torch.optim.SGD(module.parameters(), foreach=False)
            else:
                optimizer = torch.optim.AdamW(
                    module.parameters(), foreach=case["optimizer"] == "foreach"
                )
            shape = (case["batch"], case["sequence"])
            x = torch.randint(0, case["model"]["vocabulary"], shape)
            y = torch.randint(0, case["model"]["vocabulary"], shape)
            peaks = []
            for _ in range(2 if several_ranks else 1):
                tracker: Any = FSDPMemTracker(module, optimizer) if fsdp else MemTracker()
                if fsdp:
                    tracker.track_inputs((x, y))
                else:
                    tracker.track_external(module, optimizer)
                with tracker:
                    for _ in range(2):
                        step(module, optimizer, x, y, case, parallel=parallel)
                        tracker.reset_mod_stats()
                peaks.append(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
            return int(min(peaks))
    finally:
        Attention.forward = original  # type: ignore[method-assign]


def step(
    module: Any, optimizer: Any, x: Tensor, y: Tensor, case: dict[str, Any], *, parallel: bool
) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=case["precision"] == "autocast"):
        logits = module(x)
        with loss_parallel() if parallel else contextlib.nullcontext():
            logits = logits if case.get("loss") == "native" else logits.float()
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            del logits
            if parallel:
                loss.backward()  # type: ignore[no-untyped-call]
    if not parallel:
        loss.backward()  # type: ignore[no-untyped-call]
    del loss
    optimizer.step()
    optimizer.zero_grad()


def several(ranks: int, *, modified: bool = True) -> DeviceMesh:
    """A mesh of so many ranks without any process, for shapes to be found out apart.

    DTensor finds out shapes with whole tensors, under the fake mode that it finds. MemTracker tells
    such tensors from the program's by their mode, so it would count them: they get one of their
    own, unless it shall be left unmodified.
    """
    if modified:
        setattr(_sharding_prop, "detect_fake_mode", lambda *_: None)  # noqa: B010 -- imported, not exported
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    # A mesh reads its own tensors: it cannot be made of fake ones.
    return init_device_mesh("cpu", (ranks,))


def main() -> None:
    found: dict[str, Any] = {}
    cases = json.loads(sys.argv[1])
    ranks = max(case["ranks"] for case in cases.values())
    mesh = several(ranks, modified="--unmodified" not in sys.argv[2:])
    for name, case in cases.items():
        try:
            found[name] = peak(case, mesh)
        except Exception as exc:  # noqa: BLE001 - a tracker that cannot follow is a line of the table
            found[name] = f"{type(exc).__name__}: {str(exc).splitlines()[0] if str(exc) else ''}"
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
