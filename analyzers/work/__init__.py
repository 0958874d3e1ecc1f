"""FLOP and bytes of one operator, from the shapes and types that a trace recorded.

    work = estimate("aten::mm", "[[8, 16], [16, 4]]", '["float", "float"]', None)
    work.flop_count    # 2·8·16·4 = 1024
    work.bytes_count   # (8·16 + 16·4 + 8·4)·4 = 896

Operators nest (aten::linear holds aten::addmm) and both levels are modelled: count each kernel
under the innermost modelled operator only. ``chopper/data/operators.json`` maps names to models
and the positions of their arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

from chopper.analyzers.work import attention, conv, gemm, indexing, vector
from chopper.analyzers.work.kernels import matmul_dtype
from chopper.analyzers.work.record import OPERATORS, Record, Shape, Unknown, Work, decode

__all__ = ["MATH_FAMILIES", "MODELS", "Work", "estimate", "family", "matmul_dtype"]

MATH_FAMILIES = frozenset(("gemm", "conv", "sdpa", "moe"))
"""Families whose FLOP make the ideal time of a step."""


def _function(name: str) -> Callable[..., Work]:
    modules = (attention, conv, gemm, indexing, vector)
    return next(getattr(m, name) for m in modules if hasattr(m, name))


MODELS: dict[str, partial[Work]] = {
    name: partial(_function(row.model), **row.arguments)
    for row in OPERATORS.operators
    for name in row.operators
}
_FAMILIES = {name: row.family for row in OPERATORS.operators for name in row.operators}
BY_PREFIX: tuple[tuple[str, str, Callable[[Record], Work]], ...] = (
    # TorchInductor's products made from Triton templates.
    ("triton_tem_", "gemm", gemm.template),
    ("aten::_foreach_", "vector", vector.foreach),
    *(
        (f"triton_{kind}_", "vector", vector.triton)
        for kind in ("poi", "red", "per", "spl", "for", "mix")
    ),
)
"""Operators known by the beginning of their names: family and model."""
BACKWARD_BY_FORWARD = frozenset(
    name.removesuffix("Backward")
    for name, kind in _FAMILIES.items()
    if kind in ("gemm", "sdpa") and name.endswith("Backward") and "::" not in name
)
"""Autograd functions whose backward nodes are modelled by their forward's arguments."""

_MOST = 1 << 56
"""More FLOP or bytes than any operator has: at 10 PFLOP/s it would take 7 s."""


def _model(name: str) -> tuple[str | None, Callable[[Record], Work] | None]:
    if name in MODELS:
        return _FAMILIES[name], MODELS[name]
    by_prefix = ((kind, model) for prefix, kind, model in BY_PREFIX if name.startswith(prefix))
    return next(by_prefix, (None, None))


def family(name: str) -> str | None:
    """The family that models operator `name`: "gemm", "conv", "sdpa", "moe", "vector" or None."""
    return _model(name)[0]


# A training step repeats the same few hundred calls; the texts are the key.
@lru_cache(maxsize=16384)
def estimate(
    name: str,
    input_dims: str | None,
    input_types: str | None,
    concrete_inputs: str | None,
    output_dims: Shape | None = None,
    element_bytes: int | None = None,
) -> Work | None:
    """The work of operator `name`, or None when no model knows the name.

    Args:
        name: as in the trace, e.g. "aten::addmm".
        input_dims: JSON text of args["Input Dims"] ("Input dims" in 2021), or None.
        input_types: JSON text of args["Input type"], or None.
        concrete_inputs: JSON text of args["Concrete Inputs"], or None.
        output_dims: the result's sizes where the caller knows them from elsewhere. Traces without
            concrete inputs lack a convolution's stride (its backward's first or second argument
            has the result's sizes) and cuDNN's weight gradient lacks the weight's sizes (the
            enclosing aten::cudnn_convolution_backward has them).
        element_bytes: width of the tensors' elements where the trace has no types (of some in
            2021) and the caller knows it from the kernel.

    Never raises: what cannot be known is None in the result, with its reason.
    """
    kind, model = _model(name)
    if kind is None or model is None:
        return None
    try:
        work = model(
            decode(name, input_dims, input_types, concrete_inputs, output_dims, element_bytes)
        )
    except Unknown as exc:
        return Work(kind, reason=str(exc))
    counts = (work.flop_count, work.useful_flop_count, work.bytes_count, work.unsized_element_count)
    if max(count or 0 for count in counts) >= _MOST:
        reason = "its shapes give more FLOP or bytes than any operator has"
        return Work(kind, reason=reason)
    return work
