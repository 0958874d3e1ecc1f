"""FLOP and bytes of one operator, from the shapes and types that a trace recorded.

    work = estimate("aten::mm", "[[8, 16], [16, 4]]", '["float", "float"]', None)
    work.flop_count    # 2·8·16·4 = 1024
    work.bytes_count   # (8·16 + 16·4 + 8·4)·4 = 896

Operators nest (aten::linear holds aten::addmm) and both levels are modelled: count each kernel
under the innermost modelled operator only. One table maps names to models, `MODELS`.
"""

from __future__ import annotations

from functools import lru_cache

from chopper.analyzers.work import attention, conv, gemm, indexing, libraries, spatial, vector
from chopper.analyzers.work.kernels import matmul_dtype
from chopper.analyzers.work.record import Direction, Shape, Unknown, Work, decode

__all__ = ["MATH_FAMILIES", "MODELS", "Work", "estimate", "family", "matmul_dtype"]

MATH_FAMILIES = frozenset(("gemm", "conv", "sdpa", "moe"))
"""Families whose FLOP make the ideal time of a step."""

_VECTOR: dict[str, vector.Model] = {
    **vector.MODELS,
    **indexing.MODELS,
    **spatial.MODELS,
    **libraries.VECTOR_MODELS,
}

MODELS: dict[str, vector.Model] = {
    **_VECTOR,
    **gemm.MODELS,
    **conv.MODELS,
    **attention.MODELS,
    **libraries.GEMM_MODELS,
    **libraries.MOE_MODELS,
    **libraries.ATTENTION_MODELS,
}

_FAMILIES: dict[str, str] = {
    **dict.fromkeys(_VECTOR, "vector"),
    **dict.fromkeys(gemm.MODELS, "gemm"),
    **dict.fromkeys(conv.MODELS, "conv"),
    **dict.fromkeys(attention.MODELS, "sdpa"),
    **dict.fromkeys(libraries.GEMM_MODELS, "gemm"),
    **dict.fromkeys(libraries.MOE_MODELS, "moe"),
    **dict.fromkeys(libraries.ATTENTION_MODELS, "sdpa"),
}

_MOST = 1 << 56
"""More FLOP or bytes than any operator has: at 10 PFLOP/s it would take 7 s."""

_TEMPLATE = "triton_tem_"
"""TorchInductor's products made from Triton templates."""


def family(name: str) -> str | None:
    """The family that models operator `name`: "gemm", "conv", "sdpa", "moe", "vector" or None."""
    found = _FAMILIES.get(name)
    if found is None and name.startswith(_TEMPLATE):
        return "gemm"
    return found if found is not None else vector.compiled_family(name)


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
    kind = family(name)
    if kind is None:
        return None
    direction: Direction = "backward" if "backward" in name.lower() or "bwd" in name else "forward"
    other = gemm.template if name.startswith(_TEMPLATE) else vector.compiled
    model = MODELS.get(name, other)
    try:
        work = model(
            decode(name, input_dims, input_types, concrete_inputs, output_dims, element_bytes)
        )
    except Unknown as exc:
        return Work(kind, direction=direction, reason=str(exc))
    counts = (work.flop_count, work.useful_flop_count, work.bytes_count, work.unsized_element_count)
    if max(count or 0 for count in counts) >= _MOST:
        reason = "its shapes give more FLOP or bytes than any operator has"
        return Work(kind, direction=direction, reason=reason)
    return work
