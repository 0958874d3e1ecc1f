"""Distance of a trace's clock from the clock that everything else is sampled by."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_BASE = re.compile(rb'"baseTimeNanoseconds": *(\d+)[,\s}]')
_TS = re.compile(rb'"ts": *(\d+)(?:\.(\d+))?[,\s}]')
_NEAR = 1024
"""Bytes of an event's text after its name in which its time stands."""


class Alignment:
    """Finds spans whose beginning was clocked, in a Kineto trace that passes by in chunks.

    Args:
        marks: name of a span, and the wall clock just before and just after it began, in ns.
    """

    def __init__(self, marks: Sequence[tuple[str, int, int]]) -> None:
        self._wanted = {name.encode(): (before, after) for name, before, after in marks}
        self._kept = b""
        self._base_ns: int | None = None
        self.error_ns: int | None = None
        """The two clocks differ by no more than this, as the mark that was clocked most tightly
        says; None: no mark was found."""

    def see(self, chunk: bytes) -> None:
        """Look at the next part of the text."""
        text = self._kept + chunk
        if self._base_ns is None:
            base = _BASE.search(text)
            self._base_ns = int(base[1]) if base else None
        for name in [n for n in self._wanted if b'"%s"' % n in text]:
            at = text.index(b'"%s"' % name)
            time = _TS.search(text, at, at + _NEAR)
            if time is not None:  # else it stands in the next part
                self._compare(name, time)
        self._kept = text[-_NEAR:]

    def _compare(self, name: bytes, time: re.Match[bytes]) -> None:
        before, after = self._wanted.pop(name)
        at = int(time[1]) * 1000 + int((time[2] or b"").ljust(3, b"0")[:3])
        if self._base_ns is not None:
            at += self._base_ns
        error = max(abs(at - before), abs(at - after))
        self.error_ns = error if self.error_ns is None else min(error, self.error_ns)
