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


def _run(data: bytes, where: str) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    push, pop = stack.append, stack.pop
    size = len(data)
    at = 0
    while True:
        op = data[at]
        at += 1
        if op == 0x68:  # BINGET
            push(memo[data[at]])
            at += 1
        elif op == 0x6A:  # LONG_BINGET
            push(memo[_u4(data, at)])
            at += 4
        elif op == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif op == 0x8A:  # LONG1
            count = data[at]
            if count > _LONGEST_NUMBER:
                raise InputError(f"{where}: a pickle with a number of {count} bytes; none has that")
            push(int.from_bytes(_cut(data, at + 1, count), "little", signed=True))
            at += 1 + count
        elif op == 0x28:  # MARK
            push(_MARK)
        elif op == 0x8C:  # SHORT_BINUNICODE
            count = data[at]
            push(_cut(data, at + 1, count).decode("utf-8", "replace"))
            at += 1 + count
        elif op == 0x7D:  # EMPTY_DICT
            push({})
        elif op == 0x75:  # SETITEMS
            items = _items(stack)
            _expect(stack[-1], dict)
            stack[-1].update(_pairs(items))
        elif op == 0x4B:  # BININT1
            push(data[at])
            at += 1
        elif op == 0x4A:  # BININT
            push(struct.unpack_from("<i", data, at)[0])
            at += 4
        elif op == 0x4D:  # BININT2
            push(struct.unpack_from("<H", data, at)[0])
            at += 2
        elif op == 0x5D:  # EMPTY_LIST
            push([])
        elif op == 0x65:  # APPENDS
            items = _items(stack)
            _expect(stack[-1], list)
            stack[-1].extend(items)
        elif op == 0x61:  # APPEND
            item = pop()
            _expect(stack[-1], list)
            stack[-1].append(item)
        elif op == 0x73:  # SETITEM
            value, key = pop(), pop()
            _expect(stack[-1], dict)
            stack[-1].update(_pairs([key, value]))
        elif op == 0x58:  # BINUNICODE
            count = _u4(data, at)
            push(_cut(data, at + 4, count).decode("utf-8", "replace"))
            at += 4 + count
        elif op == 0x8D:  # BINUNICODE8
            count = struct.unpack_from("<Q", data, at)[0]
            push(_cut(data, at + 8, count).decode("utf-8", "replace"))
            at += 8 + count
        elif op == 0x47:  # BINFLOAT
            push(struct.unpack_from(">d", data, at)[0])
            at += 8
        elif op == 0x88:  # NEWTRUE
            push(True)
        elif op == 0x89:  # NEWFALSE
            push(False)
        elif op == 0x4E:  # NONE
            push(None)
        elif op == 0x29:  # EMPTY_TUPLE
            push(())
        elif 0x85 <= op <= 0x87:  # TUPLE1, TUPLE2, TUPLE3
            count = op - 0x84
            if len(stack) < count:
                raise IndexError
            stack[-count:] = [tuple(stack[-count:])]
        elif op == 0x74:  # TUPLE
            push(tuple(_items(stack)))
        elif op == 0x6C:  # LIST
            push(_items(stack))
        elif op == 0x64:  # DICT
            push(dict(_pairs(_items(stack))))
        elif op == 0x71:  # BINPUT
            memo[data[at]] = stack[-1]
            at += 1
        elif op == 0x72:  # LONG_BINPUT
            memo[_u4(data, at)] = stack[-1]
            at += 4
        elif op == 0x30:  # POP
            pop()
        elif op == 0x80:  # PROTO
            at += 1
        elif op == 0x95:  # FRAME
            at += 8
        elif op == 0x2E:  # STOP
            found = pop()
            if isinstance(found, _Mark):
                raise IndexError
            return found
        else:
            raise InputError(_refusal(where, op, stack))
        if at > size:
            raise IndexError


def _cut(data: bytes, at: int, count: int) -> bytes:
    if count > len(data) - at:
        raise IndexError
    return data[at : at + count]


def _u4(data: bytes, at: int) -> int:
    found: int = struct.unpack_from("<I", data, at)[0]
    return found


def _items(stack: list[Any]) -> list[Any]:
    """What lies above the last mark; the mark goes too."""
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
