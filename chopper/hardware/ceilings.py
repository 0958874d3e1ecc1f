"""What the device of a rank, or its host, can do at best: by the datasheet, and as measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chopper.errors import InputError

if TYPE_CHECKING:
    from chopper.analyzers.causes.compute import Ceiling
    from chopper.analyzers.causes.last_wave import UnitLimits
    from chopper.attribution import Ceilings
    from chopper.hardware.calibration import Calibration
    from chopper.hardware.devices import DevicePeaks
    from chopper.storage.manifest import Device, RankManifest
    from chopper.storage.run import Run


def device_of(part: RankManifest) -> Device | None:
    """The device that the rank computes on; when only one kind is listed, that kind."""
    for device in part.devices:
        if device.device_id == part.device_id:
            return device
    kinds = {(d.name, d.memory_bytes, d.multiprocessor_count) for d in part.devices}
    return part.devices[0] if len(kinds) == 1 else None


def world_size_of(run: Run) -> int | None:
    """Ranks of the run as recorded, None when nothing says."""
    return max((p.world_size for p in run.manifest.ranks if p.world_size), default=None)


def device_ceiling(run: Run, part: RankManifest, device: Device | None) -> Ceiling | None:
    """Datasheet peaks of a device, None when it is not in the table.

    The link counts only where the run is the one node that the part lists, all of it: between
    nodes another link decides, and some of a node's devices share only some of its links (which
    holds for groups of ranks, too, where no switch joins the devices).
    """
    from chopper.analyzers.causes.compute import Ceiling
    from chopper.hardware.devices import lookup

    if device is None or device.name is None:
        return None
    peaks = lookup(
        device.name,
        multi_processor_count=device.multiprocessor_count,
        memory_bytes=device.memory_bytes,
    )
    if peaks is None:
        return None
    bandwidth = peaks.memory_bandwidth_bytes_per_s.value
    together = peaks.least_group_count(len(part.devices))
    whole = (world_size_of(run) or len(run.ranks)) == len(part.devices)
    return Ceiling(
        flop_per_s=peaks.flop_per_s,
        memory_bytes_per_s=float(bandwidth) if bandwidth else None,
        link_bytes_per_s=_link_per_direction(peaks.link_bytes_per_s.value)
        if whole and together is not None
        else None,
        link_group_count=together or 2,
        source=f"{peaks.label}, device table ({peaks.memory_bandwidth_bytes_per_s.source})",
        reference_clock_hz=peaks.clock_hz,
        units_count=None if peaks.units.value is None else int(peaks.units.value),
        unit_limits=_unit_limits(peaks),
        dies_count=None if peaks.dies.value is None else int(peaks.dies.value),
    )


def _unit_limits(peaks: DevicePeaks) -> UnitLimits | None:
    """What one unit holds, None when a part of it is not known."""
    from chopper.analyzers.causes.last_wave import UnitLimits

    limits = [
        quantity.value
        for quantity in (
            peaks.threads_per_unit,
            peaks.blocks_per_unit,
            peaks.registers_per_unit,
            peaks.shared_memory_bytes_per_unit,
        )
    ]
    known = [int(value) for value in limits if value is not None]
    return UnitLimits(*known) if len(known) == len(limits) else None


def _calibration(run: Run, part: RankManifest, device: Device | None) -> Calibration | None:
    """What was measured of a rank's device, or of its host's cores with None.

    The result kept in the run counts first, else one stored on this machine for as many ranks.
    """
    from chopper.hardware import calibration

    kept = calibration.from_manifest(part.calibration) if part.calibration else None
    if kept is not None and (kept.device_type == "cpu") == (device is None):
        return kept
    if part.hostname is None or (device is not None and device.name is None):
        return None
    name = None if device is None else device.name
    cpu_name = part.environment.get("cpu")
    found = calibration.load(name, part.hostname, cpu_name=cpu_name, ranks=_ranks_beside(run, part))
    if found is None and device is not None:
        # Devices do not share their units: what one reached alone holds beside others.
        found = calibration.load(name, part.hostname)
    return found


def _measured_ceiling(measured: Calibration | None) -> Ceiling | None:
    from chopper.analyzers.causes.compute import Ceiling

    if measured is None:
        return None
    return Ceiling(
        flop_per_s=measured.flop_per_s,
        memory_bytes_per_s=measured.memory_bytes_per_s,
        source=measured.source,
        link_bytes_per_s=measured.link_bytes_per_s,
    )


def ceilings_of(run: Run, part: RankManifest, device: Device | None, *, on_host: bool) -> Ceilings:
    """The theoretical and the measured ceiling of a rank, or why one is not known."""
    from chopper.attribution import Ceilings

    if on_host and part.devices:
        reason = "no event of the device was recorded, only the host's"
        return Ceilings(None, None, reason, reason)
    theoretical = None if on_host else device_ceiling(run, part, device)
    measurable = on_host or device is not None
    unreadable: str | None = None
    achievable: Ceiling | None = None
    if measurable:
        try:
            achievable = _measured_ceiling(_calibration(run, part, None if on_host else device))
        except InputError as exc:
            unreadable = str(exc)
    not_listed = (
        "the host's cores have no datasheet peak"
        if on_host
        else _not_listed(device)
        if device is not None and device.name
        else "the trace does not say which device it was recorded on"
    )
    not_measured = (
        "imported, and its machine was not calibrated"
        if part.status == "imported"
        else "`chopper calibrate` was not run there"
    )
    return Ceilings(
        theoretical,
        achievable,
        None if theoretical is not None else not_listed,
        None if achievable is not None else unreadable or not_measured,
    )


def _link_per_direction(total: int | float | None) -> float | None:
    """Datasheets add up both directions of all links."""
    return float(total) / 2 if total else None


def _ranks_beside(run: Run, part: RankManifest) -> int:
    return sum(other.hostname == part.hostname for other in run.manifest.ranks)


def _not_listed(device: Device) -> str:
    """Why a device with a name has no peaks."""
    from chopper.hardware.devices import why_unknown

    return why_unknown(
        device.name or "",
        multi_processor_count=device.multiprocessor_count,
        memory_bytes=device.memory_bytes,
    )


def no_peak_remedy(run: Run, part: RankManifest, device: Device | None) -> str:
    """What a user can do about unknown peaks."""
    if part.devices:
        why = (
            _not_listed(device)
            if device and device.name
            else "the device is not in the table of peaks"
        )
        return f"{why} (docs: device peaks)"
    if part.status == "imported":
        return "the machine that recorded it was not calibrated"
    return f"run `chopper calibrate --ranks {_ranks_beside(run, part)}` there, then analyze again"
