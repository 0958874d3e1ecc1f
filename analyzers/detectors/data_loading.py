"""Steps that wait for the next batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Sighting, detector, spent_in
from chopper.analyzers.events.steps import spans_in_steps
from chopper.analyzers.replay.whatif_options import Changes
from chopper.analyzers.trace.join import Links
from chopper.analyzers.trace.names import is_data_loading, is_program_frame
from chopper.analyzers.trace.tables import HostSpans

CAUSE = "idle.preparation.data"
_LOADERS = {
    "MultiProcessing": "in its worker processes, which a trace does not show",
    "SingleProcess": "in the training process itself (num_workers=0)",
}
_RAISE = "Raise num_workers, set pin_memory=True and persistent_workers=True"
_AHEAD = (
    "Prepare batches ahead of the step: in a DataLoader with num_workers, or in a thread or "
    "process that keeps several ready"
)
_NO_STACKS = "; Python stacks (with_stack=True) would name the function"
DETECTOR = detector("data_loading")


def data_loading(run: Attributed, links: Mapping[int, Links]) -> Iterator[Sighting]:
    """PIECE, HOST_SPAN -> at most one sighting."""
    stall_ns, rows = spent_in(run, (CAUSE,))
    if not stall_ns:
        return
    spent: Counter[str] = Counter()
    loaders: set[str] = set()
    loading_ns = 0
    has_stacks = False
    for rank, link in links.items():
        host = link.host
        if not len(host):
            continue
        loading = host.named(is_data_loading) & ~host.of("python")
        loading &= host.nesting.topmost(loading) == np.arange(len(host))
        loading &= spans_in_steps(run, rank)[0]
        codes, values = host.names
        names = (values[code] for code in np.unique(codes[loading]).tolist())
        loaders.update(name for name in names if name.startswith("enumerate("))
        loading_ns += int(host.dur_ns[loading].sum())
        has_stacks |= bool((host.of("python") & host.nesting.within(loading)).any())
        spent.update(_spent(host, loading, by_library=not loaders))
    function, function_ns = max(spent.items(), key=lambda item: item[1], default=("", 0))
    if 2 * function_ns > loading_ns:
        where = f"most of it in {function}"
    else:
        function = ""
        kind = next((kind for kind in _LOADERS if kind in str(loaders)), None)
        where = "in code that was not recorded" if kind is None else _LOADERS[kind]
        where += _NO_STACKS if kind == "SingleProcess" and not has_stacks else ""
    yield Sighting(
        detector="data_loading",
        events={rank: row[:0] for rank, row in rows.items()},
        changes=Changes(fix=(CAUSE,)),
        phase="data",
        line=function if is_program_frame(function) else None,
        evidence={
            "stall_ns": stall_ns // max(run.windows.num_rows, 1),
            "function": function or None,
            "where": where,
            "ahead": _RAISE if loaders else _AHEAD,
        },
    )


def _spent(host: HostSpans, loading: np.ndarray, *, by_library: bool) -> Counter[str]:
    """Return the time in a loader by the program's function, else by the outermost operator.

    What libraries do is the time of the program's function that called them, or of
    their own ``by_library``.
    """
    nesting = host.nesting
    inside = nesting.within(loading)
    child = np.flatnonzero(inside & (nesting.parent >= 0))
    nested_ns = np.bincount(nesting.parent[child], host.dur_ns[child], minlength=len(host))
    frames = nesting.nearest(inside & host.of("python") & host.named(is_program_frame))
    libraries = nesting.topmost(inside & host.of("python") & by_library)
    operators = nesting.topmost(inside & ~loading & host.of("cpu_op"))
    owner = np.where(frames >= 0, frames, np.where(libraries >= 0, libraries, operators))
    known = np.flatnonzero(inside & (owner >= 0))
    codes, values = host.names
    own_ns = (host.dur_ns - nested_ns)[known]
    time_ns = np.bincount(codes[owner[known]], own_ns, minlength=len(values)).tolist()
    return Counter({name: int(t) for name, t in zip(values, time_ns, strict=True) if t > 0})
