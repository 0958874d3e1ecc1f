"""Ceilings out of the microbenchmarks' experiments: ``chopper calibrate --from``.

``gemm``, ``membw`` and ``collectives`` measure what ``chopper calibrate`` does, over more shapes
and sizes and in runs of their own. Their rates take the place of those that a stored calibration of
the same machine, ranks and threads has; what none of them measures stays.
"""

from __future__ import annotations

import socket
import statistics
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from chopper import wording as fmt
from chopper.errors import InputError
from chopper.experiments.results import Labels, measures_of, read_plan
from chopper.hardware.calibration import (
    DTYPE_NAMES,
    MEMORY_BYTES,
    MIB,
    STREAM_PASSES,
    Calibration,
    Measured,
    load_all,
    spread_ratio,
)
from chopper.quantities import digits
from chopper.storage.files import inside

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from chopper.storage.manifest import RankManifest, RunManifest

_MEASURES = {
    "gemm": ("best_flop_per_s", "median_flop_per_s"),
    "membw": ("best_bandwidth_bytes_per_s", "bandwidth_bytes_per_s"),
    "collectives": ("best_bus_bandwidth_bytes_per_s", "bus_bandwidth_bytes_per_s"),
}
"""Workload → its measures of the fastest and of the median repeat."""

_Key = tuple[str, str, int, int]
_Rates = list[tuple[dict[str, str | int | float], Measured]]


def feed(paths: Iterable[Path], store: Path) -> list[Calibration]:
    """Return the stored calibrations that these experiments change, changed; writes nothing.

    Raises:
        InputError: one is no such experiment, or its conditions are not one machine's; or there is
            no calibration that it could complete, and the experiments make none by themselves.
    """
    known = {c.key: c for c in load_all(store)}
    changed: dict[_Key, Calibration] = {}
    # Links last: they complete what the others make.
    for part in sorted((read(path) for path in paths), key=lambda p: bool(p.link)):
        keys = _keys_with_link(part, known) if part.link else [part.key]
        if not keys:
            raise InputError(_incomplete(part))
        for key in keys:
            changed[key] = known[key] = _joined(known.get(key, part), part)
    for result in changed.values():
        if not (result.gemm and result.memory):
            raise InputError(_incomplete(result))
    return sorted(changed.values(), key=lambda c: c.ranks)


def _keys_with_link(part: Calibration, known: dict[_Key, Calibration]) -> list[_Key]:
    """Keys of the same conditions; and of one rank, which keeps the link between two."""
    return [key for key in known if key == part.key or (key[:2] == part.key[:2] and key[2] == 1)]


def _incomplete(part: Calibration) -> str:
    ranks, threads = f"--ranks {part.ranks}", f"--threads {part.threads}"
    return (
        f"no calibration of {part.hostname} with {ranks} {threads} is stored that this could "
        f"complete: first `chopper calibrate {ranks} {threads}`, or name experiments of gemm and "
        f"membw that were run with {ranks} too"
    )


def read(path: Path) -> Calibration:
    """Read the rates that one experiment measured, as a calibration that holds nothing else."""
    from chopper.pipeline import read

    plan = read_plan(path)
    if plan.workload not in _MEASURES:
        raise InputError(
            f"{path}: is an experiment of {plan.workload}; ceilings come from "
            f"{', '.join(_MEASURES)}"
        )
    names = [n for v in plan.variants if v.name != "zeros" for n in v.runs]
    if not names:
        raise InputError(
            f"{path}: nothing was measured on random numbers, and zeros are no ceiling"
        )
    repetitions = [read(inside(path, name)).manifest for name in names]
    ranks = [rank for manifest in repetitions for rank in manifest.ranks]
    conditions = {_conditions(rank, plan.device) for rank in ranks}
    if len(conditions) != 1:
        raise InputError(f"{path}: its ranks ran under {len(conditions)} different conditions")
    rates = _rates(repetitions, *_MEASURES[plan.workload])
    if not rates:
        raise InputError(
            f"{path}: holds no rates; it was not finished, or recorded by an older chopper"
        )
    how = f"chopper bench {plan.workload}, {fmt.plural(len(names), 'repetition')}"
    part = Calibration(
        kind="full",
        created_ns=plan.created_ns,
        chopper_version=plan.chopper_version,
        device_type=plan.device,
        ranks=plan.ranks,
        **conditions.pop()._asdict(),
    )
    changed: dict[str, object]
    if plan.workload == "gemm":
        section, changed = "gemm", {"gemm": _gemm(rates)}
    elif plan.workload == "membw":
        section, changed = "memory", {"memory": _memory(path, rates)}
    else:
        backend = next((rank.backend for rank in ranks if rank.backend), None)
        section = "link"
        changed = {"link": _link(rates), "link_ranks": plan.ranks, "link_backend": backend}
    return msgspec.structs.replace(part, fed={section: how}, **changed)


def _rates(repetitions: Sequence[RunManifest], best: str, median: str) -> _Rates:
    values: dict[Labels, dict[str, list[float]]] = {}
    for manifest in repetitions:
        for name, labels, of_repetition in measures_of(manifest):
            if name in (best, median):
                values.setdefault(labels, {}).setdefault(name, []).extend(of_repetition)
    return [
        (
            dict(labels),
            Measured(
                what="",
                best_per_s=max(of[best]),
                median_per_s=statistics.median(of[median]),
                spread_ratio=spread_ratio(of[median]),
                repeats_count=len(of[best]),
            ),
        )
        for labels, of in values.items()
        if len(of) == 2
    ]


def _gemm(rates: _Rates) -> dict[str, list[Measured]]:
    by_dtype: dict[str, list[Measured]] = {}
    for labels, rate in rates:
        dtype = DTYPE_NAMES.get(str(labels["dtype"]), str(labels["dtype"]))
        named = msgspec.structs.replace(rate, what=f"{dtype} {labels['shape']}")
        by_dtype.setdefault(dtype, []).append(named)
    return by_dtype


def _memory(path: Path, rates: _Rates) -> list[Measured]:
    """The largest array alone: smaller ones may lie in a cache."""
    largest = max((int(labels["array_bytes"]) for labels, _ in rates), default=0)
    if rates and largest < MEMORY_BYTES:
        raise InputError(
            f"{path}: its largest array of {largest / MIB:g} MiB may lie in a cache; run membw "
            f"with --largest {MEMORY_BYTES} or more"
        )
    return [
        msgspec.structs.replace(
            rate,
            what=str(labels["kernel"]),
            size_bytes=STREAM_PASSES.get(str(labels["kernel"]), 1) * largest,
        )
        for labels, rate in rates
        if labels["array_bytes"] == largest
    ]


def _link(rates: _Rates) -> list[Measured]:
    return [
        msgspec.structs.replace(
            rate,
            what=f"{labels['collective']} {int(labels['size_bytes']) / MIB:g} MiB",
            size_bytes=int(labels["size_bytes"]),
        )
        for labels, rate in rates
        if labels["collective"] != "broadcast"  # which loads the link in one direction only
    ]


class _Conditions(NamedTuple):
    hostname: str
    device_name: str
    threads: int
    cores: int
    torch_version: str


def _conditions(rank: RankManifest, device: str) -> _Conditions:
    environment = rank.environment
    name = environment.get("cpu", "unknown processor")
    if device != "cpu":
        name = next(
            (d.name for d in rank.devices if d.device_id == (rank.device_id or 0) and d.name),
            "unknown device",
        )
    return _Conditions(
        hostname=rank.hostname or socket.gethostname(),
        device_name=name,
        threads=digits(environment.get("torch_threads", "")) or 1,
        cores=digits(environment.get("cores_allowed", "")) or 1,
        torch_version=environment.get("torch", ""),
    )


def _joined(before: Calibration, part: Calibration) -> Calibration:
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
