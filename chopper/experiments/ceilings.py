"""Ceilings out of the microbenchmarks' experiments: ``chopper calibrate --from``.

``gemm``, ``membw`` and ``collectives`` measure what ``chopper calibrate`` does, over more shapes and
sizes and in runs of their own. Their rates take the place of those that a stored calibration of the
same machine, ranks and threads has; what none of them measures stays.
"""

from __future__ import annotations

import socket
import statistics
from typing import TYPE_CHECKING

import msgspec

from chopper import wording as fmt
from chopper.errors import InputError
from chopper.hardware.calibration import DTYPE_NAMES, Calibration, Measured, load_all
from chopper.storage.files import inside

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from chopper.storage.manifest import RankManifest, RunManifest

_FEEDS = {
    "gemm": ("best_flop_per_s", "median_flop_per_s"),
    "membw": ("best_bandwidth_bytes_per_s", "bandwidth_bytes_per_s"),
    "collectives": ("best_bus_bandwidth_bytes_per_s", "bus_bandwidth_bytes_per_s"),
}
"""Workload → its measures of the fastest and of the median repeat."""
_PASSES = {"copy": 2, "scale": 2, "add": 3, "triad": 3}
_MEMORY_BYTES = 128 << 20
"""Least size of an array whose bandwidth is memory's; as in ``chopper calibrate``."""
_MIB = 1 << 20


def feed(paths: Iterable[Path], store: Path) -> list[Calibration]:
    """The stored calibrations that these experiments change, changed; nothing is written.

    Args:
        paths: directories of experiments of ``gemm``, ``membw`` or ``collectives``.
        store: the file of calibrations.

    Raises:
        InputError: one is no such experiment, or its conditions are not one machine's; or there is
            no calibration that it could complete, and the experiments make none by themselves.
    """
    known = {c.key: c for c in load_all(store)}
    changed: dict[_Key, Calibration] = {}
    # Links last: they complete what the others make.
    for part in sorted((read(path) for path in paths), key=lambda p: bool(p.link)):
        homes = _homes_of_link(part, known) if part.link else [part.key]
        if not homes:
            raise InputError(_incomplete(part))
        for key in homes:
            changed[key] = known[key] = _joined(known.get(key, part), part)
    for result in changed.values():
        if not (result.gemm and result.memory):
            raise InputError(_incomplete(result))
    return sorted(changed.values(), key=lambda c: c.ranks)


_Key = tuple[str, str, int, int]


def _homes_of_link(part: Calibration, known: dict[_Key, Calibration]) -> list[_Key]:
    """Of the same conditions; and of one rank, which has no link, and keeps that between two."""
    return [key for key in known if key == part.key or (key[:2] == part.key[:2] and key[2] == 1)]


def _incomplete(part: Calibration) -> str:
    ranks, threads = f"--ranks {part.ranks}", f"--threads {part.threads}"
    return (
        f"no calibration of {part.hostname} with {ranks} {threads} is stored that this could "
        f"complete: first `chopper calibrate {ranks} {threads}`, or name experiments of gemm and "
        f"membw that were run with {ranks} too"
    )


def read(path: Path) -> Calibration:
    """The rates that one experiment measured, as a calibration that holds nothing else.

    Raises:
        InputError: it is no experiment of a microbenchmark, or holds nothing that can be used.
    """
    from chopper.api import load
    from chopper.experiments.results import read_plan

    plan = read_plan(path)
    if plan.workload not in _FEEDS:
        raise InputError(
            f"{path}: is an experiment of {plan.workload}; ceilings come from {', '.join(_FEEDS)}"
        )
    names = [n for v in plan.variants if v.name != "zeros" for n in v.runs]
    if not names:
        raise InputError(
            f"{path}: nothing was measured on random numbers, and zeros are no ceiling"
        )
    manifests = [load(inside(path, name)).manifest for name in names]
    ranks = [rank for manifest in manifests for rank in manifest.ranks]
    conditions = {_conditions(rank, plan.device) for rank in ranks}
    if len(conditions) != 1:
        raise InputError(f"{path}: its ranks ran under {len(conditions)} different conditions")
    hostname, device_name, threads, cores, torch_version = conditions.pop()
    part = Calibration(
        kind="full",
        created_ns=plan.created_ns,
        chopper_version=plan.chopper_version,
        torch_version=torch_version,
        hostname=hostname,
        device_type=plan.device,
        device_name=device_name,
        ranks=plan.ranks,
        threads=threads,
        cores=cores,
    )
    rates = _rates(manifests, *_FEEDS[plan.workload])
    said = f"chopper run {plan.workload}, {fmt.plural(len(names), 'repetition')}"
    if plan.workload == "gemm":
        gemm: dict[str, list[Measured]] = {}
        for labels, rate in rates:
            dtype = DTYPE_NAMES.get(str(labels["dtype"]), str(labels["dtype"]))
            named = msgspec.structs.replace(rate, what=f"{dtype} {labels['shape']}")
            gemm.setdefault(dtype, []).append(named)
        part = msgspec.structs.replace(part, gemm=gemm, fed={"gemm": said})
    elif plan.workload == "membw":
        part = msgspec.structs.replace(part, memory=_memory(path, rates), fed={"memory": said})
    else:
        link = [
            msgspec.structs.replace(
                rate,
                what=f"{labels['collective']} {int(labels['size_bytes']) / _MIB:g} MiB",
                size_bytes=int(labels["size_bytes"]),
            )
            for labels, rate in rates
            if labels["collective"] != "broadcast"  # which loads the link in one direction only
        ]
        backend = next((rank.backend for rank in ranks if rank.backend), None)
        part = msgspec.structs.replace(
            part, link=link, link_ranks=plan.ranks, link_backend=backend, fed={"link": said}
        )
    if not (part.gemm or part.memory or part.link):
        raise InputError(
            f"{path}: holds no rates; it was not finished, or recorded by an older chopper"
        )
    return part


_Labels = dict[str, str | int | float]


def _rates(manifests: list[RunManifest], best: str, median: str) -> list[tuple[_Labels, Measured]]:
    """Per set of labels: of each repetition the middle rank, of these the best and the middle."""
    found: dict[tuple[tuple[str, str | int | float], ...], dict[str, list[float]]] = {}
    for manifest in manifests:
        of_ranks: dict[tuple[tuple[str, str | int | float], ...], dict[str, list[float]]] = {}
        for rank in manifest.ranks:
            for measure in rank.measures:
                if measure.name in (best, median):
                    key = tuple(sorted(measure.labels.items()))
                    at = of_ranks.setdefault(key, {best: [], median: []})
                    at[measure.name].append(float(measure.value))
        for key, at in of_ranks.items():
            if at[best] and at[median]:
                repeats = found.setdefault(key, {best: [], median: []})
                for name, values in at.items():
                    repeats[name].append(statistics.median(values))
    return [
        (
            dict(key),
            Measured(
                what="",
                best_per_s=max(repeats[best]),
                median_per_s=statistics.median(repeats[median]),
                spread_ratio=_spread(repeats[median]),
                repeats_count=len(repeats[best]),
            ),
        )
        for key, repeats in found.items()
    ]


def _spread(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def _memory(path: Path, rates: list[tuple[_Labels, Measured]]) -> list[Measured]:
    """The largest array alone: smaller ones may lie in a cache."""
    largest = max((int(labels["array_bytes"]) for labels, _ in rates), default=0)
    if rates and largest < _MEMORY_BYTES:
        raise InputError(
            f"{path}: its largest array of {largest / _MIB:g} MiB may lie in a cache; run membw "
            f"with --largest {_MEMORY_BYTES} or more"
        )
    return [
        msgspec.structs.replace(
            rate,
            what=str(labels["kernel"]),
            size_bytes=_PASSES.get(str(labels["kernel"]), 1) * largest,
        )
        for labels, rate in rates
        if labels["array_bytes"] == largest
    ]


def _conditions(rank: RankManifest, device: str) -> tuple[str, str, int, int, str]:
    """Host, device, threads, cores and torch's version."""
    said = rank.environment
    name = said.get("cpu", "unknown processor")
    if device != "cpu":
        name = next(
            (d.name for d in rank.devices if d.device_id == (rank.device_id or 0) and d.name),
            "unknown device",
        )
    return (
        rank.hostname or socket.gethostname(),
        name,
        int(said.get("torch_threads", 1)),
        int(said.get("cores_allowed", 1)),
        said.get("torch", ""),
    )


def _joined(before: Calibration, part: Calibration) -> Calibration:
    """``before`` with the sections that ``part`` has measured."""
    changed: dict[str, object] = {
        name: getattr(part, name) for name in ("memory", "link") if getattr(part, name)
    }
    if part.gemm:
        changed["gemm"] = before.gemm | part.gemm
    if part.link:
        changed |= {"link_ranks": part.link_ranks, "link_backend": part.link_backend}
        changed["absent"] = {k: v for k, v in before.absent.items() if k != "link"}
    return msgspec.structs.replace(
        before,
        **changed,
        fed=before.fed | part.fed,
        created_ns=max(before.created_ns, part.created_ns),
    )
