"""A pickle machine for plain values: dicts, lists, tuples, texts, numbers, true, false and None.

Pickle is a program. A ``find_class`` that refuses keeps it from running code, but does not bound
what it costs: the machine in C makes its memo as large as the largest index (64 GiB for 5 bytes),
and hashes a key as deep as it is nested, until the interpreter's stack overflows. This is the
machine that ``pickle`` has in Python, whose memo is a dict, with the instructions for plain values
only; it reads no more than the file holds.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from chopper.errors import InputError

_PLAIN = """
PROTO FRAME STOP MARK POP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT
SHORT_BINUNICODE BINUNICODE BINUNICODE8 EMPTY_LIST APPEND APPENDS LIST EMPTY_TUPLE TUPLE TUPLE1
TUPLE2 TUPLE3 EMPTY_DICT DICT SETITEM SETITEMS BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE
"""
_RUNS_CODE = """
GLOBAL STACK_GLOBAL INST OBJ REDUCE BUILD NEWOBJ NEWOBJ_EX PERSID BINPERSID EXT1 EXT2 EXT4
"""
_KEYS = frozenset((str, int, float, bool, type(None)))


def load(data: bytes, where: str) -> Any:
    """The value that a pickle of plain values holds.

    Raises:
        InputError: it is damaged, ends early, or holds anything else; nothing of it was run.
    """
    try:
        return _Machine(data, where).load()
    except (EOFError, IndexError, struct.error):
        raise InputError(f"{where}: a pickle that ends in the middle ({len(data)} bytes)") from None
    except (pickle.UnpicklingError, AttributeError, KeyError, TypeError, ValueError) as exc:
        # A key that is a list, items for what is no list.
        raise InputError(f"{where}: a damaged pickle ({exc})") from None


class _Machine(pickle._Unpickler):
    """The instructions for plain values; every other is refused."""

    stack: list[Any]
    read: Callable[[int], bytes]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._where = where

    def _text(self, layout: str) -> None:
        # As bytes of a file's name may be, and as no table holds them: replaced, not refused.
        (count,) = struct.unpack(layout, self.read(struct.calcsize(layout)))
        self.stack.append(self.read(min(count, sys.maxsize)).decode("utf-8", "replace"))

    def _set_items(self) -> None:
        items = self.pop_mark()
        self._update(self.stack[-1], items)

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update(self.stack[-1], [key, value])

    def _make_dict(self) -> None:
        items = self.pop_mark()
        self.stack.append({})
        self._update(self.stack[-1], items)

    def _update(self, target: Any, items: list[Any]) -> None:
        # The hash of a tuple goes as deep as the tuple does, on the stack of the interpreter.
        if not {*map(type, items[::2])} <= _KEYS:
            raise TypeError("a key that is neither text nor a number")
        target.update(zip(items[::2], items[1::2], strict=True))

    def _refuse(self, name: str) -> None:
        if name not in _RUNS_CODE.split():
            raise InputError(
                f"{self._where}: a pickle with the instruction {name}, where a memory snapshot "
                "holds plain values only; not read"
            )
        named = [item for item in self.stack[-2:] if isinstance(item, str)]
        what = f" ({'.'.join(named)})"[:80] if name == "STACK_GLOBAL" and len(named) == 2 else ""
        raise InputError(
            f"{self._where}: a pickle that asks for code{what} ({name}), where a memory snapshot "
            "holds plain values only; refused, nothing of it was run"
        )


def _instructions() -> dict[int, Any]:
    known: dict[int, Any] = dict.fromkeys(
        range(256), partial(_Machine._refuse, name="of no version")
    )
    for instruction in pickletools.opcodes:
        code = ord(instruction.code)
        known[code] = partial(_Machine._refuse, name=instruction.name)
        if instruction.name in _PLAIN.split():
            known[code] = pickle._Unpickler.dispatch[code]
    implemented = {"u": _Machine._set_items, "s": _Machine._set_item, "d": _Machine._make_dict}
    texts = {0x8C: "<B", ord("X"): "<I", 0x8D: "<Q"}
    known |= {code: partial(_Machine._text, layout=layout) for code, layout in texts.items()}
    return known | {ord(code): method for code, method in implemented.items()}


_Machine.dispatch = _instructions()
