"""A run: what it says about itself, and its tables."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from chopper.arrow import with_column
from chopper.errors import printable
from chopper.storage.files import inside
from chopper.storage.layout import rank_dir_name
from chopper.storage.manifest import DIMENSIONS, Finding, RankManifest, RunManifest
from chopper.storage.parts import read_manifest
from chopper.storage.streams import read_stream
from chopper.tables import TABLES
from chopper.wording import ranges


def ranks_of(manifest: RunManifest) -> pa.Table:
    """Return the table `ranks`: what the ranks of a run say about themselves."""
    names = ("rank", "label", "hostname", "local_rank", "pid", "device_id", "status")
    rows = []
    for part in sorted(manifest.ranks, key=lambda part: part.rank):
        device = next((d.name for d in part.devices if d.device_id == part.device_id), None)
        if part.stated_device is not None:
            device = part.stated_device.name
        bounds = {"recording_start_ns": part.start_ns, "recording_end_ns": part.end_ns}
        said = {name: getattr(part, name) for name in names} | {"device": device}
        # Names of files and hosts may be no UTF-8, which tables are.
        texts = {n: printable(v) for n, v in said.items() if isinstance(v, str)}
        rows.append(said | texts | bounds)
    return TABLES["ranks"].of_rows(rows)


def coordinates_of(manifest: RunManifest) -> pa.Table:
    """Return the table `coordinate`: the places of the ranks in the dimensions of parallelism."""
    rows = [
        {
            "rank": part.rank,
            "dimension": one.dimension,
            "index": one.index,
            "size_count": one.size,
            "stages": ranges(one.stages) or None,
            "stages_count": one.stages_count,
            "source": printable(one.source),
        }
        for part in sorted(manifest.ranks, key=lambda part: part.rank)
        for one in sorted(part.coordinates, key=lambda one: DIMENSIONS.index(one.dimension))
    ]
    return TABLES["coordinate"].of_rows(rows)


OF_MANIFEST: dict[str, Callable[[RunManifest], pa.Table]] = {
    "ranks": ranks_of,
    "coordinate": coordinates_of,
}
"""Tables that the manifest alone tells."""


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """A recorded or imported run, immutable."""

    manifest: RunManifest
    """The run's metadata, and findings from reading it."""
    path: Path | None
    """Its directory, or None for traces that were loaded without one."""
    store: Mapping[tuple[int, str], pa.Table] = field(default_factory=dict)
    """All its tables, by (rank, name)."""
    source: str = ""
    """The path or pattern that the user passed, for messages."""
    originals: Mapping[int, Sequence[Path]] = field(default_factory=dict)
    """Rank to the trace files that its tables were read from; they may be gone since."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", self.source or str(self.path))
        if not isinstance(self.store, Store):
            object.__setattr__(self, "store", Store(self.store))

    @property
    def tables(self) -> Store:
        """The store of all its tables."""
        return cast("Store", self.store)

    @classmethod
    def open(cls, path: Path) -> Run:
        """Open a run directory without its traces: its manifest, and the tables recorded in it.

        A run that was never closed is read from its parts. :func:`chopper.load` also reads traces.

        Raises:
            RunFormatError: not a run, damaged, or written by a newer version.
        """
        manifest = read_manifest(path)
        parts: list[RankManifest] = []
        store: dict[tuple[int, str], pa.Table] = {}
        for incomplete in manifest.ranks:
            part, tables = recorded_tables(path, incomplete)
            store |= {(part.rank, name): table for name, table in tables.items()}
            parts.append(part)
        return cls(msgspec.structs.replace(manifest, ranks=parts), path, store)

    @property
    def ranks(self) -> list[int]:
        """Ranks in the run, ascending."""
        return sorted(part.rank for part in self.manifest.ranks)

    def part(self, rank: int) -> RankManifest:
        """Return the manifest part of one rank."""
        return self.manifest.ranks[self._place[rank]]

    @cached_property
    def _place(self) -> dict[int, int]:
        """Rank → place of its part in the manifest."""
        return {part.rank: place for place, part in enumerate(self.manifest.ranks)}

    @cached_property
    def world_size(self) -> int | None:
        """Ranks of the job as recorded, None when nothing says."""
        return max((p.world_size for p in self.manifest.ranks if p.world_size), default=None)

    @cached_property
    def ranks_by_hostname(self) -> Counter[str | None]:
        """Name of a host → how many ranks were there."""
        return Counter(part.hostname for part in self.manifest.ranks)

    @cached_property
    def ranks_by_host(self) -> dict[tuple[str | None, str | None], list[int]]:
        """Names of a host and of its machine → ranks there, ascending."""
        named: dict[tuple[str | None, str | None], list[int]] = {}
        for part in sorted(self.manifest.ranks, key=lambda part: part.rank):
            named.setdefault((part.hostname, part.host), []).append(part.rank)
        return named

    @cached_property
    def ranks_by_loopback(self) -> dict[tuple[str | None, str], list[int]]:
        """Machine and network namespace → ranks there that its loopback joins, ascending."""
        named: dict[tuple[str | None, str], list[int]] = {}
        for part in sorted(self.manifest.ranks, key=lambda part: part.rank):
            if part.loopback is not None:
                named.setdefault((part.host, part.loopback), []).append(part.rank)
        return named

    @cached_property
    def watchers(self) -> dict[int, list[int]]:
        """Rank → ranks that sampled its processes, ascending."""
        found: dict[int, list[int]] = {}
        for rank in self.ranks:
            if self.rows_count(rank, "process"):
                for watched in pc.unique(self.table(rank, "process")["rank"]).to_pylist():
                    found.setdefault(watched, []).append(rank)
        return found

    def table(self, rank: int, name: str) -> pa.Table:
        """Return a table of one rank, empty when nothing was recorded for it.

        Raises:
            KeyError: no table of this name is declared.
        """
        declared = TABLES[name]
        return self.store[rank, name] if (rank, name) in self.store else declared.empty()

    def rows_count(self, rank: int, name: str) -> int:
        """Return the number of rows of a rank's table without reading it."""
        return self.tables.rows_count((rank, name))

    def of_ranks(
        self, ranks: Iterable[int], tables: Iterable[tuple[int, str]] | None = None
    ) -> Run:
        """Return the run restricted to some ranks.

        Args:
            ranks: the ranks to keep.
            tables: the tables to keep, by (rank, name); by default all of these ranks.
        """
        numbers = {*ranks}
        places = sorted(self._place[rank] for rank in numbers & self._place.keys())
        parts = [self.manifest.ranks[place] for place in places]
        keys = itertools.product(numbers, TABLES) if tables is None else tables
        manifest = msgspec.structs.replace(self.manifest, ranks=parts)
        return replace(self, manifest=manifest, store=self.tables.chosen(keys))

    def of_stretch(self, rank: int, stretch: Stretch) -> Run:
        """Return the run with a stretch of a rank's trace, and its steps, in place of all of it."""
        step = self.table(rank, "step")
        begin, end = stretch.span.read_ns
        start = step["start_ns"]
        inside = pc.and_(pc.greater_equal(start, begin), pc.less(start, end))
        tables = {(rank, "step"): step.filter(inside)}
        return replace(self, store=self.tables.of_stretch(rank, stretch).with_tables(tables))

    def of_steps(self, numbers: Collection[int]) -> Run:
        """Return the run with the steps of these numbers as the only ones that were traced."""
        tables: dict[tuple[int, str], pa.Table] = {}
        for rank in self.ranks:
            step = self.table(rank, "step")
            chosen = pc.is_in(step["number"], value_set=pa.array([*numbers], pa.int64()))
            traced = pc.and_(step["traced"], chosen)
            tables[rank, "step"] = with_column(step, "traced", traced)
        return replace(self, store=self.tables.with_tables(tables))

    def with_tables(self, tables: Mapping[tuple[int, str], pa.Table]) -> Run:
        """Return the run with tables, by (rank, name), added or replaced, each validated.

        Raises:
            SchemaError: a table lacks or mistypes a column.
        """
        valid = {(rank, name): TABLES[name].validate(t) for (rank, name), t in tables.items()}
        return replace(self, store=self.tables.with_tables(valid))

    def __repr__(self) -> str:
        return f"<chopper.Run {self.source!r}: {len(self.manifest.ranks)} rank(s)>"


def recorded_tables(path: Path, part: RankManifest) -> tuple[RankManifest, dict[str, pa.Table]]:
    """Read what was recorded of one rank in tables, not in its traces.

    Returns:
        Its part, with what was found while reading; and the tables by name.
    """
    folder = inside(path, rank_dir_name(part.rank))
    tables: dict[str, pa.Table] = {}
    findings: list[Finding] = []
    for name in TABLES:
        file = inside(folder, f"{name}.arrow")
        if file.is_file():
            tables[name], finding = read_stream(file, name)
            findings += [] if finding is None else [finding]
    if "step" in tables:
        tables["step"] = _with_traced(tables["step"], part)
    return msgspec.structs.replace(part, findings=[*part.findings, *findings]), tables


def _with_traced(step: pa.Table, part: RankManifest) -> pa.Table:
    """Return STEP with the steps of the trace that was kept: a step ends before that is known."""
    if part.traced_steps is None and part.traces:
        return step  # an older manifest, or none that can be read: as it seemed when steps ended
    first, stop = part.traced_steps or (0, 0)
    number = step["number"]
    traced = pc.and_(pc.greater_equal(number, first), pc.less(number, stop))
    return with_column(step, "traced", traced)


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
