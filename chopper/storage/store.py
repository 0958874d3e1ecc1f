"""Tables of a run's ranks: in memory, or where they are read from when they are asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import pyarrow as pa

_MOST_LOADED = 2


class HeldTables(Protocol):
    """Tables of one rank, by name, that are elsewhere."""

    def get(self) -> Any:
        """Return them: a mapping."""


class Store(Mapping[tuple[int, str], pa.Table]):
    """Tables by (rank, name).

    Of tables that are held elsewhere, those of two ranks at a time stay loaded.

    Args:
        tables: those in memory; they count before held ones of the same name.
        held: rank → its tables elsewhere.
        held_rows: (rank, name) → rows of each held table.
    """

    def __init__(
        self,
        tables: Mapping[tuple[int, str], pa.Table] | None = None,
        held: Mapping[int, HeldTables] | None = None,
        held_rows: Mapping[tuple[int, str], int] | None = None,
    ) -> None:
        self._tables = dict(tables or {})
        self._held = dict(held or {})
        self._held_rows = dict(held_rows or {})
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
        return self._tables, self._held, self._held_rows

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        Store.__init__(self, *state)

    def rows_count(self, key: tuple[int, str]) -> int:
        """Return how many rows a table has, without reading it; 0 for none."""
        if key in self._tables:
            return int(self._tables[key].num_rows)
        return self._held_rows.get(key, 0)

    def is_held(self, rank: int) -> bool:
        """Return whether tables of a rank are elsewhere."""
        return rank in self._held

    def with_tables(self, tables: Mapping[tuple[int, str], pa.Table]) -> Store:
        """Return the store with tables added or replaced."""
        return Store({**self._tables, **tables}, self._held, self._held_rows)

    def chosen(self, keys: Iterable[tuple[int, str]]) -> Store:
        """Return the store with these tables only, of which some may be missing."""
        kept = {*keys}
        rows = {key: self._held_rows[key] for key in kept if key in self._held_rows}
        return Store(
            {key: self._tables[key] for key in kept if key in self._tables},
            {rank: self._held[rank] for rank in {rank for rank, _ in rows}},
            rows,
        )
