"""rocprofv3's databases (``rocprofv3 --sys-trace --output-format rocpd``), schema 3.

Every table carries the recording's identifier as a suffix, and several recordings may be merged
into one file; rows of one belong together by that suffix. Times are nanoseconds of the host's
monotonic clock. A kernel or copy is joined to the call that launched it by the correlation id of
its event.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from chopper.collectors.formats.parsed import NO_VALUE, is_one_of
from chopper.collectors.formats.recording import (
    Ordinals,
    Recording,
    blocks_of,
    by_number,
    counters_table,
    json_member,
    lookup,
    ordinals_of,
    renamed,
    streams_or_queues,
    taken,
)
from chopper.collectors.formats.sqlite import Database

_SUFFIXED = re.compile(r"rocpd_(kernel_dispatch|region)((?:_[0-9A-Fa-f_-]+)?)")
_MOST_RECORDINGS = 4096
_COPY_NAMES = {
    "HOST_TO_DEVICE": "Memcpy HtoD (Host -> Device)",
    "DEVICE_TO_HOST": "Memcpy DtoH (Device -> Host)",
    "DEVICE_TO_DEVICE": "Memcpy DtoD (Device -> Device)",
    "HOST_TO_HOST": "Memcpy HtoH (Host -> Host)",
}


def knows(database: Database) -> bool:
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
    tool = database.with_schema("a rocpd database of rocprofv3", f"rocpd_metadata{suffixes[0]}")
    recording = Recording(path=database.path, tool=tool, boot_clock=True)
    for suffix in suffixes:
        for table in ("kernel_dispatch", "region", "memory_copy"):
            database.require(tool, f"rocpd_{table}{suffix}", "start", "end")
        _one(database, recording, suffix)
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
    grid = [rows[f"grid_size_{axis}"] for axis in "xyz"]
    recording.device.add(
        rows["start"],
        rows["end"],
        pid=pid_of(rows["pid"]),
        device_id=ordinals_of(rows["agent_id"], ordinals),
        stream_id=streams_or_queues(rows["stream_id"], rows["queue_id"]),
        kind="kernel",
        name=by_number(rows["kernel_id"], kernels),
        correlation_id=_correlation(rows["event_id"], events),
        grid=list(map(blocks_of, grid, block)),
        block=block,
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
    target = ordinals_of(copies["dst_agent_id"], ordinals)
    source = ordinals_of(copies["src_agent_id"], ordinals)
    recording.device.add(
        copies["start"],
        copies["end"],
        pid=pid_of(copies["pid"]),
        device_id=np.where(target >= 0, target, source),
        stream_id=streams_or_queues(copies["stream_id"], copies["queue_id"]),
        kind="memcpy",
        name=renamed(by_number(copies["name_id"], strings), copy_name),
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


def _agents(db: Database, recording: Recording, table: str) -> Ordinals:
    """Return the ordinal of each agent that is a GPU."""
    rows = db.integers(table, ("id", "type_index"))
    columns = (db.texts(table, name) for name in ("type", "product_name", "name", "extdata"))
    gpus: list[tuple[int | None, int, str | None, object]] = []
    for agent, index, kind, product, generic, details in zip_longest(
        rows["id"].tolist(), rows["type_index"].tolist(), *columns
    ):
        if agent is not None and (kind or "").upper() == "GPU":
            ordinal = index if 0 <= index < 1 << 31 else len(gpus)
            gpus.append((agent, ordinal, product or generic, json_member(details, "cu_count")))
    return recording.add_devices(gpus)


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
    number = taken(events["category_id"], lookup(events["id"], rows["event_id"]))
    codes, domains = by_number(number, strings)
    category = codes, [None, *(api_category(domain or "") for domain in domains[1:])]
    marker = is_one_of(category, "annotation")
    codes, names = by_number(rows["name_id"], strings)
    messages = _messages(db, table, rows["event_id"][marker])
    for row in np.flatnonzero(marker).tolist() if messages else ():
        text = messages.get(int(rows["event_id"][row]))
        if text:
            codes[row] = len(names)
            names.append(text)
    recording.host.add(
        rows["start"],
        rows["end"],
        pid=pid_of(rows["pid"]),
        tid=tid_of(rows["tid"]),
        category=category,
        name=(codes, names),
        correlation_id=np.where(marker, NO_VALUE, _correlation(rows["event_id"], events)),
    )


def api_category(domain: str) -> str:
    """Return the category of an API's calls; ranges that the program names are annotations."""
    upper = domain.upper()
    if "MARKER" in upper or "ROCTX" in upper:
        return "annotation"
    return "driver" if upper.startswith(("HSA", "ROCR")) else "runtime"


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
