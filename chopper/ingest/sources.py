"""Files that the user means, each a trace, counters, a log or a snapshot."""

from __future__ import annotations

import glob as globbing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chopper.collectors.formats import readers
from chopper.errors import InputError, OutputError
from chopper.storage.destination import run_around
from chopper.storage.layout import MANIFEST, is_experiment, is_run
from chopper.storage.remote import Tell, here


@dataclass
class Sources:
    """The user's files, by kind."""

    traces: dict[Path, bool] = field(default_factory=dict)
    """First file of each recording, in order, and whether the user named the very file."""
    parts: dict[Path, list[Path]] = field(default_factory=dict)
    """All files of a recording that is several, by its first."""
    counters: list[Path] = field(default_factory=list)
    """Tables of hardware counters."""
    logs: list[Path] = field(default_factory=list)
    """Logs of clocks, power and the like."""
    snapshots: list[Path] = field(default_factory=list)
    """Snapshots of the allocator."""
    runs: list[Path] = field(default_factory=list)
    """Timelines that carry a run."""
    columns: Mapping[str, str] | None = None
    """Which column is what, of tables of spans; None where their names say so."""
    _groups: dict[str, Path] = field(default_factory=dict)

    def add(self, file: Path, *, named: bool) -> None:
        """Add a file to those of its kind.

        Raises:
            InputError: a CSV that the user named is none that anybody reads, or a report that only
                its own tool can.
        """
        try:
            reader = readers.MAPPED if self.columns else readers.reader_of(file)
        except InputError:
            if named:
                raise
            return
        if reader is None:
            if named:
                raise InputError(
                    f"{file}: a CSV of an unknown kind{readers.what_else(file)}; expected a "
                    "trace or counters of kernels (rocprofv3 --output-format csv, ncu --csv), "
                    "or a log with a time, a device and clocks, power or energy (nvidia-smi "
                    "--format=csv), or spans with rank, step, op, start and duration (name their "
                    "columns: --map rank=COLUMN,…)"
                )
            return
        files = {
            "counters": self.counters,
            "log": self.logs,
            "memory": self.snapshots,
            "run": self.runs,
        }
        if reader.kind != "trace":
            if file not in files[reader.kind]:
                files[reader.kind].append(file)
        elif reader.grouped:
            self._add_part(reader.load().group_of(file), file, named=named)
        else:
            self.traces[file] = named or self.traces.get(file, False)

    def _add_part(self, group: str, file: Path, *, named: bool) -> None:
        first = self._groups.setdefault(group, file)
        parts = self.parts.setdefault(first, [])
        if file not in parts:
            parts.append(file)
        self.traces[first] = named or self.traces.get(first, False)

    def files(self, file: Path) -> list[Path]:
        """Return all files of the recording whose first file is given."""
        return self.parts.get(file, [file])

    def run(self) -> Path | None:
        """Return the timeline whose run is meant; None for files that are joined to a run.

        Raises:
            InputError: there are other files as well.
        """
        files = [*self.traces, *self.counters, *self.logs, *self.snapshots]
        if self.runs and (files or len(self.runs) > 1):
            raise InputError(
                f"{self.runs[0]}: carries a whole run (chopper export --to perfetto wrote it); "
                f"name it alone, without {[*self.runs[1:], *files][0]}"
            )
        return self.runs[0] if self.runs else None

    def take_times(self) -> None:
        """Take counters that say when their kernels ran for traces, where there are none."""
        if not self.traces:
            for file in self.counters:
                if readers.has_times(file):
                    self._add_part(str(file), file, named=True)


def find_sources(
    named: Sequence[str | Path],
    tell: Tell = lambda _: None,
    columns: Mapping[str, str] | None = None,
) -> list[Path]:
    """Return the files that the user means by paths, globs and directories, in order, each once.

    Of addresses these are copies; ``tell`` is told how far the copying is.

    Raises:
        InputError: nothing is there, or a directory holds no traces.
    """
    sources = find(here(named, tell), columns)
    return list(sources.traces) or sources.runs or sources.logs or sources.snapshots


def find(named: Sequence[str | Path], columns: Mapping[str, str] | None = None) -> Sources:
    """Resolve paths, globs and directories to files, by kind.

    With ``columns`` all of them are tables of spans.

    Raises:
        InputError: as :func:`find_sources`.
    """
    sources = Sources(columns=columns)
    check_names(named)
    for item in here(named):
        path = Path(item)
        try:
            if is_run(path):
                raise InputError(
                    f"{path}: is a run directory already; expected trace files, or a directory or "
                    "pattern of them (`chopper gather` makes one run of those of several nodes)"
                )
            if path.is_dir():
                for file in _in_directory(path):
                    sources.add(file, named=False)
            elif path.exists():
                sources.add(path, named=True)
            elif globbing.has_magic(str(item)):
                matches = globbing.glob(str(item), recursive=True)  # noqa: PTH207
                files = [p for p in map(Path, sorted(matches)) if p.is_file()]
                if not files:
                    raise InputError(f"{item}: the pattern matches no file")
                for file in files:
                    sources.add(file, named=True)
            else:
                raise InputError(f"{path}: no such file or directory")
        except ValueError as exc:
            raise InputError(f"{str(item)!r}: invalid file name ({exc})") from exc
        except OSError as exc:
            raise InputError(f"{item}: cannot be read ({exc.strerror})") from exc
    if sources.run():
        return sources
    sources.take_times()
    if sources.counters and not sources.traces:
        raise InputError(
            f"{sources.counters[0]}: kernel counters alone contain no times; pass the kernel "
            "trace of the same steps too"
        )
    return sources


def check_names(named: Sequence[str | Path]) -> None:
    """Refuse an empty name: as a path it would be the current directory."""
    if any(item == "" for item in named):
        raise InputError("'': an empty name (an unset variable?); name a run or trace files")


def _in_directory(path: Path) -> list[Path]:
    """Return the traces of a directory."""
    entries = sorted(path.iterdir())
    if is_experiment(path):
        first = next((p for p in entries if p.is_dir() and is_run(p)), None)
        hint = "" if first is None else f"pass one of them: {first}; or: "
        raise InputError(
            f"{path}: the runs of an experiment, not one run; {hint}chopper report {path}"
        )
    files = [p for p in entries if not p.name.startswith(".") and p.is_file()]
    inside = [p for p in files if readers.may_hold_traces(p)]
    tables = [p for p in files if readers.is_csv(p)]
    if inside or any(_says_when(p) for p in tables):
        return inside + tables
    runs = [p.name for p in entries if p.is_dir() and (p / MANIFEST).is_file()]
    message = (
        f"{path}: a directory without traces (no *.json or *.json.gz, *.sqlite, *.rpd, *.db, "
        "*.parquet or rocprof *.csv) and not a run"
    )
    if runs:
        message += f"; it holds runs, pass one of them: {path / runs[-1]}"
    elif any(readers.may_hold_traces(p) for p in path.glob("*/*")):
        message += f"; there are traces deeper in it, pass '{path}/*/*.json*'"
    raise InputError(message)


def _says_when(table: Path) -> bool:
    """Return whether a CSV can be read without a trace."""
    reader = readers.reader_of(table)
    return reader is not None and (reader.kind != "counters" or readers.has_times(table))


def check_page(output: Path, sources: Iterable[str | Path]) -> None:
    """Refuse to write a page into a run, or over a file that it is made from.

    Raises:
        OutputError: it is one of these.
    """
    run = run_around(output)
    if run is not None:
        raise OutputError(
            f"{output}: lies inside the run {run}, which chopper may replace or read as traces; "
            "choose another -o"
        )
    if output.exists() and any(_is_in(output, source) for source in sources):
        raise OutputError(f"{output}: is an input of the report; choose another file")


def _is_in(output: Path, source: str | Path) -> bool:
    """Return whether a file is one of those that a path, glob or directory means."""
    try:
        return any(output.samefile(file) for file in find_sources([source]))
    except (InputError, OSError):  # a run; or said better by load()
        return False
