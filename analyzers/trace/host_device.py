"""The device timeline of a run without a device: what the host's own threads computed and sent.

Host operators become device events (kind `host_op`), spans of a CPU communication backend become
`host_collective`. An operator counts when it, with what it calls, is one piece of work: a matrix
product, convolution or attention with all its helpers, or an operator that contains no other
working one (views and allocations do not work). A `linear` that calls `addmm` is dispatch around
the `addmm`.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace import names
from chopper.analyzers.trace.columns import dictionary
from chopper.analyzers.trace.tables import HostSpans
from chopper.analyzers.work import MATH_FAMILIES, family
from chopper.tables import TABLES

HOST_KINDS = ("host_op", "host_collective")
_NO_DEVICE = -1


def is_host_timeline(events: pa.Table) -> bool:
    """Return whether device events were derived from host spans.

    The kind says so; a device id of -1 does not, since recorders write it for "unknown".
    """
    kinds = {kind.as_py() for kind in events["kind"].unique()}
    return bool(kinds) and kinds <= {*HOST_KINDS}


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
    is_collective = collective[rows]
    absent = pa.nulls(count, pa.int64())
    no_text = dictionary(np.full(count, -1), [])
    columns = {
        "start_ns": pa.array(start),
        "dur_ns": pa.array(end - start),
        "device_id": pa.array(np.full(count, _NO_DEVICE, dtype=np.int32)),
        "stream_id": pa.array(host.nesting.thread_keys[host.nesting.thread[rows], 1]),
        "kind": dictionary(is_collective.astype(np.int64), [*HOST_KINDS]),
        "name": dictionary(name_codes[rows], name_values),
        "grid": no_text,
        "block": no_text,
        "occupancy_ratio": pa.nulls(count, pa.float64()),
    }
    arrays = [columns.get(f.name, absent) for f in declared.arrow]
    return pa.Table.from_arrays(arrays, schema=declared.arrow), rows


def _collective_spans(host: HostSpans) -> np.ndarray:
    """Outermost spans of a CPU backend's collectives, whichever category recorded them."""
    marked = host.named(names.is_collective_span) & host.of("annotation", "cpu_op")
    outer = host.nesting.parent
    inside = np.zeros(len(host), dtype=bool)
    nearest = host.nesting.nearest(marked)
    has_parent = outer >= 0
    inside[has_parent] = nearest[outer[has_parent]] >= 0
    return marked & ~inside


def _working_operators(host: HostSpans, collective: np.ndarray) -> np.ndarray:
    """Mask of the operators that are one piece of work each; they do not nest."""
    nesting = host.nesting
    operators = (
        host.of("cpu_op")
        & (nesting.end_ns > nesting.start_ns)
        & ~host.named(
            lambda n: (
                names.is_metadata_operator(n)
                or names.is_wrapper(n)
                or names.is_host_communication(n)
            )
        )
    )
    # Own Functions and compiled graphs have no operators of their own: they are the work.
    any_operator = host.of("cpu_op") & host.named(lambda n: not n.startswith("chopper::"))
    leaves = (
        host.of("cpu_op", "annotation")
        & host.named(names.is_leaf_work)
        & (nesting.end_ns > nesting.start_ns)
        & ~nesting.containing(any_operator)
    )
    operators |= leaves
    # Work of data loading, what a backend computes inside its collective, and the operators that
    # torch.compile runs on tensors without data, are not the model's.
    excluded = host.named(lambda n: names.is_data_loading(n) or names.is_compilation(n))
    excluded |= collective
    operators &= nesting.nearest(excluded) < 0
    # A matrix product, convolution or attention is one piece whatever it calls to get ready.
    math = operators & host.named(lambda n: family(n) in MATH_FAMILIES)
    math &= ~nesting.containing(math)
    above = nesting.nearest(math)
    others = operators & (above < 0) & ~nesting.containing(math)
    # Filling and copying inside another operator is part of its work, unless it does nothing else.
    helpers = host.named(names.is_helper_operator)
    others &= ~nesting.containing(others & ~helpers)
    composites = host.named(names.is_copying_composite)
    parents = nesting.parent[nesting.parent >= 0]
    childless = np.ones(len(host), dtype=bool)
    childless[parents] = False
    others &= ~(composites & (childless | nesting.containing(others & helpers)))
    outer = np.where(nesting.parent >= 0, nesting.nearest(others)[nesting.parent], -1)
    return math | (others & (outer < 0))
