"""The device of each rank: the one that its trace lists, or the one that the user names.

Some recordings name no device: rpd and rocprof files, some traces under ROCm, the oldest Kineto
files. Their user knows it, and names it by any usual name; it counts in place of what the trace
says, also where the two contradict each other, which is a finding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from chopper import wording as fmt
from chopper.claims import finding
from chopper.errors import UsageError
from chopper.hardware.devices import DevicePeaks, could_be, lookup, named
from chopper.storage.manifest import Device, Finding, RankManifest, StatedDevice

if TYPE_CHECKING:
    from chopper.storage.run import Run

Stated = str | Mapping[int | None, str]
"""A device for all ranks; or rank → device, where None stands for all ranks that are not named."""

_STATED, _CONTRADICTED = "device.stated", "device.contradicted"


def device_of(part: RankManifest) -> Device | None:
    """Return the device that the user named for a rank, else the one that its trace lists."""
    listed = listed_device(part)
    if part.stated_device is None:
        return listed
    name = part.stated_device.name
    peaks = lookup(name)
    if peaks is not None and listed is not None and could_be(listed, peaks):
        return msgspec.structs.replace(listed, name=name)
    return Device(device_id=part.device_id or 0, name=name)


def listed_device(part: RankManifest) -> Device | None:
    """Return the device that the rank computes on; when only one kind is listed, that kind."""
    for device in part.devices:
        if device.device_id == part.device_id:
            return device
    kinds = {(d.name, d.memory_bytes, d.multiprocessor_count) for d in part.devices}
    return part.devices[0] if len(kinds) == 1 else None


def with_devices(run: Run, stated: Stated) -> Run:
    """Return a run whose ranks compute on the devices that the user names.

    Args:
        run: as it was recorded; it is not changed.
        stated: the device of all ranks by any usual name, or rank → device.

    Raises:
        UsageError: a name is not one device of the table, or a rank is not in the run.
    """
    by_rank = {None: stated} if isinstance(stated, str) else stated
    peaks = {rank: named(name) for rank, name in by_rank.items()}
    missing = sorted(rank for rank in peaks if rank is not None and rank not in run.ranks)
    if missing:
        raise UsageError(
            f"{run.source}: a device is named for rank {fmt.ranges(missing)}, and the run has "
            f"{fmt.ranges(run.ranks)}"
        )
    parts = []
    for part in run.manifest.ranks:
        device = peaks.get(part.rank, peaks.get(None))
        on_device = run.rows_count(part.rank, "device_event") > 0
        parts.append(part if device is None else _with_device(part, device, on_device=on_device))
    return replace(run, manifest=msgspec.structs.replace(run.manifest, ranks=parts))


def _with_device(part: RankManifest, device: DevicePeaks, *, on_device: bool) -> RankManifest:
    """Return a part with the device that the user named, and a finding that says so."""
    findings = [f for f in part.findings if f.code not in (_STATED, _CONTRADICTED)]
    description, contradicts = _recorded_device(part, device)
    reason = f"named by the user; {description}"
    return msgspec.structs.replace(
        part,
        stated_device=StatedDevice(name=device.label, reason=reason),
        findings=[*findings, _finding(part, device, description, contradicts, on_device=on_device)],
    )


def _finding(
    part: RankManifest, device: DevicePeaks, description: str, contradicts: bool, *, on_device: bool
) -> Finding:
    effect = "" if on_device else "; no device event was recorded, so this changes nothing"
    code = _CONTRADICTED if contradicts else _STATED
    return finding(code, rank=part.rank, device=device.label, said=description, effect=effect)


def _recorded_device(part: RankManifest, device: DevicePeaks) -> tuple[str, bool]:
    """Return what a trace says of its rank's device, and whether another one is meant by that."""
    one = listed_device(part)
    listed = [one] if one is not None else part.devices
    described = [device for device in listed if device.name or device.multiprocessor_count]
    if not described:
        return "the trace names no device", False
    facts = dict.fromkeys(_facts(device) for device in described)
    return f"the trace lists {', '.join(facts)}", not any(could_be(d, device) for d in described)


def _facts(device: Device) -> str:
    """Return what a trace says of a device in words."""
    units, memory = device.multiprocessor_count, device.memory_bytes
    sizes = [fmt.plural(units, "unit")] if units else []
    sizes += [f"{fmt.bytes_(memory)} of memory"] if memory else []
    name = device.name or "a device without a name"
    return f"{name} with {' and '.join(sizes)}" if sizes else name
