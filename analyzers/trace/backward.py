"""Backward passes in a trace: which operators recorded each node, and which threads run them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chopper.analyzers.trace import names
from chopper.analyzers.trace.columns import first_with, pick, row_set
from chopper.analyzers.trace.tables import HostSpans


class NodeMakers(NamedTuple):
    """Backward nodes, and the forward operators that recorded them: rows of `host_span`."""

    node: np.ndarray
    operator: np.ndarray


def node_makers(host: HostSpans) -> NodeMakers:
    """Pair backward nodes with the forward operators of the same sequence number."""
    sequence = host.sequence_id
    node = np.flatnonzero((sequence >= 0) & host.named(names.is_backward))
    numbered = (sequence >= 0) & (host.forward_tid <= 0)
    numbered[node] = False
    # Operators that make no node share the next one's number: the last one made the node.
    forward = np.flatnonzero(numbered)[::-1]
    maker = pick(forward, first_with(sequence[forward], sequence[node]))
    return NodeMakers(node[maker >= 0], maker[maker >= 0])


def numbered_in_backward(host: HostSpans) -> np.ndarray:
    """Return a mask of the operators within backward that ran with gradients recorded.

    Such an operator has a sequence number. The ``apply`` of a custom function always has one, so it
    counts only if another operator of its backward node has one too, or if torch.compile made it.
    """
    backward = host.named(names.is_backward)
    numbered = host.of("cpu_op") & ~backward & (host.sequence_id >= 0) & (host.forward_tid <= 0)
    if not numbered.any():
        return numbered
    node = host.nesting.nearest(backward)
    numbered &= node >= 0
    sure = numbered & host.named(lambda name: "::" in name or name.startswith("CompiledFunction"))
    return numbered & row_set(node[sure], len(host))[node]


def double_backward(host: HostSpans, numbered: np.ndarray) -> np.ndarray:
    """Return a mask of the operators of a backward that is differentiated (``create_graph=True``).

    Within backward, grad mode is on where the forward is run again, and where the backward
    itself is to be differentiated. There, all operators of a node take sequence numbers; a
    node that runs the forward again computes its own gradient without any, or is named after
    checkpointing. Factory functions never take numbers.

    Args:
        host: the spans of one rank.
        numbered: from :func:`numbered_in_backward`.
    """
    nesting = host.nesting
    if not numbered.any():
        return numbered
    backward = host.named(names.is_backward)
    operator = host.of("cpu_op") & ~backward
    node = nesting.nearest(backward)
    above = pick(nesting.nearest(operator), nesting.parent)
    top = (
        operator
        & (node >= 0)
        & ((above < 0) | (nesting.depth[above] < nesting.depth[node]))
        & ~host.named(names.is_factory)
    )
    again = host.named(names.is_recomputation)
    computes_without = row_set(node[(top & (host.sequence_id < 0)) | again], len(host))
    computes_without |= host.named(lambda n: "Checkpoint" in n)
    return numbered & ~computes_without[node]


def main_thread(host: HostSpans, in_backward: np.ndarray) -> int:
    """Return the thread number on which the program runs: the one with the steps, else the busiest.

    Args:
        host: the spans of one rank.
        in_backward: mask of the spans whose phase is backward.
    """
    steps = host.named(lambda n: n.startswith("ProfilerStep"))
    working = host.of("cpu_op", "python", "runtime") & ~in_backward
    anything = np.ones(len(host), dtype=bool)
    return next((_busiest(host, m) for m in (steps, working, anything) if m.any()), -1)


def backward_thread(host: HostSpans, main: int) -> int:
    """Return the thread number of the autograd engine, -1 when backward runs on the main thread."""
    nodes = host.named(names.is_backward) & (host.nesting.thread != main)
    return _busiest(host, nodes) if nodes.any() else -1


def _busiest(host: HostSpans, marked: np.ndarray) -> int:
    """Return the thread with most of the marked spans."""
    return int(np.bincount(host.nesting.thread[marked]).argmax())
