"""Kernels that torch.compile makes of a user's module: for this CPU, and ahead of time for GPUs.

A child process captures one forward and backward pass of the module, on CPU tensors, and has
TorchInductor compile it. For GPUs, Inductor is told that a GPU is there, and writes the Triton
kernels that it would write for one; Triton compiles each of them to the machine code of every
target, which needs no GPU. Another child runs the same kernels in Triton's interpreter, whose
results are held against those of eager PyTorch. All of it is private to PyTorch
(``torch._inductor``) and changes with its versions.
"""

from __future__ import annotations

import math
import re
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from chopper.collectors import fake_tensors
from chopper.errors import CaptureError
from chopper.storage.caches import scratch

TARGETS = {
    "nvidia-a100-sxm4-80gb": "sm_80",
    "nvidia-h100-sxm": "sm_90",
    "nvidia-h200-sxm": "sm_90",
    "nvidia-b200": "sm_100",
    "amd-mi250x": "gfx90a",
    "amd-mi300x": "gfx942",
    "amd-mi325x": "gfx942",
    "amd-mi355x": "gfx950",
}
"""Device → the architecture that Triton compiles for."""

_REFERENCE_TOKENS = 16
"""The interpreter runs a kernel's programs one by one in Python: shorter sequences suffice."""
_IN_TRITON = (
    *("abs", "ceil", "cos", "erf", "exp", "exp2", "floor", "fma"),
    *("log", "log2", "rsqrt", "sin", "sqrt"),
)
"""Functions of the device's library, which the interpreter lacks, that are Triton's own, too."""
_MEASURE_S = 1.0
_LEAST_ROUNDS = 5
_FUSED = re.compile(r"Original ATen: \[([^\[\]]*)\]")
_KERNEL = re.compile(r"^(\w+) = async_compile\.triton\(")
_CPP_KERNEL = re.compile(r"^\w+ = async_compile\.cpp", re.MULTILINE)


def compiled_kernels(
    module: str, *, batch: int, sequence: int, precision: str, targets: list[str]
) -> dict[str, Any]:
    """Compile a training step's forward and backward with torch.compile.

    Args:
        module, batch, sequence, precision: as for
            :func:`chopper.collectors.fake_tensors.capture_operators`.
        targets: architectures, as in :data:`TARGETS`.

    Returns:
        ``eager`` and ``compiled``: operators with their calls, kernels of Inductor among them, as
        :func:`~chopper.collectors.fake_tensors.capture_operators` gives them; ``captured_count``,
        operators of the captured graphs; ``kernels``, each with ``name``, ``operators``,
        ``call_count`` and for each target ``registers_count``, ``shared_bytes`` and
        ``code_bytes``, or ``reason``; ``cpu``, times and kernels on this CPU; ``reference``,
        differences from eager PyTorch in Triton's interpreter; ``element_bytes``, ``versions``.

    Raises:
        UsageError, CaptureError: as ``capture_operators``.
    """
    request: dict[str, Any] = {"module": module, "batch": batch, "precision": precision}
    with scratch("kernels") as folder:
        # Of this capture alone: what others compiled for the same code is not taken.
        variables = {
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TRITON_INTERPRET": "0",
        }
        made = fake_tensors.in_child(
            __name__, variables, task="kernels", sequence=sequence, targets=targets, **request
        )
        short = min(sequence, _REFERENCE_TOKENS)
        interpreted = {**variables, "TRITON_INTERPRET": "1"}
        try:
            reference = fake_tensors.in_child(
                __name__, interpreted, task="reference", sequence=short, **request
            )
        except CaptureError as exc:  # a function of the device's library that Triton lacks
            reference = {"reason": str(exc)}
    return {**made, "reference": reference}


class _Step:
    """A forward and backward pass of a module, run as often as wanted."""

    def __init__(self, request: dict[str, Any]) -> None:
        import torch

        torch.manual_seed(0)
        module, self._inputs, function = fake_tensors.built_module(request)
        self.trained = [p for p in module.parameters() if p.requires_grad]
        if not self.trained:
            raise ValueError("the module has no parameter that requires a gradient")
        autocast = request["precision"] == "autocast"

        def loss_of(*inputs: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return fake_tensors.loss_of(module(*inputs), function)

        self._eager: Callable[..., Any] = loss_of
        # Where the graph breaks, operators run between graphs that nothing here would count.
        self._compiled: Callable[..., Any] = torch.compile(loss_of, fullgraph=True)

    def run(self, *, compiled: bool) -> Any:
        """Run both passes, and return the loss."""
        loss = (self._compiled if compiled else self._eager)(*self._inputs)
        loss.backward()
        return loss.detach()

    def gradients(self) -> list[Any]:
        """Return the gradients, and forget them."""
        gradients = [p.grad for p in self.trained]
        for p in self.trained:
            p.grad = None
        return gradients


class _Kernel:
    """A Triton kernel of Inductor in place of the one that would be launched."""

    def __init__(self, name: str, tuner: Any, calls: Counter[tuple[str, str, str, str]]) -> None:
        self.name, self._tuner, self._calls = name, tuner, calls

    def run(self, *arguments: Any, stream: Any = None) -> None:
        """Count a call; in the interpreter, also do what it does."""
        del stream
        self._calls[self.name, *fake_tensors.described(arguments)] += 1
        if hasattr(self._tuner.fn, "rewrite"):  # interpreted
            self._interpret(arguments)

    def _interpret(self, arguments: tuple[Any, ...]) -> None:
        from torch._inductor.runtime.triton_heuristics import GridExpr

        config = self._tuner.configs[0]
        named = dict(zip(self._tuner.fn.arg_names, arguments, strict=False))
        grid = GridExpr.from_meta(self._tuner.inductor_meta, config).eval_slow(named)
        self._tuner.fn[grid](*arguments, **config.kwargs)

    def compiled(self, target: str) -> dict[str, Any]:
        """Compile for a target, with the first configuration: choosing one takes the device."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        config, meta = self._tuner.configs[0], self._tuner.triton_meta
        number = target.removeprefix("sm_")
        device = (
            GPUTarget("cuda", int(number), 32)
            if target.startswith("sm_")
            else GPUTarget("hip", target, 64)
        )
        source = ASTSource(
            fn=self._tuner.fn,
            signature=meta["signature"],
            constexprs={**meta.get("constants", {}), **config.kwargs},
            attrs=meta["configs"][0],
        )
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        try:
            made = triton.compile(source, target=device, options=options)
        except Exception as exc:  # noqa: BLE001 - a compiler's, of any type
            return {"reason": (str(exc).strip() or type(exc).__name__).splitlines()[0]}
        return {
            "registers_count": _registers(target, made.asm),
            "shared_bytes": int(made.metadata.shared),
            "code_bytes": len(made.asm["cubin" if "cubin" in made.asm else "hsaco"]),
        }


def _registers(target: str, asm: dict[str, Any]) -> int | None:
    """Return the registers of a thread: vector registers on AMD; None where nobody says."""
    if "amdgcn" in asm:
        said = re.search(r"\.vgpr_count:\s+(\d+)", asm["amdgcn"])
    else:
        from triton.backends.nvidia.compiler import get_ptxas

        number = int(target.removeprefix("sm_"))
        suffix = "a" if number >= 90 else ""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "kernel.ptx"
            source.write_text(asm["ptx"])
            name = f"--gpu-name={target}{suffix}"
            command = [get_ptxas(number).path, "-v", name, str(source), "-o", "/dev/null"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = re.search(r"Used (\d+) registers", done.stderr)
    return int(said[1]) if said else None


class _AbsentGpu:
    """Triton's driver of a GPU that is not there, so that Inductor writes Triton kernels."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")


@contextmanager
def _inductor(
    calls: Counter[tuple[str, str, str, str]], operators: Counter[str], *, triton: bool
) -> Iterator[tuple[dict[str, _Kernel], list[str]]]:
    """Have Inductor's kernels and library calls counted, and with ``triton`` written in Triton.

    Yields:
        Triton kernels by name, and the code that Inductor wrote.
    """
    from unittest.mock import patch

    from torch._inductor import async_compile, codecache, config, graph, output_code

    kernels: dict[str, _Kernel] = {}
    codes: list[str] = []
    by_source: dict[tuple[str, str], _Kernel] = {}

    def load(_self: Any, name: str, source: str, device_str: str = "") -> _Kernel:
        del device_str
        if (name, source) not in by_source:  # each graph numbers its kernels anew
            tuner = codecache._load_triton_kernel_from_source(name, source)
            alike = sum(name == other for other, _ in by_source)
            own = f"{name}.{alike + 1}" if alike else name
            by_source[name, source] = kernels[own] = _Kernel(own, tuner, calls)
        return by_source[name, source]

    run = output_code.CompiledFxGraph.__call__

    def counted(self: Any, inputs: Any) -> Any:
        with fake_tensors.noted(calls):
            return run(self, inputs)

    def captured(nodes: Any) -> None:
        operators.update(str(node.target) for node in nodes.nodes if node.op == "call_function")

    settings = {"fx_graph_cache": False, "post_grad_custom_post_pass": captured}
    with ExitStack() as stack:
        if triton:
            from triton.runtime.driver import driver

            driver.set_active(_AbsentGpu())
            settings["cpu_backend"] = "triton"
            stack.enter_context(patch.object(async_compile.AsyncCompile, "triton", load))
        stack.enter_context(config.patch(settings))
        stack.enter_context(patch.object(output_code.CompiledFxGraph, "__call__", counted))
        stack.enter_context(
            patch.object(graph.GraphLowering, "save_output_code", staticmethod(codes.append))
        )
        yield kernels, codes


def _fused(codes: list[str]) -> dict[str, str]:
    """Return kernel → the operators that it computes, which Inductor's code names above it."""
    operators, fused = "", {}
    for line in (line for code in codes for line in code.splitlines()):
        if (said := _FUSED.search(line)) is not None:
            operators = said[1].replace("aten.", "")
        elif (kernel := _KERNEL.match(line)) is not None:
            fused[kernel[1]] = operators
    return fused


def _kernels(request: dict[str, Any]) -> dict[str, Any]:
    """In a child: write Triton kernels, compile them for all targets, and measure the CPU's."""
    import torch
    import triton

    step = _Step(request)
    eager: Counter[tuple[str, str, str, str]] = Counter()
    calls: Counter[tuple[str, str, str, str]] = Counter()
    operators: Counter[str] = Counter()
    step.run(compiled=False)
    with fake_tensors.noted(eager):
        step.run(compiled=False)
    with _inductor(calls, operators, triton=True) as (kernels, codes):
        step.run(compiled=True)
    fused = _fused(codes)
    counts: Counter[str] = Counter()
    for (name, *_), count in calls.items():
        counts[name] += count
    return {
        "eager": fake_tensors.rows_of(eager),
        "compiled": fake_tensors.rows_of(calls),
        "captured_count": operators.total(),
        "kernels": [
            {
                "name": name,
                "operators": fused.get(name.partition(".")[0]),
                "call_count": counts[name],
                "targets": {target: kernel.compiled(target) for target in request["targets"]},
            }
            for name, kernel in kernels.items()
        ],
        "cpu": _on_cpu(request),
        "element_bytes": step.trained[0].element_size(),
        "versions": {"torch": str(torch.__version__), "triton": str(triton.__version__)},
    }


def _on_cpu(request: dict[str, Any]) -> dict[str, int]:
    """Time eager PyTorch and Inductor's C++ on this CPU, in turns."""
    import torch

    torch.compiler.reset()  # what was compiled in Triton
    calls: Counter[tuple[str, str, str, str]] = Counter()
    step = _Step(request)
    with _inductor(calls, Counter(), triton=False) as (_, codes):
        step.run(compiled=True)
    times_ns: dict[bool, list[int]] = {False: [], True: []}
    end = time.perf_counter() + _MEASURE_S
    while time.perf_counter() < end or len(times_ns[True]) < _LEAST_ROUNDS:
        for compiled, of in times_ns.items():
            begin_ns = time.perf_counter_ns()
            step.run(compiled=compiled)
            of.append(time.perf_counter_ns() - begin_ns)
    return {
        "eager_ns": round(statistics.median(times_ns[False])),
        "compiled_ns": round(statistics.median(times_ns[True])),
        "rounds_count": len(times_ns[True]),
        "kernel_count": sum(len(_CPP_KERNEL.findall(code)) for code in codes),
        "library_call_count": calls.total(),
    }


def _reference(request: dict[str, Any]) -> dict[str, Any]:
    """In a child: run the Triton kernels in the interpreter, and hold them against eager."""
    import triton.language as tl
    from triton.language.extra import libdevice

    def late(name: str) -> Callable[..., Any]:  # found at each call: the interpreter replaces it
        return lambda *values: getattr(tl, name)(*values)

    for name in _IN_TRITON:
        setattr(libdevice, name, late(name))
    step = _Step(request)
    loss = float(step.run(compiled=False))
    expected = step.gradients()
    with _inductor(Counter(), Counter(), triton=True):
        compiled_loss = float(step.run(compiled=True))
    return {
        "tokens_count": request["batch"] * request["sequence"],
        **differences((loss, expected), (compiled_loss, step.gradients())),
    }


def differences(
    expected: tuple[float, list[Any]], found: tuple[float, list[Any]]
) -> dict[str, Any]:
    """Return how far a loss and gradients are from those expected, which are not all zero.

    Raises:
        ArithmeticError: one of them is not a finite number.
    """
    loss = expected[0]
    apart = [
        float((one - other).norm() / other.norm())
        for one, other in zip(found[1], expected[1], strict=True)
        if other is not None and float(other.norm())
    ]
    # The largest of several would hide one that is not a number.
    for what, value in (("eager", loss), ("their", found[0]), *(("their", of) for of in apart)):
        if not math.isfinite(value):
            raise ArithmeticError(f"{what} loss or gradient is not a finite number")
    return {
        "loss_difference_ratio": abs(found[0] - loss) / abs(loss) if loss else None,
        "gradient_difference_ratio": max(apart, default=None),
    }


if __name__ == "__main__":
    fake_tensors.answer({"kernels": _kernels, "reference": _reference})
