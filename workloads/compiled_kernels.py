"""Kernels that torch.compile writes for GPUs, compiled ahead of time on a machine that has none.

Inductor is told that a GPU is there, and writes the Triton kernels that it would write for one, for
one forward and backward pass on CPU tensors. Triton compiles each of them to the machine code of
every target, which needs no GPU; its interpreter runs them, and the results are compared with those
of eager PyTorch. All of it is private to PyTorch (``torch._inductor``) and changes with its
versions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from chopper.collectors import fake_tensors
from chopper.errors import CaptureError

_IN_TRITON = (
    *("abs", "ceil", "cos", "erf", "exp", "exp2", "floor", "fma"),
    *("log", "log2", "rsqrt", "sin", "sqrt"),
)
"""Functions of the device's library, which the interpreter lacks, that are Triton's own, too."""

Calls = Counter[tuple[str, str, str, str]]
"""Operators and kernels with their arguments, as Kineto records them, and the calls of each."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One training step of a module, as eager PyTorch and as torch.compile launch it."""

    eager: list[dict[str, Any]]
    """Operators with their calls, as :func:`chopper.collectors.fake_tensors.rows_of`."""
    compiled: list[dict[str, Any]]
    """Triton kernels, and calls of libraries that torch.compile leaves, such as products."""
    captured_count: int
    """Operators in the captured graphs, forward and backward."""
    kernels: dict[str, Kernel]


class Pass:
    """Forward and backward of a module, eager or compiled."""

    def __init__(self, module: torch.nn.Module, *inputs: torch.Tensor) -> None:
        self._inputs = inputs
        self.trained = [p for p in module.parameters() if p.requires_grad]

        def loss_of(*values: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = module(*values).float().square().mean()
            return loss

        self._eager: Callable[..., torch.Tensor] = loss_of
        # Where the graph breaks, operators run between graphs that nothing here would count.
        self._compiled: Callable[..., torch.Tensor] = torch.compile(loss_of, fullgraph=True)

    def run(self, *, compiled: bool) -> float:
        """Run both passes, and return the loss."""
        for p in self.trained:
            p.grad = None
        loss = (self._compiled if compiled else self._eager)(*self._inputs)
        loss.backward()
        return float(loss.detach())


def compile_kernels(step: Pass) -> Compiled:
    """Count the operators and kernels of a step, eager and compiled by Inductor with Triton."""
    eager: Calls = Counter()
    calls: Calls = Counter()
    operators: Counter[str] = Counter()
    step.run(compiled=False)
    with fake_tensors.noted(eager):
        step.run(compiled=False)
    with _inductor(calls, operators) as kernels:
        step.run(compiled=True)
    return Compiled(
        eager=fake_tensors.rows_of(eager),
        compiled=fake_tensors.rows_of(calls),
        captured_count=operators.total(),
        kernels=kernels,
    )


def interpreter_errors(step: Pass) -> tuple[float, float]:
    """Run a step's Triton kernels in the interpreter, and compare with eager PyTorch.

    The environment has ``TRITON_INTERPRET=1`` before Triton is imported.

    Returns:
        Relative difference of the loss, and that of the gradient that differs most: the norm of
        the difference over its own. A value that is not a number stays one.
    """
    import triton.language as tl
    from triton.language.extra import libdevice

    def at_call(name: str) -> Callable[..., Any]:  # the interpreter replaces it later
        return lambda *values: getattr(tl, name)(*values)

    for name in _IN_TRITON:
        setattr(libdevice, name, at_call(name))
    loss = step.run(compiled=False)
    expected = [p.grad for p in step.trained]
    with _inductor(Counter(), Counter()):
        compiled_loss = step.run(compiled=True)
    errors = [
        (p.grad - gradient).norm() / gradient.norm()
        for p, gradient in zip(step.trained, expected, strict=True)
        if p.grad is not None and gradient is not None and float(gradient.norm())
    ]
    # torch.max, unlike Python's, does not hide one that is not a number behind others.
    return abs(compiled_loss - loss) / abs(loss), float(torch.stack(errors).max())


class Kernel:
    """A Triton kernel of Inductor in place of the one that would be launched."""

    def __init__(self, name: str, tuner: Any, calls: Calls) -> None:
        self.name, self._tuner, self._calls = name, tuner, calls

    def run(self, *arguments: Any, stream: Any = None) -> None:
        """Count a call; in the interpreter, also compute its result."""
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

    def code_bytes(self, target: str) -> int:
        """Compile for a target (``sm_90``, ``gfx942``); return the size of the machine code.

        In the first configuration that Inductor would try: choosing another takes the device.

        Raises:
            CaptureError: the compiler's message, if it refuses the kernel.
        """
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        config, meta = self._tuner.configs[0], self._tuner.triton_meta
        nvidia = target.startswith("sm_")
        source = ASTSource(
            fn=self._tuner.fn,
            signature=meta["signature"],
            constexprs={**meta.get("constants", {}), **config.kwargs},
            attrs=meta["configs"][0],
        )
        try:
            binary = triton.compile(
                source,
                target=GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
                if nvidia
                else GPUTarget("hip", target, 64),
                options={"num_warps": config.num_warps, "num_stages": config.num_stages},
            )
        except Exception as exc:  # a compiler's, of any type
            reason = (str(exc).strip() or type(exc).__name__).splitlines()[0]
            raise CaptureError(f"{self.name} does not compile for {target}: {reason}") from exc
        return len(binary.asm["cubin" if nvidia else "hsaco"])


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

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def _inductor(calls: Calls, operators: Counter[str]) -> Iterator[dict[str, Kernel]]:
    """Have Inductor write Triton, and count its kernels, library calls and captured operators.

    Yields:
        Triton kernels by name.
    """
    from unittest.mock import patch

    from torch._inductor import async_compile, codecache, config, output_code
    from triton.runtime.driver import driver

    kernels: dict[str, Kernel] = {}
    by_source: dict[tuple[str, str], Kernel] = {}

    def load(_self: Any, name: str, source: str, device_str: str = "") -> Kernel:
        del device_str
        if (name, source) not in by_source:  # each graph numbers its kernels anew
            tuner = codecache._load_triton_kernel_from_source(name, source)
            alike = sum(name == other for other, _ in by_source)
            unique = f"{name}.{alike + 1}" if alike else name
            by_source[name, source] = kernels[unique] = Kernel(unique, tuner, calls)
        return by_source[name, source]

    run = output_code.CompiledFxGraph.__call__

    def counted(self: Any, inputs: Any) -> Any:
        with fake_tensors.noted(calls):
            return run(self, inputs)

    def captured(nodes: Any) -> None:
        operators.update(str(node.target) for node in nodes.nodes if node.op == "call_function")

    driver.set_active(_AbsentGpu())
    with (
        config.patch(
            fx_graph_cache=False, post_grad_custom_post_pass=captured, cpu_backend="triton"
        ),
        patch.object(async_compile.AsyncCompile, "triton", load),
        patch.object(output_code.CompiledFxGraph, "__call__", counted),
    ):
        yield kernels
