"""Snapshots of torch's caching allocator as typed tables: files, and what a run records itself.

``torch.cuda.memory._dump_snapshot`` writes a pickle, which is a program: here it can make plain
values only. Whoever wrote them, every value is checked.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from chopper.arrow import to_arrow
from chopper.collectors.formats.cleaning import clean
from chopper.collectors.formats.unpack import DAMAGE, pieces
from chopper.errors import InputError
from chopper.limits import Intake
from chopper.tables import TABLES

_PROTOCOLS = range(2, 6)
_HELD_RATIO = 40
"""Memory for each byte of a pickle: an entry of 60 bytes becomes a dict, and a row."""
MOST_ROWS = 5_000_000
_LEAST_ENTRY_BYTES = 16
"""An entry of its own has at least five keys and values, each a reference of 2 bytes or more."""
_MOST_STACK_RATIO = 100
_MOST_STACK_BYTES = 64 << 20
_MOST_FRAMES = 64
_MOST_BYTES = 1 << 62
_LONGEST_NAME = 300
_KEYS = frozenset((str, int, float, bool, type(None)))


def sniff(head: bytes) -> bool:
    """Return whether a file begins as pickles do."""
    return len(head) > 2 and head[0] == 0x80 and head[1] in _PROTOCOLS


def read_snapshot(path: Path) -> dict[str, pa.Table]:
    """ALLOCATOR_SEGMENT, ALLOCATOR_BLOCK and ALLOCATOR_EVENT of a file, packed or not.

    Raises:
        InputError: it is damaged, no snapshot, or holds more than plain values.
    """
    try:
        with path.open("rb") as file:
            data = b"".join(pieces(file, Intake(path, _HELD_RATIO)))
    except OSError as exc:
        raise InputError(f"{path}: cannot be read ({exc.strerror or exc})") from exc
    except DAMAGE as exc:
        raise InputError(f"{path}: the gzip stream is damaged ({exc})") from exc
    return tables_of(load(data, str(path)), str(path), len(data))


def load(data: bytes, where: str) -> Any:
    """The value that a pickle of plain values holds.

    Raises:
        InputError: it is damaged, ends early, or asks for code; nothing of it was run.
    """
    try:
        return _PlainUnpickler(data, where).load()
    except (EOFError, IndexError, struct.error):
        raise InputError(f"{where}: a pickle that ends in the middle ({len(data)} bytes)") from None
    except (pickle.UnpicklingError, AttributeError, KeyError, TypeError, ValueError) as exc:
        # A key that is a list, items for what is no list.
        raise InputError(f"{where}: a damaged pickle ({exc})") from None


class _PlainUnpickler(pickle._Unpickler):
    """Finds no class, so nothing runs.

    ``pickle`` in Python, because the one in C makes its memo as large as the largest index (64 GiB
    for 5 bytes). Keys are checked before they are hashed, which goes as deep as a tuple is nested,
    until the interpreter's stack overflows.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch}

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        raise InputError(
            f"{self._where}: a pickle that asks for code ({f'{module}.{name}'[:80]}), where a "
            "memory snapshot holds plain values only; refused, nothing of it was run"
        )

    def persistent_load(self, pid: Any) -> Any:
        del pid
        return self.find_class("persistent", "id")

    def get_extension(self, code: int) -> None:
        self.find_class("extension", str(code))

    def _set_items(self) -> None:
        items = self.pop_mark()
        self._update(items)

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def _make_dict(self) -> None:
        items = self.pop_mark()
        self.stack.append({})
        self._update(items)

    def _update(self, items: list[Any]) -> None:
        if not {*map(type, items[::2])} <= _KEYS:
            raise TypeError("a key that is neither text nor a number")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def _refuse(self) -> None:
        raise TypeError("sets or bytes, where a memory snapshot holds plain values only")

    dispatch |= {pickle.SETITEM[0]: _set_item, pickle.SETITEMS[0]: _set_items}
    dispatch |= {pickle.DICT[0]: _make_dict}
    # A byte array takes the memory that it names before its bytes are there.
    dispatch |= dict.fromkeys(
        (pickle.ADDITEMS[0], pickle.FROZENSET[0], pickle.BYTEARRAY8[0]), _refuse
    )


def tables_of(snapshot: Any, where: str, size_bytes: int | None = None) -> dict[str, pa.Table]:
    """ALLOCATOR_SEGMENT, ALLOCATOR_BLOCK, ALLOCATOR_EVENT.

    The totals after each event are counted backwards from what the segments hold at the end, so
    that they are right although the history may begin in the middle.

    Args:
        snapshot: as torch gives it.
        where: its name, for messages.
        size_bytes: of the file that it was read from. Lists of a file may refer to one another, so
            that few bytes stand for any number of rows; what the bytes cannot hold is refused.

    Raises:
        InputError: it is no snapshot, or too large to be one.
    """
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("segments"), list):
        kind = type(snapshot).__name__
        keys = ", ".join(map(str, list(snapshot)[:6])) if isinstance(snapshot, dict) else kind
        raise InputError(
            f"{where}: a pickle, but no snapshot of torch's allocator: expected a dict with "
            f"segments and device_traces, found {clean(keys[:120])}"
        )
    most = MOST_ROWS if size_bytes is None else min(MOST_ROWS, size_bytes // _LEAST_ENTRY_BYTES)
    stacks = _Stacks(where, None if size_bytes is None else _MOST_STACK_RATIO * size_bytes)
    segments = _dicts(snapshot["segments"], where, most)
    listed = [s["blocks"] for s in segments if isinstance(s.get("blocks"), list)]
    _check_count(sum(map(len, listed)), most, where, "blocks")
    segment_rows: list[dict[str, Any]] = []
    block_rows: list[dict[str, Any]] = []
    event_rows: list[dict[str, Any]] = []
    allocated: Counter[int] = Counter()
    reserved: Counter[int] = Counter()
    for segment in segments:
        row = _segment(segment)
        segment_rows.append(row)
        block_rows += _blocks(row, _dicts(segment.get("blocks"), where, most), stacks)
        allocated[row["device_id"]] += row["allocated_bytes"] or 0
        reserved[row["device_id"]] += row["total_bytes"] or 0
    traces = snapshot.get("device_traces")
    for device, trace in enumerate(traces if isinstance(traces, list) else []):
        entries = _dicts(trace, where, most)
        _check_count(len(event_rows) + len(entries), most, where, "events")
        event_rows += _events(entries, device, allocated[device], reserved[device], stacks)
    event_rows.sort(key=lambda row: row["time_ns"])
    rows_by_table = {
        "allocator_segment": segment_rows,
        "allocator_block": block_rows,
        "allocator_event": event_rows,
    }
    return {name: _table(name, rows) for name, rows in rows_by_table.items()}


def _dicts(value: Any, where: str, most: int) -> list[dict[Any, Any]]:
    listed = value if isinstance(value, list) else []
    _check_count(len(listed), most, where, "entries in one list")
    return [item for item in listed if isinstance(item, dict)]


def _check_count(count: int, most: int, where: str, what: str) -> None:
    if count > most:
        why = "" if most == MOST_ROWS else ", more than its bytes can hold: its lists share entries"
        raise InputError(f"{where}: a snapshot of {count} {what}{why}; expected at most {most}")


def _integer(value: Any, *, most: int = 1 << 63) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    # Addresses are unsigned: the highest bit is kept as a sign.
    value = value - (1 << 64) if 1 << 63 <= value < 1 << 64 else value
    return value if -most <= value < most else None


def _text(value: Any) -> str | None:
    # Half a surrogate pair, as bytes of a file's name may be, is no UTF-8: replaced, not refused.
    return clean(value[:_LONGEST_NAME]) if isinstance(value, str) and value else None


class _Stacks(dict[int, "str | None"]):
    """Call stacks as text, each made once: entries share their lists of frames.

    Args:
        where: name of the snapshot, for messages.
        most_bytes: of all texts together, if there is a limit.
    """

    def __init__(self, where: str, most_bytes: int | None) -> None:
        super().__init__()
        self._where = where
        self._most_bytes = None if most_bytes is None else max(most_bytes, _MOST_STACK_BYTES)
        self._texts: dict[str, str] = {}
        self._bytes_count = 0

    def of(self, frames: Any) -> str | None:
        """Innermost first, a line for each frame; Python's and C++'s alike."""
        if not isinstance(frames, list) or not frames:
            return None
        key = id(frames)
        if key not in self:
            known = [f for f in frames if isinstance(f, dict)]
            # Most frames of C++ name no file; they hide the ones that do.
            named = [f for f in known if _text(f.get("filename")) not in (None, "??")]
            lines = [
                f"{_text(f.get('filename')) or '??'}:{_integer(f.get('line')) or 0}: "
                f"{_text(f.get('name')) or '??'}"
                for f in (named or known)[:_MOST_FRAMES]
            ]
            text = "\n".join(lines)
            if text not in self._texts:
                self._bytes_count += len(text)
            # One text for all stacks that are alike.
            self[key] = self._texts.setdefault(text, text) or None
            if self._most_bytes is not None and self._bytes_count > self._most_bytes:
                raise InputError(
                    f"{self._where}: a snapshot with more than {self._most_bytes >> 20} MiB of "
                    "call stacks, too many for a file of its size"
                )
        return self[key]


def _segment(segment: dict[Any, Any]) -> dict[str, Any]:
    return {
        "device_id": _integer(segment.get("device"), most=1 << 31) or 0,
        "address_id": _integer(segment.get("address")),
        "stream_id": _integer(segment.get("stream")),
        "kind": _text(segment.get("segment_type")),
        "total_bytes": _integer(segment.get("total_size")),
        "allocated_bytes": _integer(segment.get("allocated_size")),
        "active_bytes": _integer(segment.get("active_size")),
        "requested_bytes": _integer(segment.get("requested_size")),
        "expandable": segment.get("is_expandable") is True,
    }


def _blocks(
    segment: dict[str, Any], blocks: list[dict[Any, Any]], stacks: _Stacks
) -> list[dict[str, Any]]:
    rows = []
    at = segment["address_id"]
    for block in blocks:
        size = _integer(block.get("size"))
        address = _integer(block.get("address"))
        rows.append(
            {
                "device_id": segment["device_id"],
                "segment_address_id": segment["address_id"],
                # Snapshots before torch 2.1 give sizes only: blocks follow one another.
                "address_id": address if address is not None else at,
                "size_bytes": size,
                "requested_bytes": _integer(block.get("requested_size")),
                "state": _text(block.get("state")),
                "frames": stacks.of(block.get("frames")),
            }
        )
        at = _integer(at + size) if at is not None and size is not None else None
    return rows


_ALLOCATED = {"alloc": 1, "free_requested": -1, "free": -1}
_RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


def _events(
    entries: list[dict[Any, Any]], device: int, allocated: int, reserved: int, stacks: _Stacks
) -> list[dict[str, Any]]:
    rows = []
    for entry in reversed(entries):
        action = _text(entry.get("action"))
        size = _integer(entry.get("size")) or 0
        time_us = _integer(entry.get("time_us"), most=1 << 52)
        if action is None:
            continue
        if not -_MOST_BYTES < allocated < _MOST_BYTES or not -_MOST_BYTES < reserved < _MOST_BYTES:
            allocated = reserved = -1
        if time_us is not None:
            rows.append(
                {
                    "time_ns": time_us * 1000,
                    "device_id": device,
                    "action": action,
                    "address_id": _integer(entry.get("addr")),
                    "size_bytes": size,
                    "stream_id": _integer(entry.get("stream")),
                    "allocated_bytes": allocated if allocated >= 0 else None,
                    "reserved_bytes": reserved if reserved >= 0 else None,
                    "device_free_bytes": _integer(entry.get("device_free"), most=_MOST_BYTES),
                    "frames": stacks.of(entry.get("frames")),
                }
            )
        allocated -= _ALLOCATED.get(action, 0) * size
        reserved -= _RESERVED.get(action, 0) * size
    rows.reverse()
    return rows


def _table(name: str, rows: list[dict[str, Any]]) -> pa.Table:
    declared = TABLES[name]
    return declared.validate(
        pa.table(
            {f.name: to_arrow([row[f.name] for row in rows], f.type) for f in declared.arrow},
            schema=declared.arrow,
        )
    )
