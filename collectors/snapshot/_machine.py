"""A pickle machine for plain values: dicts, lists, tuples, texts, numbers, true, false and None.

Pickle is a program. Python's own machine runs what it says, which may be anything; this one knows
the instructions that make plain values, and stops at every other. It makes no object, imports
nothing, and its effort is bounded by the length of the file: sizes are checked against what is
left of it before anything is taken, and the memo is a dict, so that no index makes it grow.

The instructions are those of Python's module ``pickletools``.
"""

from __future__ import annotations

import struct
from typing import Any

from chopper.errors import InputError

_LONGEST_NUMBER = 32
"""Bytes of a whole number; addresses have 9."""
_NAMES = {
    b"c": "GLOBAL", b"\x93": "STACK_GLOBAL", b"i": "INST", b"o": "OBJ", b"R": "REDUCE",
    b"b": "BUILD", b"\x81": "NEWOBJ", b"\x92": "NEWOBJ_EX", b"P": "PERSID", b"Q": "BINPERSID",
    b"\x82": "EXT1", b"\x83": "EXT2", b"\x84": "EXT4",
    b"I": "INT", b"L": "LONG", b"F": "FLOAT", b"S": "STRING", b"V": "UNICODE",
    b"B": "BINBYTES", b"C": "SHORT_BINBYTES", b"\x8e": "BINBYTES8", b"\x96": "BYTEARRAY8",
    b"T": "BINSTRING", b"U": "SHORT_BINSTRING", b"\x8f": "EMPTY_SET", b"\x91": "FROZENSET",
    b"\x97": "NEXT_BUFFER", b"\x98": "READONLY_BUFFER", b"g": "GET", b"p": "PUT",
}  # fmt: skip
"""Instructions that a file of plain values has no use for, for the message."""
_RUNS_CODE = frozenset(
    [
        "GLOBAL",
        "STACK_GLOBAL",
        "INST",
        "OBJ",
        "REDUCE",
        "BUILD",
        "NEWOBJ",
        "NEWOBJ_EX",
        "PERSID",
        "BINPERSID",
        "EXT1",
        "EXT2",
        "EXT4",
    ]
)


class _Mark:
    """Stands on the stack where a list of items begins."""


_MARK = _Mark()


def load(data: bytes, where: str) -> Any:
    """The value that a pickle of plain values holds.

    Raises:
        InputError: it is damaged, ends early, or holds anything else; nothing of it was run.
    """
    try:
        return _run(data, where)
    except (IndexError, struct.error):
        raise InputError(f"{where}: a pickle that ends in the middle ({len(data)} bytes)") from None
    except KeyError as exc:
        raise InputError(f"{where}: a damaged pickle (nothing was kept as {exc})") from None
    except (TypeError, ValueError) as exc:
        # A key that is a list, items for what is no list.
        raise InputError(f"{where}: a damaged pickle ({exc})") from None


_NUMBERS = {0x4B: "<B", 0x4D: "<H", 0x4A: "<i", 0x47: ">d"}
"""BININT1, BININT2, BININT and BINFLOAT: layout of the number that follows."""
_TEXTS = {0x8C: "<B", 0x58: "<I", 0x8D: "<Q"}
"""SHORT_BINUNICODE, BINUNICODE, BINUNICODE8: layout of the length that follows."""
_GETS = {0x68: "<B", 0x6A: "<I"}
"""BINGET, LONG_BINGET: layout of the memo's index that follows."""
_PUTS = {0x71: "<B", 0x72: "<I"}
"""BINPUT, LONG_BINPUT: the same."""
_SKIPS = {0x80: 1, 0x95: 8}
"""PROTO, FRAME: bytes that follow and say nothing here."""
_CONSTANTS = {0x28: _MARK, 0x88: True, 0x89: False, 0x4E: None, 0x29: ()}
"""MARK, NEWTRUE, NEWFALSE, NONE, EMPTY_TUPLE."""
_LONG1, _MEMOIZE, _STOP = 0x8A, 0x94, 0x2E


def _run(data: bytes, where: str) -> Any:
    """Run the instructions up to the end; return the value on top of the stack."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    at = 0
    while (op := data[at]) != _STOP:
        at += 1
        if (layout := _GETS.get(op)) is not None:
            index, at = _unpacked(data, at, layout)
            stack.append(memo[index])
        elif op == _MEMOIZE:
            memo[len(memo)] = stack[-1]
        elif (layout := _NUMBERS.get(op)) is not None:
            number, at = _unpacked(data, at, layout)
            stack.append(number)
        elif (layout := _TEXTS.get(op)) is not None:
            count, at = _unpacked(data, at, layout)
            stack.append(_cut(data, at, count).decode("utf-8", "replace"))
            at += count
        elif op in _CONSTANTS:
            stack.append(_CONSTANTS[op])
        elif op == _LONG1:
            count = data[at]
            if count > _LONGEST_NUMBER:
                raise InputError(f"{where}: a pickle with a number of {count} bytes; none has that")
            stack.append(int.from_bytes(_cut(data, at + 1, count), "little", signed=True))
            at += 1 + count
        elif (layout := _PUTS.get(op)) is not None:
            index, at = _unpacked(data, at, layout)
            memo[index] = stack[-1]
        elif op in _SKIPS:
            at += _SKIPS[op]
        elif not _changed(op, stack):
            raise InputError(_refusal(where, op, stack))
        if at > len(data):
            raise IndexError
    value = stack.pop()
    if isinstance(value, _Mark):
        raise IndexError
    return value


def _changed(op: int, stack: list[Any]) -> bool:
    """Run an instruction that looks at the stack alone; False for one that is not known."""
    match op:
        case 0x7D:  # EMPTY_DICT
            stack.append({})
        case 0x5D:  # EMPTY_LIST
            stack.append([])
        case 0x75:  # SETITEMS
            items = _items(stack)
            _expect(stack[-1], dict)
            stack[-1].update(_pairs(items))
        case 0x65:  # APPENDS
            items = _items(stack)
            _expect(stack[-1], list)
            stack[-1].extend(items)
        case 0x61:  # APPEND
            item = stack.pop()
            _expect(stack[-1], list)
            stack[-1].append(item)
        case 0x73:  # SETITEM
            value, key = stack.pop(), stack.pop()
            _expect(stack[-1], dict)
            stack[-1].update(_pairs([key, value]))
        case 0x85 | 0x86 | 0x87:  # TUPLE1, TUPLE2, TUPLE3
            count = op - 0x84
            if len(stack) < count:
                raise IndexError
            stack[-count:] = [tuple(stack[-count:])]
        case 0x74:  # TUPLE
            stack.append(tuple(_items(stack)))
        case 0x6C:  # LIST
            stack.append(_items(stack))
        case 0x64:  # DICT
            stack.append(dict(_pairs(_items(stack))))
        case 0x30:  # POP
            stack.pop()
        case _:
            return False
    return True


def _unpacked(data: bytes, at: int, layout: str) -> tuple[Any, int]:
    """Return the number at a place, and the place after it."""
    return struct.unpack_from(layout, data, at)[0], at + struct.calcsize(layout)


def _cut(data: bytes, at: int, count: int) -> bytes:
    if count > len(data) - at:
        raise IndexError
    return data[at : at + count]


def _items(stack: list[Any]) -> list[Any]:
    """Remove what lies above the last mark, and the mark; return the former."""
    at = len(stack) - 1
    while at >= 0 and stack[at] is not _MARK:
        at -= 1
    if at < 0:
        raise IndexError
    items = stack[at + 1 :]
    del stack[at:]
    return items


_KEYS = frozenset((str, int, float, bool, type(None)))


def _pairs(items: list[Any]) -> zip[tuple[Any, Any]]:
    keys = items[::2]
    # The hash of a tuple goes as deep as the tuple does, on the stack of the interpreter.
    if not {*map(type, keys)} <= _KEYS:
        raise TypeError("a key that is no text or number")
    return zip(keys, items[1::2], strict=True)


def _expect(target: Any, kind: type) -> None:
    if type(target) is not kind:
        raise TypeError(f"items for a {type(target).__name__}")


def _refusal(where: str, op: int, stack: list[Any]) -> str:
    name = _NAMES.get(bytes([op]), f"0x{op:02x}")
    if name not in _RUNS_CODE:
        return (
            f"{where}: a pickle with the instruction {name}, where a memory snapshot holds plain "
            "values only; not read"
        )
    named = [item for item in stack[-2:] if isinstance(item, str)]
    what = f" ({'.'.join(named)})"[:80] if name == "STACK_GLOBAL" and len(named) == 2 else ""
    return (
        f"{where}: a pickle that asks for code{what} ({name}), where a memory snapshot holds plain "
        "values only; refused, nothing of it was run"
    )
