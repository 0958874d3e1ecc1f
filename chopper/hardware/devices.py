"""Peaks of devices: a table with a source for every value, and a strict lookup.

    device = lookup("NVIDIA H100 80GB HBM3", multi_processor_count=132)
    device.flop_per_s("bf16")                     # 989.4e12, as quoted by the vendor
    device.flop_per_s("bf16", clock_hz=1.98e9)    # what the same units do at another clock

Peaks are dense (no structured sparsity) and the best rate that the device has for a matrix
product of that type, tensor or matrix cores included; ``fp64_vector`` and ``fp32_vector`` are the
rates outside of them. Vendors quote tensor peaks at a clock of their own (H100: 1830 MHz, while
it boosts to 1980), so each type has its reference clock.

A device that is not in the table is None, never its nearest relative: no peak, no MFU.
"""

from __future__ import annotations

import re
import string
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from chopper.errors import UsageError
from chopper.storage.files import decode_document, read_bytes

if TYPE_CHECKING:
    from chopper.storage.manifest import Device

DTYPES = (
    "fp64",
    "fp64_vector",
    "fp32",
    "fp32_vector",
    "tf32",
    "fp16",
    "bf16",
    "fp8",
    "int8",
    "fp4",
)

# ECC takes 1/16 of GDDR memory, drivers keep up to 3 % of any, and some count in GiB, some in GB.
_MEMORY_RATIO_RANGE = (0.9, 1.03)


class Sourced(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number with where it came from; None is unknown or impossible, and the note says which."""

    value: int | float | None
    source: str
    note: str | None = None


class HostLink(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A link between a device and its host's memory.

    Without coherence, an access of one side to the other's memory moves a page (or is a copy).
    """

    id: str
    label: str
    coherent: bool
    """Each side reads and writes the other's memory in place, by the line."""
    shared: bool = False
    """Both have one memory: nothing has to move."""
    bytes_per_s: Sourced
    """Both directions, as quoted."""
    to_device_bytes_per_s: Sourced
    """Measured, as its way back."""
    to_host_bytes_per_s: Sourced
    granule_bytes: Sourced
    """Least that an access moves."""


USABLE_RATIO = 0.95
"""Share of a device's nominal memory that a process can have."""
_VARIANTS = {"ti", "super", "d", "xt", "xtx", "gre"}
"""Words of a model's name that make it another model."""
_SWITCHED_FROM = 8
"""Boards of fewer devices have no switch between them (HGX with four)."""


class DevicePeaks(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One device as programs see it (one of MI250X's two dies), with its peaks.

    ``link_bytes_per_s`` is the total of both directions over all links, as vendors quote it.
    ``units`` are streaming multiprocessors or compute units; ``…_per_unit`` is what is resident on
    one at most. ``dies`` are those (XCD) whose counters AMD's tools add up.
    """

    id: str
    label: str
    vendor: str
    names: tuple[str, ...]
    unit_kind: str
    host_link: str | None = None
    """Id of its link to the host; None: PCIe of its generation."""
    bridged_count: int = 0
    """Cards that a bridge joins at most; 0: there is none."""
    switched: bool = False
    """Behind a switch, on boards with enough of them."""
    units: Sourced
    dies: Sourced
    threads_per_unit: Sourced
    blocks_per_unit: Sourced
    registers_per_unit: Sourced
    shared_memory_bytes_per_unit: Sourced
    flop_per_clock_per_unit: dict[str, Sourced]
    reference_clock_hz: dict[str, Sourced]
    peak_flop_per_s: dict[str, Sourced]
    memory_bytes: Sourced
    reported_memory_bytes: Sourced | None = None
    """Total that CUDA reports, where it is much less than the nominal size."""
    memory_bandwidth_bytes_per_s: Sourced
    l2_bytes: Sourced
    last_level_cache_bytes: Sourced
    link_bytes_per_s: Sourced
    pcie_generation: Sourced
    board_power_w: Sourced

    @property
    def usable_bytes(self) -> int | None:
        """Memory that a process can have, None where it is not known."""
        nominal, reported = self.memory_bytes.value, self.reported_memory_bytes
        if nominal is None:
            return None
        usable_bytes = int(nominal * USABLE_RATIO)
        return min(usable_bytes, int((reported and reported.value) or usable_bytes))

    def least_group_count(self, devices_count: int) -> int | None:
        """Fewest ranks of a group among which each has all of its links.

        Behind a switch any two have. On a mesh, links to others than the group lie still: only all
        devices together use them. Bridges join two or four cards, a host's others speak by PCIe.

        Args:
            devices_count: devices of the host.

        Returns:
            None when the links do not join all of them.
        """
        if self.bridged_count and devices_count > self.bridged_count:
            return None
        return 2 if self.switched and devices_count >= _SWITCHED_FROM else devices_count

    def flop_per_s(self, dtype: str, clock_hz: float | None = None) -> float | None:
        """The peak rate for `dtype`; at `clock_hz` when given, else as the vendor quotes it.

        None when the device has no such rate or it is not known.
        """
        if clock_hz is None:
            quoted = self.peak_flop_per_s.get(dtype)
            return None if quoted is None or quoted.value is None else float(quoted.value)
        rate = self.flop_per_clock_per_unit.get(dtype)
        if rate is None or rate.value is None or self.units.value is None:
            return None
        return float(self.units.value * rate.value * clock_hz)

    def clock_hz(self, dtype: str) -> float | None:
        """The clock at which the vendor quotes the peak for `dtype`; None when not known."""
        quoted = self.reference_clock_hz.get(dtype)
        return None if quoted is None or quoted.value is None else float(quoted.value)

    def source(self, dtype: str) -> str | None:
        """Source of the peak for `dtype`, with its note; None for a type not in the table."""
        quoted = self.peak_flop_per_s.get(dtype)
        if quoted is None:
            return None
        return quoted.source if quoted.note is None else f"{quoted.source} ({quoted.note})"


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: str
    host_links: tuple[HostLink, ...]
    devices: tuple[DevicePeaks, ...]


@cache
def _table() -> _Table:
    text = files("chopper").joinpath("data", "device_peaks.json").read_bytes()
    return msgspec.json.decode(text, type=_Table)


def known_devices() -> tuple[DevicePeaks, ...]:
    """All devices of the table."""
    return _table().devices


def known_host_links() -> tuple[HostLink, ...]:
    """All links between devices and hosts."""
    return _table().host_links


class HostRates(NamedTuple):
    """Rates of a link between device and host, and where they come from."""

    to_device_bytes_per_s: float
    to_host_bytes_per_s: float
    source: str


def host_link_of(device: DevicePeaks) -> HostLink | None:
    """Look up a device's link to its host; None when its PCIe generation is not known."""
    wanted = device.host_link or f"pcie-{device.pcie_generation.value}"
    return next((link for link in known_host_links() if link.id == wanted), None)


def host_rates_of(device: DevicePeaks) -> HostRates | None:
    """Return the rates of a device's link to its host; None where they are not known.

    As measured; of PCIe, PCIe 5.0's scaled by the quoted rate; else half of what is quoted. Within
    a shared memory a copy reads and writes it.
    """
    link = host_link_of(device)
    if link is None:
        return None
    if link.shared:
        rate = device.memory_bandwidth_bytes_per_s.value
        return None if rate is None else HostRates(rate / 2, rate / 2, "one memory for both")
    to_device, to_host = link.to_device_bytes_per_s.value, link.to_host_bytes_per_s.value
    if to_device is not None and to_host is not None:
        return HostRates(to_device, to_host, f"{link.label}, measured")
    quoted = link.bytes_per_s.value
    if quoted is None:
        return None
    if not link.id.startswith("pcie"):
        return HostRates(quoted / 2, quoted / 2, f"{link.label}, as quoted")
    (fifth,) = (other for other in known_host_links() if other.id == "pcie-5")
    to_device, to_host = fifth.to_device_bytes_per_s.value, fifth.to_host_bytes_per_s.value
    scale = quoted / (fifth.bytes_per_s.value or quoted)
    source = f"measured on {fifth.label}, scaled to {link.label.removesuffix(' x16')}"
    return HostRates(scale * (to_device or 0), scale * (to_host or 0), source)


def lookup(
    name: str, *, multi_processor_count: int | None = None, memory_bytes: int | None = None
) -> DevicePeaks | None:
    """The device that a driver calls `name`, or None.

    Args:
        name: as in torch.cuda.get_device_name(), NVML or a trace's deviceProperties; or the
            table's own label.
        multi_processor_count: SMs or CUs as reported. A known name with another count is a
            partition or another product: None.
        memory_bytes: total memory as reported; tells 40 from 80 GB where the name does not.

    None also when the name fits several devices and the arguments do not tell them apart.
    """
    fitting = [
        device
        for device in _of_name(name)
        if multi_processor_count in (None, device.units.value) and _has_memory(device, memory_bytes)
    ]
    return fitting[0] if len(fitting) == 1 else None


def peaks_of(device: Device | None) -> DevicePeaks | None:
    """Look up a device as a run lists it, None when it is not in the table."""
    if device is None or device.name is None:
        return None
    return lookup(
        device.name,
        multi_processor_count=device.multiprocessor_count,
        memory_bytes=device.memory_bytes,
    )


def could_be(listed: Device, device: DevicePeaks) -> bool:
    """Return whether what a run says of a device may be said of one of the table.

    A name that the table does not have contradicts none.
    """
    alike = _of_name(listed.name) if listed.name else ()
    units, unit_count = device.units.value, listed.multiprocessor_count
    return (
        (not alike or device in alike)
        and (None in (units, unit_count) or units == unit_count)
        and _has_memory(device, listed.memory_bytes)
    )


@lru_cache(maxsize=64)
def _of_name(name: str) -> tuple[DevicePeaks, ...]:
    wanted = " ".join(name.split())
    return tuple(
        device
        for device in known_devices()
        if wanted == device.label
        or any(re.fullmatch(pattern, wanted, re.IGNORECASE) for pattern in device.names)
    )


def _has_memory(device: DevicePeaks, memory_bytes: int | None) -> bool:
    nominal = device.memory_bytes.value
    if memory_bytes is None or nominal is None:
        return True
    low, high = _MEMORY_RATIO_RANGE
    return low <= memory_bytes / nominal <= high


def why_unknown(
    name: str, *, multi_processor_count: int | None = None, memory_bytes: int | None = None
) -> str:
    """Say why :func:`lookup` has no peak for a device."""
    alike = _of_name(name)
    if not alike:
        return f"device {name!r} is not in the table of peaks"
    units = sorted({device.units.value for device in alike if device.units.value is not None})
    if multi_processor_count is not None and multi_processor_count not in units:
        reported = f"{multi_processor_count} units"
        listed = " or ".join(str(count) for count in units)
    elif memory_bytes is not None:
        reported, listed = f"{memory_bytes / 1e9:.0f} GB of memory", "another size"
    else:
        return f"device {name!r} is several products in the table of peaks, and nothing tells which"
    return (
        f"device {name!r} reports {reported} and the table of peaks has it with {listed}: a "
        "partition, or another product"
    )


def named(name: str) -> DevicePeaks:
    """The device that a person means: the first of :func:`meant`."""
    return meant(name)[0]


def meant(name: str) -> tuple[DevicePeaks, ...]:
    """The device that a person means, then the others of the same family that fit the name.

    ``h100-sxm``, ``H100 SXM``, ``NVIDIA H100 80GB HBM3`` and ``h100`` are the same; ``rtx4090`` and
    ``4090``, too. A family's name means its SXM board or its X model, the one with most memory.

    Raises:
        UsageError: no device is called so, or several are and none of them is the usual one.
    """
    from chopper.quantities import one_of

    if name.strip().lower() in ("cpu", "host"):
        raise UsageError(
            f"device {name!r}: found a CPU, expected an accelerator: the table has no peaks of "
            "CPUs (`chopper calibrate` measures this one's)"
        )
    device = lookup(name)
    fitting = [device] if device is not None else _fitting_words(name)
    if len(fitting) > 1:
        usual = [d for d in fitting if re.search(r"-sxm|\dx$", d.id)]
        families = {_model(d)[0] for d in fitting}
        if len(families) > 1 or not usual:
            names = sorted(short_name(d) for d in fitting)
            choices = f"choose {', '.join(names[:-1])} or {names[-1]}"
            if len(names) > 8:
                choices = f"there are {_families()}"
            raise UsageError(f"device {name!r} is not one device; {choices}")
        fitting.sort(key=lambda d: (d not in usual, -(d.memory_bytes.value or 0)))
    if not fitting:
        near = [short_name(d) for d in known_devices() if _is_near(d, name)]
        one_of("device", name, near, otherwise=f"there are {_families()}")
    return tuple(fitting)


def short_name(device: DevicePeaks) -> str:
    """Return a device's id without its vendor."""
    return device.id.partition("-")[2]


def _fitting_words(name: str) -> list[DevicePeaks]:
    """Return the devices whose id and label hold all words of a name; those called so, first."""
    wanted, spelled = _words(name), "-".join(name.lower().split())
    fitting = []
    for device in known_devices():
        known = _words(f"{device.id} {device.label} geforce tesla instinct gpu")
        if spelled in (device.id, short_name(device), device.label.lower().replace(" ", "-")):
            return [device]
        numbered = any(word.isdigit() for word in wanted)
        if wanted and wanted <= known and not (numbered and _VARIANTS & (known - wanted)):
            fitting.append(device)
    if fitting:
        return fitting
    # A model without its last letter: mi300 for mi300x.
    return [
        device
        for device in known_devices()
        for stem, model in [_model(device)]
        if stem in wanted
        and wanted - {model[:-1]} <= _words(f"{device.id} {device.label} instinct")
    ]


def _model(device: DevicePeaks) -> tuple[str, str]:
    """Return a device's model up to its last digit, ``mi300``, and whole, ``mi300x``."""
    model = re.sub(r"^\w+-((?:[a-z]+-)*\w+(?:-ti)?).*", r"\1", device.id)
    return model.rstrip(string.ascii_lowercase), model


def _words(name: str) -> set[str]:
    """Return the words of a device's name as people write it: ``RTX4090``, ``SXM5``, ``80 GB``."""
    text = re.sub(r"(?<!\d)(\d{1,6}) ?(gb|ti)\b", r" \1\2", name.lower().replace("_", " "))
    text = re.sub(r"(rtx|nvidia|amd)(?=\w)", r"\1 ", re.sub(r"sxm\d\b", "sxm", text))
    return set(re.findall(r"\w+", re.sub(r"(?<=\d)(ti|super|xtx?)\b", r" \1", text)))


def _is_near(device: DevicePeaks, name: str) -> bool:
    """Return whether a name has the device's model number, or the beginning or end of it.

    Names that only look alike are other devices: ``5080`` is not ``b300``.
    """
    numbers = [word for word in _words(_model(device)[1]) if re.search(r"\d", word)]
    return any(
        word.startswith(number) or number.startswith(word) or number.endswith(word)
        for number in numbers
        for word in _words(name)
        if re.search(r"\d\d", word)
    )


def _families() -> str:
    """Summarize the device table by vendor; large families are named once by their brand."""
    of: dict[str, dict[str, None]] = {}
    for device in known_devices():
        brand, dash, _ = _model(device)[1].partition("-")
        of.setdefault(device.vendor, {})[f"{brand}{dash and '-…'}"] = None
    return "; ".join(f"{vendor.upper()} {', '.join(families)}" for vendor, families in of.items())


class Reach(msgspec.Struct, kw_only=True, frozen=True):
    """Share of a device's peak rates that well-shaped work reaches."""

    products: float
    """Share of FLOP/s, by matrix products."""
    memory: float
    """Share of the memory's bandwidth."""
    source: str


@cache
def _reaches() -> dict[str, dict[str, Reach]]:
    data = msgspec.json.decode(files("chopper").joinpath("data", "achievable.json").read_bytes())
    return {
        part: {name: msgspec.convert(value, Reach) for name, value in data[part].items()}
        for part in ("devices", "vendors")
    }


def reach_of(device: DevicePeaks) -> Reach:
    """Look a device of the table up; a device that is not listed has its vendor's reach."""
    table = _reaches()
    return table["devices"].get(device.id) or table["vendors"][device.vendor]


class Priced(msgspec.Struct, kw_only=True, frozen=True):
    """A number with its source."""

    value: Annotated[float, msgspec.Meta(gt=0, le=1e12)]
    source: str


class Prices(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A dated list of prices, all in one currency."""

    schema: str = "chopper.prices/1"
    date: str
    currency: str
    electricity_per_kwh: Priced
    pue_ratio: Priced
    devices: dict[str, Priced] = {}
    """Device id → price of one device for one hour."""


def load_prices(path: Path | None = None) -> Prices:
    """Read a price list from a file, or, for None, the built-in one.

    Raises:
        InputError: it cannot be read, or a field is missing, unknown or wrong.
    """
    where = "prices.json" if path is None else str(path)
    shipped = files("chopper").joinpath("data", "prices.json")
    data = shipped.read_bytes() if path is None else read_bytes(path)
    return decode_document(
        data,
        Prices,
        "chopper.prices/1",
        f"{where}: is not a price list",
        remedy="give the fields that the built-in list has",
    )
