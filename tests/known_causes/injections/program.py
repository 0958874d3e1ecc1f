"""The training that causes are injected into: two ranks, FSDP2, a small Llama, on the CPU.

Started by :mod:`tests.known_causes.recordings` with a job, once per rank. Each plan of the job is
one recording; process group and processes are shared. What a step calls of an injector is in
:mod:`tests.known_causes.injections.injectors`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from chopper.storage.files import unpack_message
from chopper.workloads import link
from tests.known_causes.injections.plan import VOCABULARY, WARM_UP_STEPS, Job

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from tests.known_causes.injections.injectors import Injector

_PRIORITY = -15
_TOUCHED_BYTES = 2 << 30


def main() -> None:
    """Join the other rank, make all recordings of the job, leave."""
    job_text, *channel = sys.argv[1:]
    _ask_for_priority()
    job = unpack_message(job_text, Job)
    if job.linked:
        link.join(socket.socket(fileno=int(channel[-1])), int(os.environ["RANK"]))

    # Only now: the link needs a process of one thread.
    import torch
    import torch.distributed as dist

    from chopper.workloads.ranks import join_group
    from tests.known_causes.injections.injectors import INJECTORS

    torch.set_num_threads(1)
    join_group(torch.device("cpu"))
    touched = False
    try:
        for plan in job.plans:
            injector = INJECTORS[plan.injection](plan, dist.get_rank())
            if injector.on_touched_memory and not touched:
                _touch_memory()
                touched = True
            record(injector, Path(job.directory) / plan.injection)
            dist.barrier()
    finally:
        dist.destroy_process_group()


def record(injector: Injector, output: Path) -> None:
    """Make one recording, and write its truth beside it."""
    injector.start()
    if injector.truth.skipped is None:
        try:
            train(injector, output)
        finally:
            injector.stop()
    truth_file = output.with_name(f"{output.name}.truth-{injector.rank}.json")
    truth_file.write_bytes(msgspec.json.encode(injector.truth))


def train(injector: Injector, output: Path) -> None:
    """Train as many steps as the plan has, under ``chopper.profile``."""
    import torch
    import torch.nn.functional as F
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader

    import chopper
    from chopper.models.architectures import Architecture
    from chopper.workloads.llama import Llama

    torch.manual_seed(0)
    model = Llama(
        Architecture(
            name="validation",
            layers_count=injector.layers,
            width=injector.dim,
            heads_count=4,
            kv_heads_count=4,
            head_width=injector.dim // 4,
            ffn_width=2 * injector.dim,
            vocabulary_count=VOCABULARY,
        )
    )
    if injector.wraps_feed_forward:
        for block in model.layers:
            block.register_module(
                "ffn", _wrapped(block.get_submodule("ffn"), injector.feed_forward)
            )
    if not injector.by_hand:
        for block in model.layers:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    steps = len(injector.levels)
    loader = DataLoader(
        _dataset(steps, injector.item),
        batch_size=None,
        num_workers=injector.workers,
        prefetch_factor=1 if injector.workers else None,
    )
    with chopper.profile(output, steps=(WARM_UP_STEPS, steps), name="validation") as prof:
        batches = iter(prof.watch(injector.loader(loader)))
        for step in range(steps):
            injector.step = step
            injector.before_step()
            tokens: Tensor = next(batches)
            injector.before_forward()
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            if injector.by_hand:
                _average_gradients(model, injector)
            injector.before_optimizer()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            injector.after_step()
            prof.step()


def _average_gradients(model: torch.nn.Module, injector: Injector) -> None:
    import torch

    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    injector.before_reduce()
    injector.reduce(flat)
    flat /= 2
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, mean in zip(gradients, flat.split(sizes), strict=True):
        gradient.copy_(mean.view_as(gradient))


def _wrapped(
    block: torch.nn.Module, call: Callable[[torch.nn.Module, tuple[Any, ...]], Any]
) -> torch.nn.Module:
    from torch import nn

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = block

        def forward(self, *args: Any) -> Any:
            return call(self.inner, args)

    return Wrapped()


def _dataset(steps: int, item: Callable[[int], Any]) -> Any:
    from torch.utils.data import Dataset

    class Tokens(Dataset[Any]):
        def __len__(self) -> int:
            return steps

        def __getitem__(self, index: int) -> Any:
            return item(index)

    return Tokens()


def _touch_memory() -> None:
    """Write to memory once and give it back to the process's allocator, which keeps it.

    Where a recording's pages come fresh, a step's first writers would pay for them.
    """
    import psutil
    import torch

    torch.ones(min(_TOUCHED_BYTES, psutil.virtual_memory().available // 8) // 4)


def _ask_for_priority() -> None:
    """Come before other programs, which nobody injected, where root may ask that.

    With autogroups, which is the kernel's default, a nice value counts only within a session;
    the session's own is in ``/proc/self/autogroup`` (sched(7)).
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
        Path("/proc/self/autogroup").write_text(str(_PRIORITY))
