"""Tables of a run's ranks: in memory, or where they are read from when they are asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

_MOST_LOADED = 2
BEGINNING_NS, END_NS = -(1 << 62), 1 << 62
"""Before and after all times."""


class HeldTables(Protocol):
    """Tables of one rank, by name, that are elsewhere."""

    def get(self) -> Any:
        """Return them: a mapping."""


@dataclass(frozen=True)
class Span:
    """A stretch of the steps of a trace that is read a stretch at a time.

    Attributes:
        own_ns: steps that start from the first to before the second time, Unix, are its own.
        read_ns: likewise, those that it holds: its own, and the one before and after them.
        device_begin_ns: end of what ran before all that it holds; None at the beginning.
        device_ns: device events that start from the first to before the second time are its own.
    """

    own_ns: tuple[int, int] = (BEGINNING_NS, END_NS)
    read_ns: tuple[int, int] = (BEGINNING_NS, END_NS)
    device_begin_ns: int | None = None
    device_ns: tuple[int, int] = (BEGINNING_NS, END_NS)

    def owns(self, start_ns: Any) -> bool:
        """Return whether a step that starts at one of these times is its own."""
        return any(self.own_ns[0] <= start < self.own_ns[1] for start in start_ns)

    @property
    def is_first(self) -> bool:
        """True where nothing comes before it."""
        return self.own_ns[0] == BEGINNING_NS

    @property
    def is_last(self) -> bool:
        """True where nothing comes after it."""
        return self.own_ns[1] == END_NS


class Stretch(HeldTables, Protocol):
    """The tables of a stretch of steps, held elsewhere."""

    @property
    def span(self) -> Span:
        """Its steps."""


class Store(Mapping[tuple[int, str], pa.Table]):
    """Tables by (rank, name).

    Of tables that are held elsewhere, those of two ranks at a time stay loaded.

    Args:
        tables: those in memory; they count before held ones of the same name.
        held: rank → its tables elsewhere.
        held_rows: (rank, name) → rows of each held table.
        stretches: rank → the stretches of its trace, where that is too large to be held as a whole.
    """

    def __init__(
        self,
        tables: Mapping[tuple[int, str], pa.Table] | None = None,
        held: Mapping[int, HeldTables] | None = None,
        held_rows: Mapping[tuple[int, str], int] | None = None,
        stretches: Mapping[int, Sequence[Stretch]] | None = None,
    ) -> None:
        self._tables = dict(tables or {})
        self._held = dict(held or {})
        self._held_rows = dict(held_rows or {})
        self._stretches = dict(stretches or {})
        self._loaded: OrderedDict[int, Mapping[str, pa.Table]] = OrderedDict()

    def __getitem__(self, key: tuple[int, str]) -> pa.Table:
        if key in self._tables:
            return self._tables[key]
        if key not in self._held_rows:
            raise KeyError(key)
        rank, name = key
        if rank not in self._loaded:
            if len(self._loaded) >= _MOST_LOADED:
                self._loaded.popitem(last=False)
            self._loaded[rank] = self._held[rank].get()
        return self._loaded[rank][name]

    def __contains__(self, key: object) -> bool:
        return key in self._tables or key in self._held_rows

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return iter({**self._held_rows, **self._tables})

    def __len__(self) -> int:
        return len({*self._held_rows, *self._tables})

    def __getstate__(self) -> tuple[Any, ...]:
        return self._tables, self._held, self._held_rows, self._stretches

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        Store.__init__(self, *state)

    def rows_count(self, key: tuple[int, str]) -> int:
        """Return how many rows a table has, without reading it; 0 for none."""
        if key in self._tables:
            return int(self._tables[key].num_rows)
        return self._held_rows.get(key, 0)

    @property
    def in_memory(self) -> Mapping[tuple[int, str], pa.Table]:
        """The tables that are in memory."""
        return self._tables

    @property
    def held(self) -> Mapping[int, HeldTables]:
        """Rank → its tables elsewhere."""
        return self._held

    @property
    def held_rows(self) -> Mapping[tuple[int, str], int]:
        """(rank, name) → rows of each table elsewhere."""
        return self._held_rows

    def is_held(self, rank: int) -> bool:
        """Return whether tables of a rank are elsewhere."""
        return rank in self._held

    def with_tables(self, tables: Mapping[tuple[int, str], pa.Table]) -> Store:
        """Return the store with tables added or replaced."""
        return Store({**self._tables, **tables}, self._held, self._held_rows, self._stretches)

    def chosen(self, keys: Iterable[tuple[int, str]]) -> Store:
        """Return the store with these tables only, of which some may be missing."""
        kept = {*keys}
        rows = {key: self._held_rows[key] for key in kept if key in self._held_rows}
        held = {rank for rank, _ in rows}
        return Store(
            {key: self._tables[key] for key in kept if key in self._tables},
            {rank: self._held[rank] for rank in held},
            rows,
            {rank: self._stretches[rank] for rank in held & self._stretches.keys()},
        )

    def stretches(self, rank: int) -> Sequence[Stretch]:
        """Return the stretches of a rank's trace; none where it is held as a whole."""
        return self._stretches.get(rank, ())

    def of_stretch(self, rank: int, stretch: Stretch) -> Store:
        """Return the store with a stretch of a rank's trace in place of all of it."""
        others = {r: s for r, s in self._stretches.items() if r != rank}
        return Store(self._tables, {**self._held, rank: stretch}, self._held_rows, others)
