"""Which files the user means, and what each is: a trace, counters, a log, a snapshot."""

from __future__ import annotations

import glob as globbing
from pathlib import Path
from typing import TYPE_CHECKING

from chopper.errors import InputError
from chopper.storage.run import MANIFEST, is_experiment, is_run

if TYPE_CHECKING:
    from collections.abc import Sequence


class Found(dict[Path, bool]):
    """Trace files in order → whether the user named the very file."""

    def __init__(self, files: dict[Path, bool] | None = None) -> None:
        super().__init__(files or {})
        self.parts: dict[Path, list[Path]] = {}
        """All files of a recording that is several, by its first."""
        self.counters: list[Path] = []
        """Tables of hardware counters beside them."""
        self.logs: list[Path] = []
        """Logs of clocks, power and the like beside them."""
        self.snapshots: list[Path] = []
        """Snapshots of the allocator beside them."""
        self._groups: dict[str, Path] = {}

    def add(self, file: Path, *, named: bool) -> None:
        """Take a file for what it is.

        Raises:
            InputError: a CSV that the user named is none that anybody reads, or a report that only
                its own tool can.
        """
        from chopper.collectors.formats import readers

        try:
            reader = readers.reader_of(file)
        except InputError:
            if named:
                raise
            return
        if reader is None:
            if named:
                raise InputError(
                    f"{file}: a CSV of no kind that is known{readers.what_else(file)}; expected a "
                    "trace or counters of kernels (rocprofv3 --output-format csv, ncu --csv), or a "
                    "log with a time, a device and clocks, power or energy (nvidia-smi --format=csv)"
                )
            return
        beside = {"counters": self.counters, "log": self.logs, "memory": self.snapshots}
        if reader.kind != "trace":
            kept = beside[reader.kind]
            if file not in kept:
                kept.append(file)
        elif reader.grouped:
            self._add_part(reader.load().group_of(file), file, named=named)
        else:
            self[file] = named or self.get(file, False)

    def _add_part(self, group: str, file: Path, *, named: bool) -> None:
        first = self._groups.setdefault(group, file)
        parts = self.parts.setdefault(first, [])
        if file not in parts:
            parts.append(file)
        self[first] = named or self.get(first, False)

    def files(self, file: Path) -> list[Path]:
        """All files of the recording that one stands for."""
        return self.parts.get(file, [file])

    def take_times(self) -> None:
        """Where there is no trace, counters that say when their kernels ran are one."""
        from chopper.collectors.formats import readers

        if not self:
            for file in self.counters:
                if readers.has_times(file):
                    self._add_part(str(file), file, named=True)


def find_sources(named: Sequence[str | Path]) -> list[Path]:
    """Files that the user means by paths, globs and directories, in order, each once.

    Raises:
        InputError: nothing is there, or a directory holds no traces.
    """
    found = find(named)
    return list(found) or found.logs or found.snapshots


def find(named: Sequence[str | Path]) -> Found:
    """What the user means by paths, globs and directories, each file taken for what it is.

    Raises:
        InputError: as :func:`find_sources`.
    """
    found = Found()
    check_names(named)
    for item in named:
        path = Path(item)
        try:
            if is_run(path):
                raise InputError(
                    f"{path}: is a run directory already; expected trace files, or a directory or "
                    "pattern of them (`chopper import` joins run directories of one run)"
                )
            if path.is_dir():
                for file in _in_directory(path):
                    found.add(file, named=False)
            elif path.exists():
                found.add(path, named=True)
            elif globbing.has_magic(str(item)):
                matches = globbing.glob(str(item), recursive=True)  # noqa: PTH207
                files = [p for p in map(Path, sorted(matches)) if p.is_file()]
                if not files:
                    raise InputError(f"{item}: the pattern matches no file")
                for file in files:
                    found.add(file, named=True)
            else:
                raise InputError(f"{path}: no such file or directory")
        except ValueError as exc:
            raise InputError(f"{str(item)!r}: no file can have this name ({exc})") from exc
        except OSError as exc:
            raise InputError(f"{item}: cannot be read ({exc.strerror})") from exc
    found.take_times()
    if found.counters and not found:
        raise InputError(
            f"{found.counters[0]}: counters of kernels alone say nothing of time; name the kernel "
            "trace of the same steps too"
        )
    return found


def check_names(named: Sequence[str | Path]) -> None:
    """Refuse an empty name: as a path it would be the current directory."""
    if any(item == "" for item in named):
        raise InputError("'': an empty name (an unset variable?); name a run or trace files")


def _in_directory(path: Path) -> list[Path]:
    """The traces of a directory.

    Raises:
        InputError: there are none; says what is there instead.
    """
    from chopper.collectors.formats import readers

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
        f"{path}: a directory without traces (no *.json or *.json.gz, *.sqlite, *.rpd, *.db or "
        "rocprof *.csv) and not a run"
    )
    if runs:
        message += f"; it holds runs, pass one of them: {path / runs[-1]}"
    elif any(readers.may_hold_traces(p) for p in path.glob("*/*")):
        message += f"; there are traces deeper in it, pass '{path}/*/*.json*'"
    raise InputError(message)


def _says_when(table: Path) -> bool:
    """Whether a CSV can be read without a trace."""
    from chopper.collectors.formats import readers

    reader = readers.reader_of(table)
    return reader is not None and (reader.kind != "counters" or readers.has_times(table))
