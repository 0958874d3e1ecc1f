"""Differential checkpoints of a draw: how far each source was drawn, by step.

A file of lines that is only appended to: a whole count of each source now and then, and in between
only what was drawn since the line before. Whoever plans a step again, after a restart or in another
run, begins at the nearest line before it instead of at step 0.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from chopper.errors import InputError
from chopper.workloads.planning import Draw
from chopper.workloads.sources import Ints

_WHOLE_EVERY = 32
"""Lines from one with whole counts to the next."""


class Checkpoint:
    """The checkpoint of a draw in a folder: read when it is opened, appended to then."""

    def __init__(self, folder: Path, draw: Draw) -> None:
        self.positions: dict[int, Ints] = {}
        """By step, what of each source was drawn before it."""
        self.loaders: int | None = None
        """Number of loaders, most recently."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"draw-{draw.digest}.jsonl"
        whole_bytes = self._read(len(draw.sources)) if self._path.exists() else 0
        if self._path.exists():
            os.truncate(self._path, whole_bytes)  # what a kill left of a line
        self._last = max(self.positions, default=0)
        self._lines = 0

    def _read(self, sources: int) -> int:
        """Read all whole lines, and return where they end."""
        end, last = 0, np.zeros(sources, dtype=np.int64)
        for number, line in enumerate(self._path.read_bytes().splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                break
            try:
                said = json.loads(line)
                if "whole" in said:
                    last = np.array(said["whole"], dtype=np.int64)
                else:
                    last = last.copy()
                    for source, count in said["drawn"]:
                        last[source] += count
                self.positions[said["step"]], self.loaders = last, said["loaders"]
            except (ValueError, KeyError, TypeError, IndexError) as exc:
                raise InputError(
                    f"{self._path}, line {number}: no line of a checkpoint ({exc}); remove the file"
                ) from exc
            end += len(line)
        return end

    def write(self, step: int, positions: Ints, loaders: int) -> None:
        """Append what was drawn up to a step; nothing where that is known."""
        if step <= self._last:
            return
        before = self.positions.get(self._last)
        said: dict[str, object] = {"step": step, "loaders": loaders}
        if before is None or self._lines % _WHOLE_EVERY == 0 or (positions < before).any():
            said["whole"] = positions.tolist()
        else:
            drawn = positions - before
            said["drawn"] = [[int(s), int(drawn[s])] for s in np.flatnonzero(drawn)]
        # One write: a kill leaves a line whole, or the file's last one cut.
        with self._path.open("ab", buffering=0) as file:
            file.write(json.dumps(said).encode() + b"\n")
        self.positions, self._last = {step: positions}, step
        self._lines += 1
