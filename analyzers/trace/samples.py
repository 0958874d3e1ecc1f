"""The samples of each rank: device telemetry is recorded once per host, for all devices."""

from __future__ import annotations

import contextlib
import re
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper.analyzers.trace.columns import ints, matching, strings
from chopper.arrow import with_column
from chopper.storage.clock import in_order
from chopper.storage.manifest import Device, RankManifest
from chopper.storage.run import Run
from chopper.tables import TABLES

_WORK = ("cpu_op", "runtime", "driver")
"""Categories of host spans that show that a thread runs operators or launches."""


def of_rank(run: Run, rank: int, name: str) -> pa.Table:
    """Rows of a device table that are of the device that a rank computes on, in time order.

    What the rank recorded itself counts first, then what the other ranks of its host did. Rows are
    the device's by UUID, else those of the one device with its PCI address, of which it is a part
    (MIG); where either side has none, by ordinal, unless ranks of the host share one (each then
    sees a device of its own, and calls it the same); where it is not known what the rank computes
    on and the table holds one device only, all of them.

    Returns:
        The declared table, empty when nothing was sampled of this device. Its ``device_id`` is the
        rank's ordinal of the device, as in the rank's other tables: the driver's differs where
        a process sees some of the devices only, or in another order.
    """
    part, host_ranks = run.part(rank), ranks_beside(run, rank)
    device, ordinals = _device_of(part), [run.part(other).device_id for other in host_ranks]
    if _computes_on_host(run, rank, host_ranks):
        return TABLES[name].empty()
    for source in host_ranks:
        if not run.rows_count(source, name):
            continue
        table = run.table(source, name)
        has_uuids = table["device_uuid"].null_count < table.num_rows
        uuid = device.uuid if device is not None and has_uuids else None
        if uuid is not None:
            wanted = {canonical_uuid(uuid)}
            chosen = _rows_named(table, wanted, part)
            if not chosen.num_rows:
                chosen = _rows_named(
                    table, _partition_uuid(run.table(source, "device_limit"), part), part
                )
        elif part.device_id is not None:
            chosen = table.filter(pc.equal(table["device_id"], part.device_id))
        else:
            chosen = table if len(pc.unique(table["device_id"])) == 1 else table.slice(0, 0)
        # Where each rank of a host sees one device only, all of them call it 0.
        is_ambiguous = len({*ordinals}) < len(ordinals)
        if chosen.num_rows and not (source != rank and uuid is None and is_ambiguous):
            return in_order(chosen)
    return TABLES[name].empty()


def per_device(run: Run, rank: int, name: str) -> list[tuple[int | None, pa.Table]]:
    """Rows of a device table by device: those of the rank's own, else of each that a log speaks of.

    A log of several devices that was imported without a trace belongs to none of them more than to
    another; each is told by its ordinal. None stands for the rank's own device.
    """
    own_rows = of_rank(run, rank, name)
    part = run.part(rank)
    if own_rows.num_rows:
        if part.device_id is not None or not _several(run, rank):
            return [(None, own_rows)]
        # One device alone is in this table, and several in another: both name it alike.
        return [(own_rows["device_id"][0].as_py(), own_rows)]
    table = run.table(rank, name)
    if part.device_id is not None or part.devices or not table.num_rows:
        return []
    if _computes_on_host(run, rank, ranks_beside(run, rank)):
        return []
    numbers = sorted(pc.unique(table["device_id"]).to_pylist())
    return [
        (number, in_order(table.filter(pc.equal(table["device_id"], number)))) for number in numbers
    ]


def _computes_on_host(run: Run, rank: int, ranks: list[int]) -> bool:
    """Tell whether a recorded rank is known to use no device.

    Torch said so at its end, or the others have them. Of a program without torch, or one that was
    killed, it is not known.
    """
    part = run.part(rank)
    if run.manifest.kind != "recorded" or part.device_id is not None:
        return False
    is_known = "torch" in part.environment and part.status != "running"
    return is_known or any(
        run.part(other).device_id is not None for other in ranks if other != rank
    )


def _several(run: Run, rank: int) -> bool:
    """Tell whether a rank's readings are of more than one device."""
    tables = (run.table(rank, name) for name in ("device_clock", "device_counter"))
    return any(len(pc.unique(table["device_id"])) > 1 for table in tables)


def ranks_beside(run: Run, rank: int) -> list[int]:
    """Return the rank, then the others that are known to be on its host."""
    part = run.part(rank)
    if part.hostname is None:
        return [rank]
    # A container samples what it sees: under one name of one machine.
    host_ranks = run.ranks_by_host.get((part.hostname, part.host), ())
    return [rank, *(other for other in host_ranks if other != rank)]


def _device_of(part: RankManifest) -> Device | None:
    """The device that a rank computes on, as it lists it."""
    return next((d for d in part.devices if d.device_id == part.device_id), None)


def _partition_uuid(limits: pa.Table, part: RankManifest) -> set[str]:
    """UUID of the one device whose PCI address the rank's device has; none where it is not one."""
    device = _device_of(part)
    wanted = _slot((device and device.pci_address) or "")
    rows = limits.select(["device_uuid", "pci_address"]).to_pylist() if wanted else []
    uuids = {r["device_uuid"] for r in rows if _slot(r["pci_address"] or "") == wanted}
    return {canonical_uuid(uuid) for uuid in uuids if uuid} if len(uuids) == 1 else set()


def _slot(pci_address: str) -> tuple[int, ...] | None:
    """Domain, bus and device as numbers: vendors write them with more digits or fewer."""
    try:
        domain, bus, rest = pci_address.split(":")
        return tuple(int(n, 16) for n in (domain, bus, rest.partition(".")[0]))
    except ValueError:
        return None


def _rows_named(table: pa.Table, uuids: set[str], part: RankManifest) -> pa.Table:
    """Rows of devices by their UUIDs in one form, under the rank's own ordinal."""
    column = table["device_uuid"].cast(pa.string())
    forms = [u for u in pc.unique(column).to_pylist() if u and canonical_uuid(u) in uuids]
    rows = table.filter(pc.is_in(column, value_set=pa.array(forms, pa.string())))
    return with_column(rows, "device_id", pa.array([part.device_id] * rows.num_rows, pa.int32()))


def table_beside(run: Run, rank: int, name: str) -> pa.Table:
    """A host-wide table as any rank of the host recorded it, in time order; empty for none."""
    for source in ranks_beside(run, rank):
        if run.rows_count(source, name):
            return run.table(source, name).sort_by("time_ns")
    return TABLES[name].empty()


def socket_of(run: Run, rank: int) -> tuple[str, ...]:
    """Name the socket that a rank computes on: parts of one share its power and energy.

    The host and the PCI address without its function, where the address was recorded; else the
    device's UUID; else the rank itself.
    """
    part = run.part(rank)
    host = part.host or ""
    limits = of_rank(run, rank, "device_limit")
    address = limits["pci_address"][0].as_py() if limits.num_rows else None
    if address:
        return host, str(address).lower().partition(".")[0]
    device = _device_of(part)
    if device is not None and device.uuid is not None:
        return host, canonical_uuid(device.uuid)
    return host, f"rank {rank}"


def core_wait_ratio(run: Run, rank: int, start_ns: int, end_ns: int) -> float | None:
    """Share of a time in which a rank's main thread could run and had to wait for a core.

    From the growth of ``process.run_delay_ns`` between the samples within; None with fewer than
    two.
    """
    for source in ranks_beside(run, rank):
        table = run.table(source, "process")
        time_ns = ints(table, "time_ns")
        within = (ints(table, "rank") == rank) & (time_ns >= start_ns) & (time_ns <= end_ns)
        within &= table["run_delay_ns"].is_valid().to_numpy()
        rows = table.filter(within).sort_by("time_ns")
        if rows.num_rows < 2:
            continue
        first, last = rows.take([0, rows.num_rows - 1]).to_pylist()
        waited = last["run_delay_ns"] - first["run_delay_ns"]
        elapsed = last["time_ns"] - first["time_ns"]
        if elapsed > 0 and waited >= 0 and first["pid"] == last["pid"]:
            # A sample's time is known to half of its reading, which may have waited itself.
            return min(float(waited / elapsed), 1.0)
    return None


LEAST_THREAD_SPAN_NS = 1_000_000_000
"""Threads are read twice a second: over less time their share says nothing."""


class ThreadGrowth(NamedTuple):
    """Growth of the kernel's totals of one thread: on a core, ready without one, times put on."""

    tid: int
    name: str
    run_ns: int
    wait_ns: int
    slice_count: int


def thread_growth(run: Run, rank: int, start_ns: int, end_ns: int) -> list[ThreadGrowth]:
    """Return what each thread of a rank did between two moments. PROCESS_THREAD."""
    table = table_beside(run, rank, "process_thread")
    table = table.filter(pa.array(ints(table, "rank") == rank))
    tids, time_ns = ints(table, "tid"), ints(table, "time_ns")
    codes, labels = strings(table, "name")
    totals = np.stack([ints(table, n) for n in ("run_ns", "run_delay_ns", "slice_count")])
    threads = []
    for tid in np.unique(tids).tolist():
        mine = np.flatnonzero(tids == tid)
        # A row stands where something grew: the last one before a moment still holds then.
        first = max(int(np.searchsorted(time_ns[mine], start_ns, side="right")) - 1, 0)
        last = int(np.searchsorted(time_ns[mine], end_ns, side="right")) - 1
        grown = (totals[:, mine[last]] - totals[:, mine[first]]).tolist()
        if last >= first and min(grown) >= 0:
            threads.append(ThreadGrowth(tid, labels[codes[mine[0]]], *grown))
    return threads


def working_tids(host_span: pa.Table) -> set[int]:
    """Return the threads that run operators or launch kernels. HOST_SPAN."""
    works = matching(*strings(host_span, "category", narrow=True), _WORK.__contains__)
    return {*np.unique(ints(host_span, "tid")[works]).tolist()}


def canonical_uuid(uuid: str) -> str:
    """A UUID without prefix, dashes and case: drivers and torch write the same one apart.

    HIP's 16 bytes hold 16 hexadecimal *characters*, which torch shows as the bytes they are.
    """
    plain = uuid.lower().removeprefix("gpu-").replace("-", "")
    with contextlib.suppress(ValueError):
        text = bytes.fromhex(plain).decode("ascii")
        if re.fullmatch("[0-9a-fA-F]{16}", text):
            return text.lower()
    return plain


def in_phase(run: Run, rank: int, samples: pa.Table, phase: str) -> pa.Table:
    """Return the samples of a phase that the program names; all where it names no such phase."""
    phases = run.table(rank, "program_phase")
    phases = phases.filter(pc.equal(phases["name"].cast("string"), phase))
    if not phases.num_rows:
        return samples
    time_ns = samples["time_ns"].to_numpy()
    start_ns, end_ns = (phases[name].to_numpy() for name in ("start_ns", "end_ns"))
    # One after the other: as many have begun as have ended, and one more.
    begun, over = start_ns.searchsorted(time_ns, "right"), end_ns.searchsorted(time_ns, "right")
    return samples.filter(pa.array(begun > over))
