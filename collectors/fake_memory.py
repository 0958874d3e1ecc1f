"""Peak memory of a user's module under fake tensors: the program runs, no memory is used.

:func:`capture` starts a child process, because the user's module and torch are imported there and
nowhere else. The child runs two training steps under ``FakeTensorMode`` with PyTorch's own
MemTracker, or FSDPMemTracker on a process group that sends nothing, and prints what it found.
Both trackers are private to PyTorch (``torch.distributed._tools``); where they are not as known,
the message says which version was found.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chopper.errors import CaptureError, UsageError
from chopper.fresh_python import own_python

_CATEGORIES = {
    "PARAM": "parameters",
    "SHARDED_PARAM": "parameters",
    "UNSHARDED_PARAM": "parameters",
    "BUFFER": "parameters",
    "GRAD": "gradients",
    "SHARDED_GRAD": "gradients",
    "UNSHARDED_GRAD": "gradients",
    "ACT": "activations",
    "TEMP": "temporary",
    "ALL_GATHER": "communication",
    "REDUCE_SCATTER": "communication",
    "OPT": "optimizer",
    "OTH": "temporary",
    "INP": "activations",
}
STRATEGIES = ("single", "fsdp2")
PRECISIONS = ("bf16", "fp32", "autocast", "mixed")
_STEPS = 3
_TIMEOUT_S = 600


def capture(
    module: str,
    *,
    batch: int,
    sequence: int,
    strategy: str = "single",
    ranks: int = 1,
    checkpoint: str = "none",
    precision: str = "bf16",
    optimizer: str = "adamw",
) -> dict[str, Any]:
    """Track a user's module in a child process.

    Args:
        module: ``package.module:factory``. The factory is called without arguments, or with those
            of ``batch`` and ``sequence`` that it names. It returns the module, or the module and
            its inputs, or these and a function from the output to a loss.
        batch: sequences, for a factory that wants it, and for token ids where it gives no inputs.
        sequence: tokens of each.
        strategy: ``single`` or ``fsdp2``; units of sharding are the modules of each ModuleList.
        ranks: that share the states under fsdp2.
        checkpoint: ``none`` or ``full``, per module of each ModuleList.
        precision: ``bf16``, ``fp32``, ``autocast`` (single), ``mixed`` (fsdp2).
        optimizer: ``adamw`` or ``sgd``.

    Returns:
        ``parameters_count``, ``peak_bytes``, ``categories_bytes``, ``torch``, ``units_count``.

    Raises:
        UsageError: an option that this cannot track.
        CaptureError: torch is missing, or the user's code failed; the message is its last line.
    """
    checks = (
        ("strategy", strategy, STRATEGIES),
        ("checkpointing", checkpoint, ("none", "full")),
        ("precision", precision, PRECISIONS),
        ("optimizer", optimizer, ("adamw", "sgd")),
    )
    for what, value, known in checks:
        if value not in known:
            raise UsageError(
                f"a captured module's {what} is one of {', '.join(known)}, found {value!r}"
            )
    if (precision == "mixed") != (strategy == "fsdp2") and precision in ("mixed", "autocast"):
        raise UsageError(
            f"precision {precision} contradicts strategy {strategy}: single has bf16, fp32 and "
            "autocast, fsdp2 has bf16, fp32 and mixed"
        )
    if not all(module.partition(":")):
        raise UsageError(f"--module {module!r}: expected package.module:factory")
    request = {
        "module": module,
        "batch": batch,
        "sequence": sequence,
        "strategy": strategy,
        "ranks": ranks,
        "checkpoint": checkpoint,
        "precision": precision,
        "optimizer": optimizer,
    }
    return in_child("chopper.collectors.fake_memory", request)


def in_child(program: str, request: dict[str, Any]) -> dict[str, Any]:
    """Run a module of ours with a request, and read the one line that it answers with.

    Raises:
        CaptureError: torch is missing, or the user's code failed; the message is its last line.
    """
    module = request["module"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    try:
        done = subprocess.run(
            own_python(program, json.dumps(request)),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise CaptureError(f"--module {module}: did not end within {_TIMEOUT_S} s") from exc
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not lines:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise CaptureError(
            f"--module {module}: the capture ended with exit code {done.returncode}"
            + (f": {said[-1].strip()}" if said else "")
        )
    found: dict[str, Any] = json.loads(lines[-1].removeprefix(_MARK))
    if "error" in found:
        raise CaptureError(f"--module {module}: {found['error']}")
    return found


_MARK = "chopper-fake-memory "


def build(request: dict[str, Any]) -> tuple[Any, Any, Any]:
    """In the child: the user's module, its inputs, and its loss function or None."""
    import inspect

    import torch

    place, _, name = request["module"].partition(":")
    sys.path.insert(0, str(Path.cwd()))
    factory = getattr(importlib.import_module(place), name)
    takes = inspect.signature(factory).parameters
    made = factory(**{k: request[k] for k in ("batch", "sequence") if k in takes})
    parts = made if isinstance(made, tuple) else (made,)
    module = parts[0]
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"the factory returned {type(module).__name__}, expected a torch module")
    if len(parts) > 1:
        inputs = parts[1] if isinstance(parts[1], tuple | list) else (parts[1],)
    else:
        kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        table = next((m for m in module.modules() if isinstance(m, kinds)), None)
        if table is None:
            raise TypeError(
                "the factory returned no inputs and the module has no embedding to make token "
                "ids for; return (module, inputs)"
            )
        inputs = (torch.randint(0, table.num_embeddings, (request["batch"], request["sequence"])),)
    return module, inputs, parts[2] if len(parts) > 2 else None


def _units(module: Any) -> list[tuple[Any, str]]:
    """Return each module of the outermost ModuleLists by place: the units of sharding."""
    import torch

    found: list[tuple[Any, str]] = []
    for name, child in module.named_children():
        if isinstance(child, torch.nn.ModuleList):
            found += [(child, str(i)) for i in range(len(child))]
        else:
            found += [(owner, n) for owner, n in _units(child)] if name else []
    return found


def loss_of(output: Any, function: Any) -> Any:
    """A scalar to go backward from: the user's, the output's own, cross-entropy, or the sum."""
    import torch

    if function is not None:
        return function(output)
    if hasattr(output, "loss") and output.loss is not None:
        return output.loss
    if hasattr(output, "logits"):
        output = output.logits
    if isinstance(output, tuple | list):
        output = output[0]
    if not isinstance(output, torch.Tensor):
        raise TypeError(
            f"the module returned {type(output).__name__}; give a loss: (module, inputs, loss)"
        )
    if output.dim() == 3:
        targets = torch.zeros(output.shape[:-1], dtype=torch.int64).flatten()
        return torch.nn.functional.cross_entropy(output.flatten(0, 1).float(), targets)
    return output.float().sum()


def _track(request: dict[str, Any]) -> dict[str, Any]:
    """In the child: two steps to settle, and one to look at."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker

    fsdp = request["strategy"] == "fsdp2"
    mesh = None
    if fsdp:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group(
            "fake", rank=0, world_size=request["ranks"], store=FakeStore()
        )
        mesh = init_device_mesh("cpu", (request["ranks"],))
    precision = request["precision"]
    peaks: list[dict[str, int]] = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16 if precision == "bf16" else torch.float32)
        module, inputs, loss_function = build(request)
        torch.set_default_dtype(torch.float32)
        count = sum(p.numel() for p in module.parameters())
        units = _units(module)
        if request["checkpoint"] == "full":
            from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
                checkpoint_wrapper,
            )

            for owner, place in units:
                setattr(owner, place, checkpoint_wrapper(getattr(owner, place)))
        if fsdp:
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            policy = (
                MixedPrecisionPolicy(torch.bfloat16, torch.float32)
                if precision == "mixed"
                else MixedPrecisionPolicy()
            )
            for owner, place in units:
                fully_shard(getattr(owner, place), mesh=mesh, mp_policy=policy)
            fully_shard(module, mesh=mesh, mp_policy=policy)
        trained = [p for p in module.parameters() if p.requires_grad]
        adamw = request["optimizer"] == "adamw"
        optimizer = (torch.optim.AdamW if adamw else torch.optim.SGD)(trained, lr=1e-3)
        # DTensor runs an operator once more, whole, when it first meets it: settle untracked.
        for _ in range(2):
            tracker: Any = FSDPMemTracker(module, optimizer) if fsdp else MemTracker()
            if fsdp:
                tracker.track_inputs(tuple(inputs))
            else:
                tracker.track_external(module, optimizer)
            with tracker:
                for _ in range(_STEPS - 1):
                    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
                        loss = loss_of(module(*inputs), loss_function)
                    loss.backward()
                    del loss
                    optimizer.step()
                    optimizer.zero_grad()
                    tracker.reset_mod_stats()
            snapshot = next(iter(tracker.get_tracker_snapshot("peak").values()))
            peaks.append({str(k).rpartition(".")[2]: int(v) for k, v in snapshot.items()})
    peak = min(peaks, key=lambda p: p["Total"])
    categories: dict[str, int] = {}
    for kind, size in peak.items():
        if kind != "Total" and size:
            category = _CATEGORIES.get(kind, "temporary")
            categories[category] = categories.get(category, 0) + size
    return {
        "parameters_count": int(count),
        "peak_bytes": sum(categories.values()),
        "categories_bytes": categories,
        "units_count": len(units),
        "torch": str(torch.__version__),
    }


_NO_VALUES = (
    "asks a tensor for its value (.item(), bool(), tolist()), expected shapes alone: a captured "
    "module computes nothing; keep the value on the device (torch.where), or leave the line out in "
    "the factory"
)


def _place(exc: BaseException) -> str:
    """Return the line of the user's code at which an error began: the innermost frame that is
    neither torch's nor ours.
    """
    import traceback

    import torch

    ours = (str(Path(torch.__file__).parent), str(Path(__file__).resolve().parent))
    frames = [
        f
        for f in traceback.extract_tb(exc.__traceback__)
        if not str(Path(f.filename).resolve()).startswith(ours) and not f.filename.startswith("<")
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "the module"


def answer(function: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The child: one request in, one line out."""
    request = json.loads(sys.argv[1])
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = function(request)
    except ModuleNotFoundError as exc:
        missing = exc.name or str(exc)
        remedy = "; install it: pip install 'chopper-profiler[torch]'" if missing == "torch" else ""
        found = {"error": f"module {missing} not found{remedy}"}
    except Exception as exc:  # noqa: BLE001 - the user's code, which may raise anything
        text = str(exc).strip().splitlines()
        found = {"error": f"{type(exc).__name__}: {text[0] if text else ''}".rstrip(": ")}
        if type(exc).__name__ == "DataDependentOutputException":
            found = {"error": f"{_place(exc)}: {_NO_VALUES}"}
    sys.stdout.write(_MARK + json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    answer(_track)
