"""A program: one rank of real training on a CPU, by strategy, and the peak that its allocator saw.

    python -m benchmarks._memory_run '{"rank": 0, "ranks": 2, "store": "/tmp/x", "cases": [...]}'

Prints one JSON object: case → bytes at the highest moment of the last step. All allocations of the
process are counted, from before the model is made, those of PyTorch's C++ among them.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks._memory_experts import Mixture, expert_names, made
from benchmarks._memory_track import tensor_parallel
from chopper.workloads.llama import Attention, Block

STEPS = 4
PAUSE_S = 0.002
"""After each collective, for gloo's threads to let go of its tensors."""


def wrapped(case: dict[str, Any], ranks: int) -> tuple[nn.Module, Any, Any]:
    """The module under its strategy, its optimizer, and DeepSpeed's engine or None."""
    dtype = torch.bfloat16 if case["precision"] == "bf16" else torch.float32
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    module: Any = made(case)
    torch.set_default_dtype(torch.float32)
    strategy, mixed = case["strategy"], case["precision"].startswith("mixed")
    if case["checkpoint"] == "full":
        for i, layer in enumerate(module.layers):
            module.layers[i] = checkpoint_wrapper(layer)
    if strategy == "fsdp2":
        mesh = init_device_mesh("cpu", (ranks,))
        policy = (
            MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
        )
        cut = (case.get("experts") or {}).get("ep", 1)
        if cut > 1:
            # Ranks with the same experts share them; here each has its own.
            own = init_device_mesh("cpu", (cut, ranks // cut), mesh_dim_names=("ep", "same"))
            for part in module.modules():
                if isinstance(part, Mixture):
                    fully_shard(part.experts, mesh=own["same"], mp_policy=policy)
        for layer in module.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)
    elif strategy.startswith("tp"):
        mesh = init_device_mesh("cpu", (ranks,))
        module = tensor_parallel(module, mesh, strategy=strategy)
    elif strategy == "fsdp1":
        in_bf16 = (
            MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            if mixed
            else None
        )
        module = FullyShardedDataParallel(
            module,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=in_bf16,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    elif strategy in ("ddp", "zero1-torch"):
        if (case.get("experts") or {}).get("ep", 1) == ranks:
            # No other rank has the same: nothing is reduced.
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
                module, expert_names(module)
            )
        module = DistributedDataParallel(module, gradient_as_bucket_view=case["bucket_views"])
    if strategy == "zero1-torch":
        return module, ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW), None
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, foreach=False)
    if strategy.startswith("deepspeed"):
        import deepspeed

        stage = int(strategy[-1])
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": case["batch"],
            "zero_optimization": {
                "stage": stage,
                "reduce_bucket_size": case["bucket_count"],
                "allgather_bucket_size": case["bucket_count"],
                "overlap_comm": False,
            },
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": mixed},
        }
        if case["precision"] == "mixed-fp32-grads":
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        if stage == 3:
            config["zero_optimization"] |= {
                "stage3_prefetch_bucket_size": 0,
                "stage3_max_live_parameters": 0,
                "stage3_max_reuse_distance": 0,
                "stage3_param_persistence_threshold": 0,
            }
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=config, dist_init_required=False
        )
        return module, optimizer, engine
    return module, optimizer, None


def peak_bytes(case: dict[str, Any], ranks: int) -> int:
    """Highest sum of what is allocated during the last step.

    Copies that gloo makes of what it sends are left out: it drops them some time after, so they
    differ from run to run, and NCCL makes none.
    """
    gc.collect()
    attend = Attention.forward
    shape = (case["batch"], case["sequence"])
    vocabulary = case["model"]["vocabulary"]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        module, optimizer, engine = wrapped(case, ranks)
        cut = loss_parallel if case["strategy"] in ("tp", "tp-sp") else contextlib.nullcontext
        x, y = torch.randint(0, vocabulary, shape), torch.randint(0, vocabulary, shape)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=case["precision"] == "autocast")
        for step in range(STEPS):
            with record_function(f"step {step}"):
                with cut():
                    with autocast:
                        logits = (engine or module)(x)
                        loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
                    del logits
                    if engine is not None:
                        engine.backward(loss)
                        engine.step()
                    else:
                        loss.backward()  # type: ignore[no-untyped-call]
                        optimizer.step()
                        optimizer.zero_grad()
                    del loss
                dist.barrier()
    changes, last = allocations(prof.profiler.kineto_results.experimental_event_tree())
    live: dict[int, int] = {}
    now = highest = 0
    for at_ns, address, size, by_backend in sorted(changes, key=lambda change: change[0]):
        # What gloo's threads free is not told: then the address comes again.
        now -= live.pop(address, 0)
        if size > 0:
            live[address] = 0 if by_backend else size
            now += live[address]
            if at_ns >= last:
                highest = max(highest, now)
    if engine is not None:
        engine.destroy()
    Attention.forward = attend  # type: ignore[method-assign]
    return highest


def let_go_by_gloo_first() -> None:
    """Let gloo's threads drop what they sent before the program does.

    Whoever is last frees, and only what the program's thread frees is told: else it would be
    counted as live, now and then, until its address comes again.
    """
    wait: Any = dist.Work.wait
    wait_tensor: Any = functional.wait_tensor

    def waited(work: Any, *arguments: Any, **options: Any) -> Any:
        found = wait(work, *arguments, **options)
        time.sleep(PAUSE_S)
        return found

    def waited_tensor(tensor: Any) -> Any:
        found = wait_tensor(tensor)
        time.sleep(PAUSE_S)
        return found

    setattr(dist.Work, "wait", waited)  # noqa: B010 -- a method of a C++ class
    setattr(functional, "wait_tensor", waited_tensor)  # noqa: B010 -- looked up at each call


def allocations(roots: list[Any]) -> tuple[list[tuple[int, int, int, bool]], int]:
    """(time, address, bytes, whether made inside of a collective), and when the last step began."""
    found: list[tuple[int, int, int, bool]] = []
    last = 0
    waiting = [(root, False) for root in roots]
    while waiting:
        event, inside = waiting.pop()
        if event.tag.name == "Allocation":
            of = event.extra_fields
            found.append((event.start_time_ns, of.ptr, of.alloc_size, inside))
            continue
        if event.name == f"step {STEPS - 1}":
            last = event.start_time_ns
        here = inside or event.name.startswith(("c10d::", "gloo:"))
        waiting += [(child, here) for child in event.children]
    return found, last


def main() -> None:
    request = json.loads(sys.argv[1])
    rank, ranks = request["rank"], request["ranks"]
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "OMP_NUM_THREADS": "1",
    }
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{request['store']}", rank=rank, world_size=ranks
    )
    let_go_by_gloo_first()
    found: dict[str, Any] = {}
    for name, case in request["cases"].items():
        with contextlib.redirect_stdout(sys.stderr):
            try:
                found[name] = peak_bytes(copy.deepcopy(case), ranks)
            except ImportError as exc:
                found[name] = f"{exc}"
    dist.barrier()
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
