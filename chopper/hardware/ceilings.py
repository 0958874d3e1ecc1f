"""The device of each rank, and its ceilings (or its host's) by the datasheet and as measured.

Some recordings name no device: rpd and rocprof files, some traces under ROCm, the oldest Kineto
files. Their user knows it, and names it by any usual name; it counts in place of what the trace
says, also where the two contradict each other, which is a finding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from chopper import wording as fmt
from chopper.errors import InputError, UsageError
from chopper.hardware.devices import (
    DTYPES,
    DevicePeaks,
    could_be,
    lookup,
    named,
    peaks_of,
    why_unknown,
)
from chopper.storage.findings import finding
from chopper.storage.manifest import Device, Finding, RankManifest, StatedDevice

if TYPE_CHECKING:
    from collections.abc import Callable

    from chopper.hardware.calibration import Calibration
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


UNNAMED = "the trace does not say which device it was recorded on"


@dataclass(frozen=True, slots=True)
class UnitLimits:
    """Limits of what one unit of a device (an SM) holds at a time."""

    threads_count: int
    blocks_count: int
    registers_count: int
    shared_memory_bytes: int


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Best rates of a device.

    Attributes:
        flop_per_s: data type (a peak key such as ``bf16``) → FLOP/s, as far as they are known.
        memory_bytes_per_s: bandwidth of its memory, None for unknown.
        source: where these come from.
        link_bytes_per_s: bus bandwidth between ranks in one direction, None for unknown.
        reference_clock_hz: data type → SM clock at which its peak is quoted, as far as known.
        units_count: streaming multiprocessors or compute units, None for unknown.
        unit_limits: what is resident on one of them at most, None for unknown.
        dies_count: dies (XCD) whose counters AMD's tools add up, None for unknown.
    """

    flop_per_s: Mapping[str, float]
    memory_bytes_per_s: float | None
    source: str
    link_bytes_per_s: float | None = None
    reference_clock_hz: Mapping[str, float] = field(default_factory=dict)
    units_count: int | None = None
    unit_limits: UnitLimits | None = None
    dies_count: int | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """Best rate between ranks of a run, and the ranks that it is known of.

    Attributes:
        bytes_per_s: bus bandwidth in one direction, None for unknown.
        source: origin of the rate, or why it is unknown.
        ranks: those that the link joins, None for all of the run.
        group_count: fewest ranks of a group among which a rank has all of that bandwidth.
    """

    bytes_per_s: float | None
    source: str
    ranks: frozenset[int] | None = None
    group_count: int = 2

    @property
    def description(self) -> str:
        """The rate and its origin, or why it is unknown."""
        return f"{fmt.rate(self.bytes_per_s)}, {self.source}" if self.bytes_per_s else self.source

    def of_group(self, size: int | None, members: Collection[int]) -> tuple[float | None, str]:
        """Return the rate within a group, and its origin or why it is unknown.

        Args:
            size: ranks of the group, None for unknown.
            members: their numbers, empty for unknown.
        """
        if self.bytes_per_s is None:
            return None, self.source
        if self.ranks is not None and not (members and self.ranks.issuperset(members)):
            return None, "the group has ranks that this link does not join"
        if (size or 0) < self.group_count:
            return (
                None,
                f"groups of fewer than {self.group_count} ranks have some of the links only",
            )
        return self.bytes_per_s, self.source


LINK_MEASURE = "link_bytes_per_s"
"""Measure by which a program states the rate of the link between its ranks (``prof.measure``)."""
MOST_OF_A_PEAK = 1.05
"""Share of a ceiling that may be reached before it, or what is held against it, must be wrong.

Nothing exceeds a true peak; clocks above the reference clock, and measured ceilings, whose repeats
differ by a few percent, leave room for so much.
"""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Ceilings of a rank by the table of devices, and as measured; or why one is not known."""

    theoretical: Ceiling | None
    achievable: Ceiling | None
    theoretical_reason: str | None = None
    achievable_reason: str | None = None
    link: Link = Link(None, "the link between the ranks is unknown")


def device_ceiling(run: Run, part: RankManifest, device: Device | None) -> Ceiling | None:
    """Datasheet peaks of a device, None when it is not in the table.

    The link is that of its node (:func:`_node_link`).
    """
    peaks = peaks_of(device)
    if peaks is None:
        return None
    bandwidth = peaks.memory_bandwidth_bytes_per_s.value
    return Ceiling(
        flop_per_s=_known(peaks.flop_per_s),
        memory_bytes_per_s=float(bandwidth) if bandwidth else None,
        link_bytes_per_s=_node_link(run, part, peaks).bytes_per_s,
        source=f"{peaks.label}, device table ({_sources(peaks)})",
        reference_clock_hz=_known(peaks.clock_hz),
        units_count=None if peaks.units.value is None else int(peaks.units.value),
        unit_limits=_unit_limits(peaks),
        dies_count=None if peaks.dies.value is None else int(peaks.dies.value),
    )


def _node_link(run: Run, part: RankManifest, peaks: DevicePeaks) -> Link:
    """Return the links that join the devices of a rank's node, by the datasheet.

    They count among ranks of one node that use all devices that the part lists: between nodes
    another link decides, and some of a node's devices share only some of its links (which holds for
    groups of ranks, too, where no switch joins the devices).
    """
    rate, count = peaks.link_bytes_per_s.value, len(part.devices)
    together = peaks.least_group_count(count)
    here = run.ranks_by_host.get((part.hostname, part.host), [])
    is_all = (run.world_size or len(run.manifest.ranks)) == count
    if not rate or together is None:
        return Link(None, f"no links between devices of the kind {peaks.label} are known")
    if not is_all and (part.hostname is None or len(here) != count):
        return Link(None, "the ranks are not the devices of one whole node, all of them")
    if part.environment.get("NCCL_P2P_DISABLE", "0") != "0":
        return Link(None, "NCCL_P2P_DISABLE keeps NCCL from the links between devices")
    source = f"{peaks.label}, device table ({peaks.link_bytes_per_s.source})"
    # Datasheets add up both directions of all links.
    return Link(float(rate) / 2, source, None if is_all else frozenset(here), together)


def _host_link(run: Run, part: RankManifest, measured: Calibration | None, why: str) -> Link:
    """Return what the loopback was measured to do, among the ranks that it joins.

    Ranks on other hosts or in network namespaces of their own, and those of recordings that do not
    say where they were, exchange over another link.
    """
    if part.loopback is None:
        return Link(None, "the link between the ranks was not recorded")
    joined = run.ranks_by_loopback[part.host, part.loopback]
    whole = max(run.world_size or 0, len(run.manifest.ranks))
    if len(joined) == 1 < whole:
        return Link(None, "no loopback joins the ranks, and their link was not measured")
    if measured is None or measured.link_bytes_per_s is None:
        return Link(None, measured.absent.get("link", "not measured") if measured else why)
    if measured.link_ranks != len(joined):
        return Link(None, f"the loopback was measured between {measured.link_ranks} ranks")
    source = f"loopback, {measured.source}"
    return Link(
        measured.link_bytes_per_s, source, None if len(joined) == whole else frozenset(joined)
    )


def _stated_link(part: RankManifest) -> Link | None:
    stated = [m.value for m in part.measures if m.name == LINK_MEASURE and not m.labels]
    if not stated or stated[-1] <= 0:
        return None
    return Link(float(stated[-1]), f"stated by the program ({LINK_MEASURE})")


def _sources(peaks: DevicePeaks) -> str:
    """Return where a device's peaks are from, and its bandwidth where that is from elsewhere."""
    rates = [v.source for v in peaks.peak_flop_per_s.values() if v.value is not None]
    bandwidth = peaks.memory_bandwidth_bytes_per_s
    if not rates or bandwidth.value is None or bandwidth.source in rates:
        return max(rates, key=rates.count, default=bandwidth.source)
    return f"FLOP/s: {max(rates, key=rates.count)}; memory: {bandwidth.source}"


def _known(of_dtype: Callable[[str], float | None]) -> dict[str, float]:
    values = ((dtype, of_dtype(dtype)) for dtype in DTYPES)
    return {dtype: value for dtype, value in values if value is not None}


def _unit_limits(peaks: DevicePeaks) -> UnitLimits | None:
    limits = (
        peaks.threads_per_unit,
        peaks.blocks_per_unit,
        peaks.registers_per_unit,
        peaks.shared_memory_bytes_per_unit,
    )
    known = [int(limit.value) for limit in limits if limit.value is not None]
    return UnitLimits(*known) if len(known) == len(limits) else None


def _calibration(run: Run, part: RankManifest, device: Device | None) -> Calibration | None:
    """Find the calibration of a rank's device, or its host's cores: the run's, else one here."""
    from chopper.hardware import calibration

    stored = calibration.from_manifest(part.calibration) if part.calibration else None
    if stored is not None and (stored.device_type == "cpu") == (device is None):
        return stored
    if part.hostname is None or (device is not None and device.name is None):
        return None
    name = None if device is None else device.name
    cpu_name = part.environment.get("cpu")
    local = calibration.load(
        name, part.hostname, cpu_name=cpu_name, ranks=run.ranks_by_hostname[part.hostname]
    )
    if local is None and device is not None:
        # Devices do not share their units: what one reached alone holds beside others.
        local = calibration.load(name, part.hostname)
    return local


def ceilings_of(run: Run, part: RankManifest, device: Device | None, *, on_host: bool) -> Ceilings:
    """The theoretical and the measured ceiling of a rank, or why one is not known."""
    if on_host and part.devices:
        reason = "no event of the device was recorded, only the host's"
        return Ceilings(None, None, reason, reason)
    used = None if on_host else device
    theoretical = device_ceiling(run, part, used)
    not_listed = "the host's cores have no datasheet peak"
    if not on_host:
        not_listed = _not_listed(device) or UNNAMED
    not_measured = (
        "imported, and its machine was not calibrated"
        if part.status == "imported"
        else "`chopper calibrate` was not run there"
    )
    measured: Calibration | None = None
    if on_host or device is not None:
        try:
            measured = _calibration(run, part, used)
        except InputError as exc:
            not_measured = str(exc)
    peaks = peaks_of(used)
    if on_host:
        link = _host_link(run, part, measured, not_measured)
    else:
        link = Link(None, not_listed) if peaks is None else _node_link(run, part, peaks)
    achievable = None
    if measured is not None:
        is_here = len(run.ranks_by_host[part.hostname, part.host]) == len(run.manifest.ranks)
        devices_link = measured.link_bytes_per_s if is_here else None
        achievable = Ceiling(
            flop_per_s=_known(measured.flop_per_s),
            memory_bytes_per_s=measured.memory_bytes_per_s,
            source=measured.source,
            link_bytes_per_s=link.bytes_per_s if on_host else devices_link,
        )
    return Ceilings(
        theoretical,
        achievable,
        not_listed if theoretical is None else None,
        not_measured if achievable is None else None,
        _stated_link(part) or link,
    )


def _not_listed(device: Device | None) -> str | None:
    """Return why a device with a name has no peaks; None without a name."""
    if device is None or not device.name:
        return None
    return why_unknown(
        device.name,
        multi_processor_count=device.multiprocessor_count,
        memory_bytes=device.memory_bytes,
    )


def no_peak_remedy(run: Run, part: RankManifest, device: Device | None) -> str:
    """Advise a user about unknown peaks."""
    if part.devices:
        why = _not_listed(device) or UNNAMED
        return f"{why} (name it with --device; docs: device peaks)"
    if part.status == "imported":
        return "the machine that recorded it was not calibrated"
    ranks_count = run.ranks_by_hostname[part.hostname]
    return f"run `chopper calibrate --ranks {ranks_count}` there, then analyze again"
