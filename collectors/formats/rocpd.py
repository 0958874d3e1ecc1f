"""rocprofv3's databases (``rocprofv3 --sys-trace --output-format rocpd``), schema 3.

Every table carries the recording's identifier as a suffix, and several recordings may be merged
into one file; rows of one belong together by that suffix. Times are nanoseconds of the host's
monotonic clock. A kernel or copy is joined to the call that launched it by the correlation id of
its event.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from chopper.collectors.formats.arrays import NO_VALUE
from chopper.collectors.formats.recording import (
    Recording,
    blocks_of,
    by_number,
    constant,
    counters_table,
    json_member,
    lookup,
    streams_or_queues,
    taken,
    triples,
    units_count,
)
from chopper.errors import InputError
from chopper.storage.manifest import Device

if TYPE_CHECKING:
    from chopper.collectors.formats.database import Database

_SUFFIXED = re.compile(r"rocpd_(kernel_dispatch|region)((?:_[0-9A-Fa-f_-]+)?)")
_MOST_RECORDINGS = 4096
_COPY_NAMES = {
    "HOST_TO_DEVICE": "Memcpy HtoD (Host -> Device)",
    "DEVICE_TO_HOST": "Memcpy DtoH (Device -> Host)",
    "DEVICE_TO_DEVICE": "Memcpy DtoD (Device -> Device)",
    "HOST_TO_HOST": "Memcpy HtoH (Host -> Host)",
}


def is_rocpd(database: Database) -> bool:
    """Return whether a database is one of rocprofv3."""
    return any(_SUFFIXED.fullmatch(table) for table in database.tables)


def read(database: Database) -> Recording:
    """Kernels, copies, regions (API calls and ROCTx ranges) and counters.

    Raises:
        InputError: a table lacks what makes it one.
    """
    suffixes = sorted({m[2] for table in database.tables if (m := _SUFFIXED.fullmatch(table))})[
        :_MOST_RECORDINGS
    ]
    version = database.facts(f"rocpd_metadata{suffixes[0]}", "tag", "value").get("schema_version")
    tool = "a rocpd database of rocprofv3" + (f", schema {version}" if version else "")
    recording = Recording(path=database.path, tool=tool, boot_clock=True)
    for suffix in suffixes:
        for table in ("kernel_dispatch", "region", "memory_copy"):
            name = f"rocpd_{table}{suffix}"
            if name in database.tables and not database.has(name, "start", "end"):
                raise InputError(
                    f"{database.path}: {tool}: its table {name} lacks start or end; found "
                    f"{', '.join(database.columns(name)[:8]) or 'none'}"
                )
        _one(database, recording, suffix)
    recording.findings += database.findings
    return recording


def _one(db: Database, recording: Recording, suffix: str) -> None:
    def name(table: str) -> str:
        return f"rocpd_{table}{suffix}"

    strings = db.named(name("string"), "id", "string")
    processes = db.integers(name("info_process"), ("id", "pid"))
    threads = db.integers(name("info_thread"), ("id", "pid", "tid"))
    pid_of = partial(_real, keys=processes["id"], values=processes["pid"])
    tid_of = partial(_real, keys=threads["id"], values=threads["tid"])
    events = db.integers(name("event"), ("id", "category_id", "correlation_id", "stack_id"))
    ordinals = _agents(db, recording, name("info_agent"))
    _regions(db, recording, name("region"), strings, events, pid_of, tid_of)
    rows = db.integers(
        name("kernel_dispatch"),
        (
            *("pid", "agent_id", "kernel_id", "dispatch_id", "queue_id", "stream_id", "start"),
            *("end", "group_segment_size", "event_id"),
            *(f"{what}_size_{axis}" for what in ("workgroup", "grid") for axis in "xyz"),
        ),
    )
    symbols = name("info_kernel_symbol")
    kernels = db.named(symbols, "id", "kernel_name") | db.named(symbols, "id", "display_name")
    block = [rows[f"workgroup_size_{axis}"] for axis in "xyz"]
    grid = [
        blocks_of(rows[f"grid_size_{axis}"], size) for axis, size in zip("xyz", block, strict=True)
    ]
    recording.device.add(
        rows["start"],
        rows["end"],
        pid=pid_of(rows["pid"]),
        device_id=_ordinal(rows["agent_id"], ordinals),
        stream_id=streams_or_queues(rows["stream_id"], rows["queue_id"]),
        kind=constant("kernel", len(rows["start"])),
        name=by_number(rows["kernel_id"], kernels),
        correlation_id=_correlation(rows["event_id"], events),
        grid=triples(*grid),
        block=triples(*block),
        shared_memory_bytes=rows["group_segment_size"],
    )
    _counters(db, recording, name, rows, kernels)
    copies = db.integers(
        name("memory_copy"),
        (
            *("pid", "start", "end", "name_id", "dst_agent_id", "src_agent_id", "size"),
            *("queue_id", "stream_id", "event_id"),
        ),
    )
    target = _ordinal(copies["dst_agent_id"], ordinals)
    source = _ordinal(copies["src_agent_id"], ordinals)
    recording.device.add(
        copies["start"],
        copies["end"],
        pid=pid_of(copies["pid"]),
        device_id=np.where(target >= 0, target, source),
        stream_id=streams_or_queues(copies["stream_id"], copies["queue_id"]),
        kind=constant("memcpy", len(copies["start"])),
        name=by_number(copies["name_id"], {n: copy_name(s) for n, s in strings.items()}),
        correlation_id=_correlation(copies["event_id"], events),
        bytes_count=copies["size"],
    )


def copy_name(text: str) -> str:
    """A direction as rocprofv3 writes it, as Kineto names copies."""
    plain = text.upper().removeprefix("MEMORY_COPY_")
    return _COPY_NAMES.get(plain, f"Memcpy ({text})")


def _real(ids: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The operating system's number behind the database's own; its own where that is unknown."""
    numbers = taken(values, lookup(keys, ids))
    return np.where(numbers == NO_VALUE, ids, numbers)


def _correlation(event: np.ndarray, events: dict[str, np.ndarray]) -> np.ndarray:
    row = lookup(events["id"], event)
    correlation = taken(events["correlation_id"], row)
    # A stack id is what calls and what they launched share where correlation ids are left at 0.
    stack = taken(events["stack_id"], row)
    return np.where(correlation > 0, correlation, np.where(stack > 0, stack, NO_VALUE))


def _agents(db: Database, recording: Recording, table: str) -> dict[int, int]:
    """Ordinal of each agent that is a GPU."""
    rows = db.integers(table, ("id", "type_index", "logical_index"))
    kinds = db.texts(table, "type")
    product, generic = db.texts(table, "product_name"), db.texts(table, "name")
    details = db.texts(table, "extdata")
    ordinals: dict[int, int] = {}
    for i, (agent, index) in enumerate(
        zip(rows["id"].tolist(), rows["type_index"].tolist(), strict=True)
    ):
        if i >= len(kinds) or (kinds[i] or "").upper() != "GPU":
            continue
        ordinal = index if 0 <= index < 1 << 31 else len(ordinals)
        ordinals[agent] = ordinal
        if any(d.device_id == ordinal for d in recording.devices):
            continue
        name = (product[i] if i < len(product) else None) or (
            generic[i] if i < len(generic) else None
        )
        recording.devices.append(
            Device(
                device_id=ordinal,
                name=name or None,
                multiprocessor_count=units_count(
                    json_member(details[i] if i < len(details) else None, "cu_count")
                ),
            )
        )
    recording.devices.sort(key=lambda d: d.device_id)
    return ordinals


def _ordinal(agents: np.ndarray, ordinals: dict[int, int]) -> np.ndarray:
    distinct, codes = np.unique(agents, return_inverse=True)
    values = [ordinals.get(int(a), -1) for a in distinct]
    return np.array(values, dtype=np.int64)[codes] if len(distinct) else agents


def _regions(
    db: Database,
    recording: Recording,
    table: str,
    strings: dict[int, str],
    events: dict[str, np.ndarray],
    pid_of: Any,
    tid_of: Any,
) -> None:
    rows = db.integers(table, ("pid", "tid", "start", "end", "name_id", "event_id"))
    category = taken(events["category_id"], lookup(events["id"], rows["event_id"]))
    codes, names = by_number(category, strings)
    kinds = np.array([api_category(n or "") for n in names])
    correlation = _correlation(rows["event_id"], events)
    marker = kinds[codes] == 3
    name = by_number(rows["name_id"], strings)
    messages = _messages(db, table, rows["event_id"][marker])
    if messages:
        texts = [messages.get(int(e)) for e in rows["event_id"][marker].tolist()]
        new, old = name[0].copy(), list(name[1])
        at = np.flatnonzero(marker)
        for i, text in zip(at.tolist(), texts, strict=True):
            if text:
                new[i] = len(old)
                old.append(text)
        name = new, old
    recording.host.add(
        rows["start"],
        rows["end"],
        pid=pid_of(rows["pid"]),
        tid=tid_of(rows["tid"]),
        category=(kinds[codes].astype(np.int32), [None, "runtime", "driver", "annotation"]),
        name=name,
        correlation_id=np.where(marker, NO_VALUE, correlation),
    )


def api_category(domain: str) -> int:
    """1 for calls of the runtime, 2 for those below it, 3 for ranges that the program names."""
    upper = domain.upper()
    if "MARKER" in upper or "ROCTX" in upper:
        return 3
    return 2 if upper.startswith(("HSA", "ROCR")) else 1


def _messages(db: Database, region: str, wanted: np.ndarray) -> dict[int, str]:
    """Return texts of ROCTx ranges by event, from the event's details or the call's arguments."""
    suffix = region.removeprefix("rocpd_region")
    messages: dict[int, str] = {}
    numbers = set(wanted.tolist())
    if not numbers:
        return messages
    events = db.integers(f"rocpd_event{suffix}", ("id",))["id"].tolist()
    details = db.texts(f"rocpd_event{suffix}", "extdata")
    for number, text in zip(events, details, strict=False):
        if number in numbers and text and "message" in text:
            message = json_member(text, "message")
            if isinstance(message, str) and message:
                messages[number] = message
    table = f"rocpd_arg{suffix}"
    for number, name, value in zip(
        db.integers(table, ("event_id",))["event_id"].tolist(),
        db.texts(table, "name"),
        db.texts(table, "value"),
        strict=False,
    ):
        if number in numbers and name == "message" and value:
            messages.setdefault(number, value)
    return messages


def _counters(
    db: Database,
    recording: Recording,
    name: Any,
    rows: dict[str, np.ndarray],
    kernels: dict[int, str],
) -> None:
    table = name("pmc_event")
    values = db.texts(table, "value")
    if not values:
        return
    pmc = db.integers(table, ("event_id", "pmc_id"))
    names = db.named(name("info_pmc"), "id", "symbol") | db.named(name("info_pmc"), "id", "name")
    row = lookup(rows["event_id"], pmc["event_id"])
    recording.tables["kernel_counter"] = counters_table(
        recording.source,
        [
            (
                int(rows["dispatch_id"][at]),
                kernels.get(int(rows["kernel_id"][at])),
                names.get(number),
                value,
            )
            for at, number, value in zip(row.tolist(), pmc["pmc_id"].tolist(), values, strict=False)
            if at >= 0
        ],
    )
