"""Results of tasks, in memory or in files of a folder, and their form as bytes.

They are frozen dataclasses of Arrow tables, arrays and plain values. A head in MessagePack
describes the value; tables and arrays follow it as Arrow IPC streams, long tuples of numbers once
each: every collective of a group names its ranks. Reading creates dataclasses and structs of this
package only, and runs no code that came with the data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import mmap
import os
import secrets
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import pyarrow as pa

from chopper.errors import InputError, OutputError, reason_of
from chopper.storage.caches import TemporaryFolder


class Result(Protocol):
    """A value that later tasks need."""

    def get(self) -> Any:
        """Return the value."""


class Folder(TemporaryFolder):
    """A temporary folder of results, by default on a disk.

    It is removed when nobody refers to it or to a result in it, or the process ends.

    Raises:
        OutputError: it cannot be made.
    """

    def __init__(self, parent: Path | None = None) -> None:
        super().__init__("spill", parent)
        _folders[self.path] = self


_folders: weakref.WeakValueDictionary[Path, Folder] = weakref.WeakValueDictionary()


def owner(path: Path) -> Folder | None:
    """Return the folder of this process at a path; None in another process."""
    return _folders.get(path)


@dataclass(frozen=True)
class InMemory:
    """A result in the memory of this process."""

    value: Any

    def get(self) -> Any:
        """Return the value."""
        return self.value


@dataclass(frozen=True)
class InFile:
    """A result in a file, which is removed with it where the folder is this process's own."""

    path: Path
    folder: Folder | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", owner(self.path.parent))
        if self.folder is not None:
            weakref.finalize(self, _unlink, self.path, os.getpid()).atexit = False

    def get(self) -> Any:
        """Read the value.

        Raises:
            InputError: the file is gone.
        """
        return decode(self.data())

    def data(self) -> memoryview:
        """Map the encoded value.

        Raises:
            InputError: the file is gone.
        """
        try:
            with self.path.open("rb") as file:
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except FileNotFoundError as exc:
            raise InputError(
                f"{self.path}: a temporary file was removed while it was in use; run again"
            ) from exc

    def __reduce__(self) -> tuple[Any, ...]:
        return InFile, (self.path,)


def leave(value: Any, folder: Path | None) -> Result:
    """Leave a value for later tasks: in a file of a folder, or in memory where there is none.

    Raises:
        OutputError: it cannot be written.
    """
    if folder is None:
        return InMemory(value)
    return written([encode(value, compressed=True)], folder)


def written(data: Iterable[Any], folder: Path) -> InFile:
    """Write an encoded value to a file of a folder, as a whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """
    path = folder / secrets.token_hex(8)
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            file.writelines(data)
        partial.replace(path)
    except BaseException as exc:
        with contextlib.suppress(OSError):
            partial.unlink()
        if not isinstance(exc, OSError):
            raise
        raise OutputError(
            f"{folder}: a temporary file cannot be written ({reason_of(exc)}); free space there, "
            "or set TMPDIR to another disk"
        ) from exc
    return InFile(path)


def _unlink(path: Path, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        path.unlink(missing_ok=True)


_VERSION = 1
_LONG = 16
_READING = pa.ipc.IpcReadOptions(use_threads=False)
"""Handing each column to another thread takes longer than unpacking it."""
_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "frozenset": frozenset}
_DAMAGE = (AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError)


class _Document(msgspec.Struct, array_like=True):
    version: int
    value: Any
    buffers: list[memoryview]


def encode(value: Any, *, compressed: bool = False) -> bytes:
    """Write a value of a pipeline's stage.

    Args:
        value: plain values, dataclasses and structs of this package, tables and arrays.
        compressed: compress tables and arrays (LZ4): fewer bytes, and reading copies.

    Raises:
        TypeError: it holds something that is neither data nor a table.
    """
    options = pa.ipc.IpcWriteOptions(compression="lz4" if compressed else None, use_threads=False)
    buffers = _Buffers(options)
    return msgspec.msgpack.encode(_Document(_VERSION, _tree(value, buffers), buffers.written))


def decode(data: bytes | memoryview) -> Any:
    """Read a value that :func:`encode` wrote.

    Raises:
        InputError: the bytes are no such value.
    """
    try:
        document = msgspec.msgpack.decode(data, type=_Document)
        if document.version != _VERSION:
            raise InputError(
                f"a value of the pipeline of version {document.version}, not {_VERSION}"
            )
        return _value(document.value, document.buffers)
    except (msgspec.DecodeError, pa.ArrowInvalid, *_DAMAGE) as exc:
        raise InputError(f"not a value of the pipeline: {exc}") from exc


def _tree(value: Any, buffers: _Buffers) -> Any:
    """Describe a value by lists whose first element names its type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, pa.Table):
        return ["table", buffers.add(value)]
    if isinstance(value, np.ndarray):
        table = pa.table({"values": value.reshape(-1)})
        return ["array", buffers.add(table), list(value.shape), str(value.dtype)]
    if isinstance(value, tuple) and len(value) >= _LONG and all(type(v) is int for v in value):
        return ["numbers", buffers.add_numbers(value)]
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_tree(v, buffers) for v in value]]
    if isinstance(value, frozenset):
        return ["frozenset", [_tree(v, buffers) for v in sorted(value)]]
    if isinstance(value, dict):
        return ["dict", [[_tree(k, buffers), _tree(v, buffers)] for k, v in value.items()]]
    names = _fields(type(value))
    parts = [[name, _tree(getattr(value, name), buffers)] for name in names]
    return ["object", f"{type(value).__module__}:{type(value).__qualname__}", parts]


def _fields(kind: type) -> list[str]:
    """Return the names of the fields of a dataclass or a struct of this package."""
    if kind.__module__.partition(".")[0] == "chopper":
        if dataclasses.is_dataclass(kind):
            return [field.name for field in dataclasses.fields(kind)]
        if issubclass(kind, msgspec.Struct):
            return [*kind.__struct_fields__]
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not a value of the pipeline")


class _Buffers:
    """Tables as Arrow IPC streams, and long tuples of numbers."""

    def __init__(self, options: pa.ipc.IpcWriteOptions) -> None:
        self.written: list[memoryview] = []
        self._options = options
        self._numbers: dict[tuple[int, ...], int] = {}

    def add(self, table: pa.Table) -> int:
        """Write a table; return its number."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema, options=self._options) as writer:
            writer.write_table(table)
        self.written.append(memoryview(sink.getvalue()))
        return len(self.written) - 1

    def add_numbers(self, values: tuple[int, ...]) -> int:
        """Write numbers, unless the same are there already; return their number."""
        if values not in self._numbers:
            self._numbers[values] = len(self.written)
            self.written.append(memoryview(msgspec.msgpack.encode(values)))
        return self._numbers[values]


def _value(tree: Any, buffers: list[Any]) -> Any:
    """Make the value that a tree describes; numbers that are read take the place of their bytes."""
    if not isinstance(tree, list):
        return tree
    kind, *rest = tree
    if kind == "table":
        return _table(buffers[rest[0]])
    if kind == "array":
        number, shape, dtype = rest
        column = _table(buffers[number])["values"].combine_chunks()
        return column.to_numpy(zero_copy_only=False).astype(dtype, copy=False).reshape(shape)
    if kind == "numbers":
        if isinstance(buffers[rest[0]], memoryview):
            buffers[rest[0]] = msgspec.msgpack.decode(buffers[rest[0]], type=tuple[int, ...])
        return buffers[rest[0]]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_value(v, buffers) for v in rest[0])
    if kind == "dict":
        return {_value(k, buffers): _value(v, buffers) for k, v in rest[0]}
    module, _, name = rest[0].partition(":")
    if kind != "object" or module.partition(".")[0] != "chopper":
        raise InputError(f"not a value of the pipeline: {kind} {rest[0]!r}")
    made = getattr(importlib.import_module(module), name)
    _fields(made)
    return made(**{field: _value(v, buffers) for field, v in rest[1]})


def _table(data: memoryview) -> pa.Table:
    """Read a table; one that is not compressed stays where its bytes are."""
    return pa.ipc.open_stream(pa.py_buffer(data), options=_READING).read_all()
