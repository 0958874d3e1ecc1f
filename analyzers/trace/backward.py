"""Backward passes in a trace: which operators recorded each node, and which threads run them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chopper.analyzers.trace import names
from chopper.analyzers.trace.tables import HostSpans


@dataclass(frozen=True, slots=True)
class NodeMakers:
    """Backward nodes, and the forward operators that recorded them.

    Attributes:
        node, operator: rows of `host_span`, in pairs.
    """

    node: np.ndarray
    operator: np.ndarray


def node_makers(host: HostSpans) -> NodeMakers:
    """Pair backward nodes with the forward operators of the same sequence number."""
    sequence = host.sequence_id
    node = np.flatnonzero((sequence >= 0) & host.named(names.is_backward))
    numbered = (sequence >= 0) & (host.forward_tid <= 0)
    numbered[node] = False
    forward = np.flatnonzero(numbered)
    if not len(node) or not len(forward):
        return NodeMakers(node[:0], forward[:0])
    # Operators that make no node share the next one's number: the last one made the node.
    by_sequence = forward[np.argsort(sequence[forward], kind="stable")]
    keys = sequence[by_sequence]
    at = np.searchsorted(keys, sequence[node], side="right") - 1
    hit = (at >= 0) & (keys[np.maximum(at, 0)] == sequence[node])
    return NodeMakers(node[hit], by_sequence[at[hit]])


def numbered_in_backward(host: HostSpans) -> np.ndarray:
    """Return a mask of the operators within backward that took a sequence number.

    Grad mode was on for them.
    """
    found = host.where(lambda category, name: category == "cpu_op" and not names.is_backward(name))
    found &= host.sequence_id >= 0
    found &= host.forward_tid <= 0
    if found.any():
        found &= host.nesting.within(host.named(names.is_backward))
    return found


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
    above = nesting.nearest(operator)[nesting.parent]
    above[nesting.parent < 0] = -1
    top = (
        operator
        & (node >= 0)
        & ((above < 0) | (nesting.depth[above] < nesting.depth[node]))
        & ~host.named(names.is_factory)
    )
    computes_without = np.zeros(len(host), dtype=bool)
    computes_without[node[top & (host.sequence_id < 0)]] = True
    again = host.named(lambda n: n.startswith("chopper::recompute::"))
    computes_without[node[again & (node >= 0)]] = True
    computes_without |= host.named(lambda n: "Checkpoint" in n)
    return numbered & ~computes_without[node]


def main_thread(host: HostSpans, in_backward: np.ndarray) -> int:
    """Return the thread number on which the program runs: the one with the steps, else the busiest.

    Args:
        host: the spans of one rank.
        in_backward: mask of the spans whose phase is backward.
    """
    if not len(host):
        return -1
    steps = host.named(lambda n: n.startswith("ProfilerStep"))
    if steps.any():
        return int(np.bincount(host.nesting.thread[steps]).argmax())
    working = host.of("cpu_op", "python", "runtime") & ~in_backward
    if not working.any():
        working = np.ones(len(host), dtype=bool)
    return int(np.bincount(host.nesting.thread[working]).argmax())


def backward_thread(host: HostSpans, main: int) -> int:
    """Return the thread number of the autograd engine, -1 when backward runs on the main thread."""
    nodes = host.named(names.is_backward) & (host.nesting.thread != main) if len(host) else None
    if nodes is None or not nodes.any():
        return -1
    return int(np.bincount(host.nesting.thread[nodes]).argmax())
