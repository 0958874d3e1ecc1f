"""An optimizer that launches kernels for each parameter by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Sighting, detector
from chopper.analyzers.events.device import Events
from chopper.analyzers.trace.join import Links

_FEWEST = 50
DETECTOR = detector("optimizer_loops", fewest=_FEWEST)
_PREFIX = "Optimizer.step#"


def optimizer_loops(
    run: Attributed, events: Events, links: Mapping[int, Links]
) -> Iterator[Sighting]:
    """HOST_SPAN, EVENT_LINK -> one sighting for each kind of optimizer."""
    by_optimizer: dict[str, dict[str, dict[int, np.ndarray]]] = {}
    counts: dict[str, np.ndarray] = {}
    for rank, link in links.items():
        host = link.host
        if run.joined[rank].host_only or not len(host):
            continue
        stepping = host.named(lambda name: name.startswith(_PREFIX)) & host.of("annotation")
        outer = host.nesting.topmost(stepping)
        rows = np.sort(events.row[events.rank == rank])
        rows = rows[link.has_launch[rows]]
        inside = outer[link.launch_row[rows]]
        codes, values = host.names
        ops, op_values = link.op_names
        one = np.array([_on_one(v) for v in op_values] + [False])[ops]
        for code in np.unique(codes[outer[stepping]]).tolist():
            name = values[code].removeprefix(_PREFIX).partition(".")[0]
            mine = rows[(inside >= 0) & (codes[np.maximum(inside, 0)] == code)]
            single = mine[one[mine]]
            steps = len(np.unique(outer[link.launch_row[mine]]))
            if len(single) <= max(_FEWEST * steps, len(mine) / 2):
                continue
            parts = by_optimizer.setdefault(name, {"events": {}, "host": {}, "calls": {}})
            parts["events"][rank] = mine
            parts["host"][rank] = (outer >= 0) & (codes[np.maximum(outer, 0)] == code)
            parts["calls"][rank] = np.unique(outer[link.launch_row[mine]])
            counts[name] = counts.get(name, 0) + np.array([len(mine), steps, len(single)])
    for name, parts in by_optimizer.items():
        evidence = dict(zip(("kernels", "steps", "tensors"), counts[name].tolist(), strict=True))
        yield Sighting(
            detector="optimizer_loops",
            events=parts["events"],
            calls=parts["calls"],
            host_gone=parts["host"],
            evidence={"optimizer": name, **evidence},
        )


def _on_one(op: str) -> bool:
    """Tell whether an operator is PyTorch's and takes no lists of tensors.

    What others launch (apex, a compiled step) may be for many tensors, and is not counted.
    """
    return op.startswith("aten::") and not op.startswith(
        ("aten::_foreach", "aten::_fused", "aten::_amp_foreach")
    )
