"""Layers of a model: of each host span, by named regions or by modules of Python stacks."""

from __future__ import annotations

import numpy as np

from chopper.analyzers.trace import names
from chopper.analyzers.trace.backward import NodeMakers
from chopper.analyzers.trace.columns import matching
from chopper.analyzers.trace.passes import passes
from chopper.analyzers.trace.tables import HostSpans


def span_layers(host: HostSpans, makers: NodeMakers) -> tuple[np.ndarray, list[str]]:
    """Find the layer of each host span. HOST_SPAN -> codes into names, -1 for none; names."""
    if not len(host):
        return np.zeros(0, np.int32), []
    codes, values = host.names
    table: dict[str, int] = {}
    of_name = np.full(len(values) + 1, -1, dtype=np.int32)
    for i, value in enumerate(values):
        layer = names.layer_of(value)
        if layer is not None:
            of_name[i] = table.setdefault(layer, len(table))
    if table:
        span = host.nesting.inherited(passes.look_up(codes, of_name))
    else:
        span = _module_layers(host, table)
    return _inherit_backward(host, makers, span), list(table)


def _module_layers(host: HostSpans, table: dict[str, int]) -> np.ndarray:
    """Return layers from Python stacks: the outermost module whose class occurs more than once."""
    codes, values = host.names
    modules = {i: m for i, v in enumerate(values) if (m := names.module_of(v)) is not None}
    if not modules:
        return np.full(len(host), -1, dtype=np.int32)
    classes: dict[str, int] = {}
    for module in modules.values():
        name = module.rpartition("_")[0] or module
        classes[name] = classes.get(name, 0) + 1
    repeated = {i for i, m in modules.items() if classes[m.rpartition("_")[0] or m] > 1} or set(
        modules
    )
    mask = matching(codes, values, lambda v: names.module_of(v) is not None)
    chosen = np.isin(codes, list(repeated)) & mask
    top = host.nesting.topmost(chosen)
    of_name = np.full(len(values) + 1, -1, dtype=np.int32)
    for i, module in modules.items():
        of_name[i] = table.setdefault(module, len(table))
    return np.where(top >= 0, of_name[codes[top]], -1)


def _inherit_backward(host: HostSpans, makers: NodeMakers, span: np.ndarray) -> np.ndarray:
    """Give backward nodes the layer of the forward operator with their sequence number."""
    if not (span >= 0).any():
        return span
    given = np.full(len(host), -1, dtype=np.int32)
    given[makers.node] = span[makers.operator]
    return np.where(span < 0, host.nesting.inherited(given), span)
