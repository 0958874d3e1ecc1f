"""Tables of hardware counters beside the traces: each to its rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from chopper.errors import InputError
from chopper.ingest.ranks import rank_in
from chopper.storage.manifest import Finding
from chopper.storage.run import Run, StreamWriter
from chopper.wording import some

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa


def attach_counters(run: Run, files: Sequence[Path]) -> None:
    """Give each rank the counters that are its own.

    Raises:
        InputError: a file cannot be read, or nobody can tell which rank it is of.
    """
    if not files:
        return
    import pyarrow as pa

    from chopper.collectors.counters import read_counters

    of_rank: dict[int, list[pa.Table]] = {}
    for file in files:
        rank = _rank_of_counters(run, file)
        table, odd = read_counters(file)
        of_rank.setdefault(rank, []).append(table)
        run.part(rank).findings += [
            Finding(code="counters.damaged", severity="warning", rank=rank, message=line)
            for line in odd
        ]
    for rank, tables in of_rank.items():
        run.put(rank, "kernel_counter", pa.concat_tables(tables).unify_dictionaries())


def _rank_of_counters(run: Run, file: Path) -> int:
    ranks = run.ranks
    named = rank_in(file, ranks)
    if named is not None:
        return named
    if len(ranks) == 1:
        return ranks[0]
    raise InputError(
        f"{file}: counters of which rank? The traces are of {len(ranks)} ranks "
        f"({some(ranks)}); put its number into the file's name, as counters-rank{ranks[0]}.csv"
    )


def write_counters(run: Run, rank: int, folder: Path) -> None:
    """Leave a rank's counters in its folder of a run directory; nothing where it has none."""
    table = run.table(rank, "kernel_counter")
    if table.num_rows:
        writer = StreamWriter(folder / "kernel_counter.arrow", "kernel_counter")
        try:
            writer.write(table.to_pydict())
        finally:
            writer.close()
