"""A training step of a user's module under fake tensors: its peak memory; operators of a program.

The program runs, and no memory is used. A child process does it, because the user's module and
torch are imported there and nowhere else; it prints what it saw in one line. Memory is counted by
PyTorch's own MemTracker, or FSDPMemTracker on a process group that sends nothing; both are private
to PyTorch (``torch.distributed._tools``). Operators are written down by a dispatch mode: each that
would launch a kernel, with the shapes and types of its arguments as Kineto has them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
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
_TIMEOUT_S = 600
_MARK = "chopper-fake-tensors "


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
    """Track the memory of a user's module.

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
    for what, value, known in (
        ("strategy", strategy, ("single", "fsdp2")),
        ("checkpointing", checkpoint, ("none", "full")),
        ("precision", precision, ("bf16", "fp32", "autocast", "mixed")),
        ("optimizer", optimizer, ("adamw", "sgd")),
    ):
        if value not in known:
            raise UsageError(
                f"a captured module's {what} is one of {', '.join(known)}, found {value!r}"
            )
    if (precision == "mixed") != (strategy == "fsdp2") and precision in ("mixed", "autocast"):
        raise UsageError(
            f"precision {precision} contradicts strategy {strategy}: single has bf16, fp32 and "
            "autocast, fsdp2 has bf16, fp32 and mixed"
        )
    return _in_child(
        module=module,
        batch=batch,
        sequence=sequence,
        strategy=strategy,
        ranks=ranks,
        checkpoint=checkpoint,
        precision=precision,
        optimizer=optimizer,
    )


def _in_child(**request: Any) -> dict[str, Any]:
    """Run this module in a process of its own, and read the one line that it answers with."""
    module = request["module"]
    if not all(module.partition(":")):
        raise UsageError(f"--module {module!r}: expected package.module:factory")
    try:
        done = subprocess.run(
            own_python(__name__, json.dumps(request)),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"},
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise CaptureError(f"--module {module}: did not end within {_TIMEOUT_S} s") from exc
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not lines:
        messages = [line for line in done.stderr.splitlines() if line.strip()]
        raise CaptureError(
            f"--module {module}: the capture ended with exit code {done.returncode}"
            + (f": {messages[-1].strip()}" if messages else "")
        )
    answer: dict[str, Any] = json.loads(lines[-1].removeprefix(_MARK))
    if "error" in answer:
        raise CaptureError(f"--module {module}: {answer['error']}")
    return answer


def _built_module(request: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return the user's module, its inputs, and its loss function or None."""
    import inspect

    import torch

    bf16 = request["precision"] == "bf16"
    torch.set_default_dtype(torch.bfloat16 if bf16 else torch.float32)
    module_name, _, name = request["module"].partition(":")
    sys.path.insert(0, str(Path.cwd()))
    factory = getattr(importlib.import_module(module_name), name)
    takes = inspect.signature(factory).parameters
    result = factory(**{k: request[k] for k in ("batch", "sequence") if k in takes})
    parts = result if isinstance(result, tuple) else (result,)
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
    torch.set_default_dtype(torch.float32)
    return module, inputs, parts[2] if len(parts) > 2 else None


def _units(module: Any) -> list[tuple[Any, str]]:
    """Return each module of the outermost ModuleLists by place: the units of sharding."""
    import torch

    units: list[tuple[Any, str]] = []
    for name, child in module.named_children():
        if isinstance(child, torch.nn.ModuleList):
            units += [(child, str(i)) for i in range(len(child))]
        else:
            units += [(owner, n) for owner, n in _units(child)] if name else []
    return units


def _loss_of(output: Any, function: Any) -> Any:
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


def _train(
    request: dict[str, Any], module: Any, inputs: Any, function: Any, optimizer: Any
) -> None:
    """One training step."""
    import torch

    enabled = request["precision"] == "autocast"
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        loss = _loss_of(module(*inputs), function)
    loss.backward()
    del loss
    optimizer.step()
    optimizer.zero_grad()


def _shard(request: dict[str, Any], module: Any, units: list[tuple[Any, str]]) -> None:
    """Apply FSDP2 to each unit and to the module, on a process group that sends nothing."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (request["ranks"],))
    mixed = (torch.bfloat16, torch.float32) if request["precision"] == "mixed" else ()
    for part in (*(getattr(owner, name) for owner, name in units), module):
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(*mixed))


def _track(request: dict[str, Any]) -> dict[str, Any]:
    """In the child: two steps to settle, and one to look at."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker

    fsdp = request["strategy"] == "fsdp2"
    if fsdp:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group(
            "fake", rank=0, world_size=request["ranks"], store=FakeStore()
        )
    peaks: list[dict[str, int]] = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        module, inputs, function = _built_module(request)
        count = sum(p.numel() for p in module.parameters())
        units = _units(module)
        if request["checkpoint"] == "full":
            from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

            for owner, name in units:
                wrapped = checkpoint_wrapper.checkpoint_wrapper(getattr(owner, name))
                setattr(owner, name, wrapped)
        if fsdp:
            _shard(request, module, units)
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
                for _ in range(2):
                    _train(request, module, inputs, function, optimizer)
                    tracker.reset_mod_stats()
            snapshot = next(iter(tracker.get_tracker_snapshot("peak").values()))
            peaks.append({str(k).rpartition(".")[2]: int(v) for k, v in snapshot.items()})
    categories: Counter[str] = Counter()
    for kind, size in min(peaks, key=lambda p: p["Total"]).items():
        if kind != "Total" and size:
            categories[_CATEGORIES.get(kind, "temporary")] += size
    return {
        "parameters_count": int(count),
        "peak_bytes": categories.total(),
        "categories_bytes": categories,
        "units_count": len(units),
        "torch": str(torch.__version__),
    }


_TYPES = {
    "torch.float64": "double",
    "torch.float32": "float",
    "torch.float16": "c10::Half",
    "torch.bfloat16": "c10::BFloat16",
    "torch.int64": "long int",
    "torch.int32": "int",
    "torch.bool": "bool",
    "torch.uint8": "unsigned char",
    "torch.int8": "signed char",
}
_NO_KERNEL = frozenset(
    [
        "detach",
        "alias",
        "empty",
        "empty_like",
        "empty_strided",
        "_unsafe_view",
        "_local_scalar_dense",
    ]
)
_NOT_OPERATORS = ("prim", "profiler")


def described(arguments: tuple[Any, ...]) -> tuple[str, str, str]:
    """Arguments as Kineto records them: dims, types, concrete inputs."""
    import torch

    dims: list[Any] = []
    types: list[str] = []
    values: list[str] = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            dims.append(list(argument.shape))
            types.append(_TYPES.get(str(argument.dtype), str(argument.dtype)))
            values.append("")
        elif isinstance(argument, list | tuple) and any(
            isinstance(item, torch.Tensor) for item in argument
        ):
            dims.append([list(item.shape) for item in argument if item is not None])
            types.append("TensorList")
            values.append("")
        else:
            dims.append([])
            types.append("" if argument is None else "Scalar")
            values.append("" if argument is None else str(argument))
    return json.dumps(dims), json.dumps(types), json.dumps(values)


def noted(counts: Counter[tuple[str, str, str, str]]) -> Any:
    """Return a mode that counts each operator that would launch a kernel, by its arguments."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Notes(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = f"{func.namespace}::{func._opname}"
            launches = func.namespace not in _NOT_OPERATORS and func._opname not in _NO_KERNEL
            if launches and not func.is_view:
                counts[name, *described(args)] += 1
            return func(*args, **(kwargs or {}))

    return Notes()


def rows_of(counts: Mapping[tuple[str, str, str, str], int]) -> list[dict[str, Any]]:
    """Return counted operators as rows: ``op``, its arguments as JSON, ``call_count``."""
    columns = ("op", "input_dims", "input_types", "concrete_inputs")
    return [{**dict(zip(columns, key, strict=True)), "call_count": n} for key, n in counts.items()]


_NO_VALUES = (
    "reads the value of a tensor (.item(), bool(), tolist()), but a captured module has shapes "
    "only; keep the value on the device (torch.where), or leave the line out in "
    "the factory"
)


def _source_line(exc: BaseException) -> str:
    """Return the innermost line of the user's code, neither torch's nor ours, of an error."""
    import traceback

    import torch

    ours = (str(Path(torch.__file__).parent), str(Path(__file__).resolve().parent))
    frames = [
        f
        for f in traceback.extract_tb(exc.__traceback__)
        if not str(Path(f.filename).resolve()).startswith(ours) and not f.filename.startswith("<")
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "the module"


def _answer() -> None:
    """Be the child: one request in, one line out, and the process ends."""
    request = json.loads(sys.argv[1])
    try:
        with contextlib.redirect_stdout(sys.stderr):
            answer = _track(request)
    except ModuleNotFoundError as exc:
        missing = exc.name or str(exc)
        remedy = "; install it: pip install 'chopper-profiler[torch]'" if missing == "torch" else ""
        answer = {"error": f"module {missing} not found{remedy}"}
    except Exception as exc:  # noqa: BLE001 - the user's code, which may raise anything
        text = str(exc).strip().splitlines()
        answer = {"error": f"{type(exc).__name__}: {text[0] if text else ''}".rstrip(": ")}
        if type(exc).__name__ == "DataDependentOutputException":
            answer = {"error": f"{_source_line(exc)}: {_NO_VALUES}"}
    sys.stdout.write(_MARK + json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _answer()
