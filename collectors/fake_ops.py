"""The operators of a user's training step under fake tensors: a table that belongs to no device.

As :mod:`chopper.collectors.fake_memory`, in a child process: forward, backward and update run once
to settle and once to be looked at, by a dispatch mode that writes down each operator that would
launch a kernel, with the shapes and types of its arguments as Kineto has them.
"""

from __future__ import annotations

import json
from typing import Any

from chopper.collectors.fake_memory import answer, build, in_child, loss_of
from chopper.errors import UsageError


def capture_operators(
    module: str, *, batch: int, sequence: int, precision: str = "bf16"
) -> dict[str, Any]:
    """Write down the operators of one training step.

    Args:
        module: ``package.module:factory``, as :func:`chopper.collectors.fake_memory.capture` has
            it.
        batch: sequences.
        sequence: tokens of each.
        precision: ``bf16``, ``fp32`` or ``autocast``.

    Returns:
        ``parameters_count``, ``element_bytes`` of a parameter, ``torch``, and ``operators``: unique
        ``op``, ``input_dims``, ``input_types``, ``concrete_inputs`` (JSON texts) and
        ``call_count``.

    Raises:
        UsageError: no such precision, or no factory named.
        CaptureError: torch is missing, or the user's code failed.
    """
    if precision not in ("bf16", "fp32", "autocast"):
        raise UsageError(f"precision {precision!r}: expected bf16, fp32 or autocast")
    if not all(module.partition(":")):
        raise UsageError(f"--module {module!r}: expected package.module:factory")
    request = {"module": module, "batch": batch, "sequence": sequence, "precision": precision}
    return in_child("chopper.collectors.fake_ops", request)


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
    (
        "detach",
        "alias",
        "empty",
        "empty_like",
        "empty_strided",
        "_unsafe_view",
        "_local_scalar_dense",
    )
)
_NOT_OPERATORS = ("prim", "profiler")


def _described(arguments: tuple[Any, ...]) -> tuple[str, str, str]:
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


def _write_down(request: dict[str, Any]) -> dict[str, Any]:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: dict[tuple[str, str, str, str], int] = {}

    class Notes(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = f"{func.namespace}::{func._opname}"
            launches = func.namespace not in _NOT_OPERATORS and func._opname not in _NO_KERNEL
            if launches and not func.is_view:
                key = (name, *_described(args))
                counts[key] = counts.get(key, 0) + 1
            return func(*args, **(kwargs or {}))

    precision = request["precision"]
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16 if precision == "bf16" else torch.float32)
        module, inputs, function = build(request)
        torch.set_default_dtype(torch.float32)
        trained = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3, foreach=True)
        for _ in range(2):
            counts.clear()
            with Notes():
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
                    loss = loss_of(module(*inputs), function)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            del loss
    return {
        "parameters_count": sum(p.numel() for p in trained),
        "element_bytes": trained[0].element_size() if trained else 4,
        "torch": str(torch.__version__),
        "operators": [
            {
                "op": op,
                "input_dims": dims,
                "input_types": types,
                "concrete_inputs": values,
                "call_count": n,
            }
            for (op, dims, types, values), n in counts.items()
        ],
    }


if __name__ == "__main__":
    answer(_write_down)
