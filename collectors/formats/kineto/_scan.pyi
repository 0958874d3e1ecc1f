from __future__ import annotations

from typing import Any

class Refused(ValueError):
    """The text is not what the scanner accepts: where, and why."""

class Column:
    """A column of numbers; ``numpy.asarray`` wraps it without a copy."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

Columns = tuple[Column, ...]
"""Of one group: ts, dur (ns), pid, tid, name, code, flags, place; its integers; its texts."""

class Scanner:
    def __init__(
        self,
        args: tuple[tuple[bytes, int], ...],
        groups: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...],
        categories: tuple[tuple[bytes, int, int, bool], ...],
        marked: int,
        instant: bytes,
        instant_group: int,
        state: int = 0,
    ) -> None:
        """A scanner of one text, or of a part of one.

        Args:
            args: arguments whose values are looked at, and what each may be: 0 a number, a string
                or null; 1 a string or null; 2 anything.
            groups: for each group of rows its arguments, by index: those that are integers, and
                those that are kept as text.
            categories: of spans, with the group that they go to (-1 for none, -2 when the text
                shall be refused), a code for the rows, and whether marked events are shown.
            marked: index of the argument that marks events to be shown; -1 for none.
            instant: name of the instants that are kept.
            instant_group: where they go.
            state: where the text before it left a scanner.
        """

    @property
    def state(self) -> int:
        """Where it stands; a scanner made with it goes on from here."""

    @property
    def events_count(self) -> int:
        """Events that it has read."""

    @property
    def refused_at(self) -> int:
        """Offset in the last piece of the event that was refused; -1 if none was."""

    def feed(self, text: Any, /) -> int:
        """Scan a piece and return how many of its bytes are done with.

        The rest goes in front of the next piece.

        Raises:
            Refused: the text is not what is accepted. If ``refused_at`` is not -1, the scanner
                still stands before that event: another one may be fed in its place.
        """

    def take(self) -> tuple[tuple[bytes, list[tuple[int, int]]], ...]:
        """Events that are not made into columns, since the last call.

        Returns:
            Three pairs (text, rows) for metadata, counters, and marked events. The text is the
            events between commas; rows are (group, row) of the marked ones.
        """

    def rows(self) -> tuple[Columns, ...]:
        """Columns of each group, with the rows since the last call."""

    def finish(
        self, is_part: bool = False, /
    ) -> tuple[
        bytes,
        tuple[Columns, ...],
        list[bytes],
        list[bytes],
        list[bytes],
        tuple[list[bytes], Column],
        int,
    ]:
        """End.

        Args:
            is_part: more of the text comes after it.

        Returns:
            The members beside the events, between commas; :meth:`rows`; names, texts
            and ids by code - 1; categories by code - 1 (the known ones first) and how often each
            was seen (the known ones once more); how many spans had no category.

        Raises:
            Refused: the text is not whole, and no part of one.
        """
