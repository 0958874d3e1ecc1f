"""The models as a table, for the documentation: family, what is counted, for which operators."""

from __future__ import annotations

import inspect
from typing import NamedTuple

from chopper.analyzers.work import MODELS, attention, conv, family, gemm, vector


class Entry(NamedTuple):
    """One model.

    Attributes:
        family: as `Work.family`.
        counts: the first sentence or two of the model's documentation.
        operators: names that it models, sorted.
    """

    family: str
    counts: str
    operators: tuple[str, ...]


_FAMILIES = ("gemm", "conv", "sdpa", "moe", "vector")
_BY_PREFIX = (
    ("gemm", gemm.template, "triton_tem_*"),
    ("vector", vector._foreach, "aten::_foreach_*"),
    ("vector", vector._triton, ", ".join(f"{prefix}*" for prefix in vector._TRITON)),
)
# Classes of models say what their fields mean; what one instance counts is in its module.
_BY_CLASS = {
    attention.Attention: "2·pairs·(d_qk + d_v) forward, 2·pairs·(3·d_qk + 2·d_v) backward per "
    "query head; pairs that the mask keeps.",
    conv._Forward: "2·N·grid·|weight|, grid the output's positions (transposed: the input's).",
    conv._Backward: "The same once per wanted gradient.",
}


def catalogue() -> list[Entry]:
    """All models, family by family, those with most operators first."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, model in MODELS.items():
        names.setdefault((family(name) or "", _counts(model)), []).append(name)
    for kind, model, prefix in _BY_PREFIX:
        names.setdefault((kind, _counts(model)), []).append(prefix)
    entries = [Entry(kind, text, tuple(sorted(found))) for (kind, text), found in names.items()]
    return sorted(entries, key=lambda e: (_FAMILIES.index(e.family), -len(e.operators), e.counts))


def _counts(model: object) -> str:
    text = _BY_CLASS.get(type(model))
    if text is None:
        text = (inspect.getdoc(model) or "").split("\n\n")[0]
    return " ".join(text.split())
