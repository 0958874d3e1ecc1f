"""Rates that ``chopper calibrate`` measured on a machine, kept with their conditions.

A peak from a datasheet is a promise; this is what the machine at hand did. On machines without an
accelerator there is no datasheet peak worth the name, and what was measured is the reference.

The ceilings are *per rank*: what one process achieved while ``ranks`` processes with ``threads``
threads each did the same at the same time. Two ranks that share a memory bus do not have its
bandwidth each.
"""

from __future__ import annotations

import datetime
import os
import socket
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from chopper.errors import InputError, OutputError, printable
from chopper.storage.files import decode_document, document, read_bytes, write_atomic
from chopper.tables.ranges import Count, Duration, Ranks, Ratio

SCHEMA = "chopper.calibration/1"

DTYPE_NAMES = {
    "float64": "fp64",
    "double": "fp64",
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
}
"""Torch's name of a type → the short one."""
STREAM_PASSES = {"copy": 2, "scale": 2, "add": 3, "triad": 3}
"""STREAM's kernels → arrays that each reads or writes once."""
MIB = 1 << 20
_LATEST_NS = 4_102_444_800_000_000_000
_Rate = Annotated[float, msgspec.Meta(gt=0, le=1e18)]


def spread_ratio(values: Sequence[float]) -> float:
    """Distance between the quartiles over the median; 0 of a single value."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


class Measured(msgspec.Struct, kw_only=True, frozen=True):
    """One rate, measured several times."""

    what: str
    """For example ``bf16 512x512x512``, ``copy``, ``all_reduce``."""
    best_per_s: _Rate
    """Fastest repeat, in FLOP or bytes per second. A ceiling is made of these: whatever disturbs a
    measurement only makes it slower."""
    median_per_s: _Rate
    spread_ratio: Ratio
    """Distance between the quartiles of the times over their median; large on a busy machine."""
    repeats_count: Count
    size_bytes: Count | None = None


class Calibration(msgspec.Struct, kw_only=True, frozen=True):
    """Rates that one process achieves on one device of one machine."""

    kind: Literal["full", "quick"]
    created_ns: Annotated[int, msgspec.Meta(ge=0, lt=_LATEST_NS)]
    chopper_version: str
    torch_version: str
    hostname: str
    device_type: str
    device_name: str
    ranks: Ranks
    """Processes that measured at the same time."""
    threads: Ranks
    cores: Ranks
    """Cores that the processes could use together."""
    gemm: dict[str, list[Measured]] = {}
    """Data type → rate of matrix products per shape."""
    memory: list[Measured] = []
    """Copy and triad in the device's memory, bytes read and written."""
    transfer: list[Measured] = []
    link: list[Measured] = []
    """Bus bandwidth of collectives between ``link_ranks`` ranks on this machine."""
    link_ranks: Ranks | None = None
    link_backend: str | None = None
    launch_ns: Duration | None = None
    """Time the host takes to issue the smallest operator."""
    roundtrip_ns: Duration | None = None
    """Time from issuing the smallest operator until its completion is known."""
    absent: dict[str, str] = {}
    """Part that could not be measured → the reason."""

    def flop_per_s(self, dtype: str) -> float | None:
        """Best rate of a product of a type (``bf16``, ``torch.bfloat16``), None: not measured."""
        name = dtype.removeprefix("torch.").lower()
        shapes = self.gemm.get(DTYPE_NAMES.get(name, name), [])
        return max((shape.best_per_s for shape in shapes), default=None)

    @property
    def memory_bytes_per_s(self) -> float | None:
        """Best bandwidth of the device's memory, reads plus writes."""
        return max((m.best_per_s for m in self.memory), default=None)

    @property
    def link_bytes_per_s(self) -> float | None:
        """Best bus bandwidth of a collective: bytes × bus factor over time, one direction."""
        return max((m.best_per_s for m in self.link), default=None)

    @property
    def source(self) -> str:
        """Origin of these numbers, in words."""
        day = datetime.datetime.fromtimestamp(self.created_ns / 1e9, datetime.UTC).date()
        how = "quickly " if self.kind == "quick" else ""
        return (
            f"{how}measured on {self.device_name} ({self.hostname}) with {self.ranks} process"
            f"{'' if self.ranks == 1 else 'es'} of {self.threads} thread"
            f"{'' if self.threads == 1 else 's'}, {day}"
        )

    @property
    def spread_ratio(self) -> float | None:
        """Median spread of the matrix products and of memory; above 0.2 the machine was busy."""
        spreads = [m.spread_ratio for rates in (*self.gemm.values(), self.memory) for m in rates]
        return statistics.median(spreads) if spreads else None

    @property
    def key(self) -> tuple[str, str, int, int]:
        """Conditions of the result; a newer one with the same key replaces it."""
        return self.hostname, self.device_name, self.ranks, self.threads


class _Store(msgspec.Struct, kw_only=True):
    schema: str = SCHEMA
    calibrations: list[Calibration] = []


def default_path() -> Path:
    """``$XDG_DATA_HOME/chopper/calibration.json``, by default below ``~/.local/share``."""
    base = os.environ.get("XDG_DATA_HOME")
    # The specification wants relative values ignored.
    home = Path(base) if base and Path(base).is_absolute() else Path.home() / ".local/share"
    return home / "chopper" / "calibration.json"


def load_all(path: Path | None = None) -> list[Calibration]:
    """All stored results, the newest first; empty when nothing was ever stored.

    Raises:
        InputError: the file is damaged, or was written by a newer chopper.
    """
    path = path or default_path()
    if not os.path.lexists(path):
        return []
    data = read_bytes(path)
    remedy = "measure again with `chopper calibrate --force`"
    problem = f"{path}: is not a calibration"
    stored = decode_document(data, _Store, SCHEMA, problem, remedy=remedy).calibrations
    return sorted(stored, key=lambda c: c.created_ns, reverse=True)


def load(
    device_name: str | None,
    hostname: str | None = None,
    *,
    cpu_name: str | None = None,
    ranks: int | None = None,
    threads: int | None = None,
    path: Path | None = None,
) -> Calibration | None:
    """Return the newest stored result for a device of a machine, or None.

    Args:
        device_name: as torch names the device; None for the host's cores.
        hostname: None for this machine.
        cpu_name: model of the host's processor, for names such as ``localhost``; None for any.
        ranks: processes that share the machine; None for any.
        threads: of each; None for any.
        path: file to read instead of the default one.
    """
    hostname = hostname if hostname is not None else socket.gethostname()
    for stored in load_all(path):
        same_device = (
            stored.device_type == "cpu" and cpu_name in (None, stored.device_name)
            if device_name is None
            else stored.device_name == device_name
        )
        if (
            same_device
            and stored.hostname == hostname
            and ranks in (None, stored.ranks)
            and threads in (None, stored.threads)
        ):
            return stored
    return None


def save(result: Calibration, path: Path | None = None, *, replace_damaged: bool = False) -> Path:
    """Store a result beside those of other devices and conditions; the same key is replaced.

    Raises:
        InputError: the file that is there is damaged, and not to be replaced.
        OutputError: it cannot be written.
    """
    path = path or default_path()
    try:
        unchanged = [stored for stored in load_all(path) if stored.key != result.key]
    except InputError:
        if not replace_damaged:
            raise
        unchanged = []
    check_writable(path)
    store = _Store(calibrations=[result, *unchanged])
    write_atomic(path, document(store))
    return path


def check_writable(path: Path) -> None:
    """Make the folder of a file that is going to be written, or raise OutputError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise OutputError(f"{path.parent}: cannot be created ({exc.strerror})") from exc
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise OutputError(f"{path}: cannot be written; choose another --output")


def to_manifest(calibration: Calibration) -> dict[str, Any]:
    """As the manifest of a rank keeps it."""
    fields: dict[str, Any] = msgspec.to_builtins(calibration)
    return fields | {"schema": SCHEMA}


def from_manifest(fields: dict[str, Any]) -> Calibration | None:
    """The reverse of :func:`to_manifest`; None when another version of chopper wrote it.

    Raises:
        InputError: it is damaged.
    """
    if fields.get("schema") != SCHEMA:
        return None
    try:
        return msgspec.convert(fields, Calibration)
    except (msgspec.ValidationError, RecursionError) as exc:
        raise InputError(
            f"the calibration in the run's manifest is damaged ({printable(str(exc))})"
        ) from exc
