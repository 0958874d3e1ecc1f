"""The device timeline of a run without a device: what the host's own threads computed and sent.

Host operators become device events (kind `host_op`), spans of a CPU communication backend become
`host_collective`. An operator counts when it, with what it calls, is one piece of work: a matrix
product, convolution or attention with all its helpers, or an operator that contains no other
working one (views and allocations do not work). A `linear` that calls `addmm` is dispatch around
the `addmm`; a `sort` that calls `copy_` and then sorts by itself is one piece again.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace import names
from chopper.analyzers.trace.columns import dictionary, row_set
from chopper.analyzers.trace.tables import HostSpans
from chopper.analyzers.work import MATH_FAMILIES, family
from chopper.tables import TABLES

HOST_KINDS = ("host_op", "host_collective")
_OWN_NS = (50_000, 200_000)
_WRAPPERS = 10
"""An operator works itself from this multiple of what operators take around those they call, within
these bounds."""


def host_as_device(host: HostSpans) -> tuple[pa.Table, np.ndarray]:
    """Derive device events from host spans. HOST_SPAN -> DEVICE_EVENT.

    Returns:
        The table, sorted by start then longest first, and the host row of each event.
    """
    declared = TABLES["device_event"]
    if not len(host):
        return declared.empty(), np.zeros(0, np.int64)
    collective = _collective_spans(host)
    rows = np.flatnonzero(_working_operators(host, collective) | collective)
    start = host.nesting.start_ns[rows]
    end = host.nesting.end_ns[rows]
    order = np.lexsort((-(end - start), start))
    rows, start, end = rows[order], start[order], end[order]
    count = len(rows)
    name_codes, name_values = host.names
    columns = {
        "start_ns": pa.array(start),
        "dur_ns": pa.array(end - start),
        "device_id": pa.array(np.full(count, -1, dtype=np.int32)),
        "stream_id": pa.array(host.nesting.thread_keys[host.nesting.thread[rows], 1]),
        "kind": dictionary(collective[rows].astype(np.int64), HOST_KINDS),
        "name": dictionary(name_codes[rows], name_values),
    }
    arrays = [columns.get(f.name, pa.nulls(count, f.type)) for f in declared.arrow]
    return pa.Table.from_arrays(arrays, schema=declared.arrow), rows


def _collective_spans(host: HostSpans) -> np.ndarray:
    """Outermost spans of a CPU backend's collectives, whichever category recorded them."""
    marked = host.named(names.is_collective_span) & host.of("annotation", "cpu_op")
    return marked & (host.nesting.topmost(marked) == np.arange(len(host)))


def _working_operators(host: HostSpans, collective: np.ndarray) -> np.ndarray:
    """Mask of the operators that are one piece of work each; they do not nest."""
    nesting = host.nesting
    lasting = nesting.end_ns > nesting.start_ns
    operators = host.of("cpu_op") & lasting
    for no_work in (names.is_metadata_operator, names.is_wrapper, names.is_host_communication):
        operators &= ~host.named(no_work)
    # Own Functions and compiled graphs have no operators of their own: they are the work.
    any_operator = host.of("cpu_op") & ~host.named(lambda n: n.startswith("chopper::"))
    leaves = host.of("cpu_op", "annotation") & host.named(names.is_leaf_work) & lasting
    operators |= leaves & ~nesting.containing(any_operator)
    # Work of data loading, what a backend computes inside its collective, and the operators that
    # torch.compile runs on tensors without data, are not the model's.
    excluded = host.named(names.is_data_loading) | host.named(names.is_compilation) | collective
    operators &= ~nesting.within(excluded)
    # A matrix product, convolution or attention is one piece whatever it calls to get ready.
    math = operators & host.named(lambda n: family(n) in MATH_FAMILIES)
    math &= ~nesting.containing(math)
    works_itself = (
        _working_themselves(host, operators) & ~nesting.containing(math) & ~nesting.within(math)
    )
    math |= works_itself & (nesting.topmost(works_itself) == np.arange(len(host)))
    remaining = operators & ~nesting.within(math) & ~nesting.containing(math)
    # Filling and copying inside another operator is part of its work, unless it does nothing else.
    helpers = host.named(names.is_helper_operator)
    remaining &= ~nesting.containing(remaining & ~helpers)
    composites = host.named(names.is_copying_composite)
    childless = ~row_set(nesting.parent, len(host))
    remaining &= ~(composites & (childless | nesting.containing(remaining & helpers)))
    return math | (remaining & (nesting.topmost(remaining) == np.arange(len(host))))


def _working_themselves(host: HostSpans, operators: np.ndarray) -> np.ndarray:
    """Mask of the operators that take most of their time outside of what they call.

    An operator is told by its name: single calls of others may have lost the core meanwhile.
    """
    nesting = host.nesting
    dur_ns = nesting.end_ns - nesting.start_ns
    inner = nesting.parent >= 0
    called_ns = np.bincount(nesting.parent[inner], dur_ns[inner], len(host))
    own_ns = dur_ns - called_ns
    callers = (
        operators & row_set(nesting.parent, len(host)) & ~nesting.containing(host.of("python"))
    )
    if not callers.any():
        return callers
    least_ns = np.clip(_WRAPPERS * np.median(own_ns[callers]), *_OWN_NS)
    working = callers & (own_ns > np.maximum(least_ns, dur_ns / 2))
    codes, values = host.names
    all_calls, so_many = (np.bincount(codes[m], minlength=len(values)) for m in (callers, working))
    return working & (2 * so_many >= all_calls)[codes]
