"""The whole command: in this process, as its entry point runs it, or in one of its own."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chopper import cli
from tests.waiting import PATIENCE_S

PROGRESS = re.compile(r"chopper: .* …$")
"""Printed by whatever takes more than a second: not a message."""


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return [line for line in self.err.splitlines() if not PROGRESS.match(line)]

    @property
    def line(self) -> str:
        """The only one that it said."""
        assert "Traceback" not in self.err
        (line,) = self.lines
        return line


def run(*arguments: str | Path, cwd: Path | None = None) -> Outcome:
    """In this process, which spares it a second of imports, and keeps nothing of it."""
    out, err = io.StringIO(), io.StringIO()
    argv, sys.argv = sys.argv, ["chopper", *map(str, arguments)]
    environment = dict(os.environ)
    try:
        with (
            contextlib.nullcontext() if cwd is None else contextlib.chdir(cwd),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                cli.main()
            except SystemExit as exc:
                code = exc.code if isinstance(exc.code, int) else 0
    finally:
        sys.argv = argv
        # What libraries added meanwhile stays: they do so once.
        sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "_WithoutPandas"]
        os.environ.clear()
        os.environ.update(environment)
    return Outcome(code, out.getvalue(), err.getvalue())


def process(*arguments: str | Path, prefix: tuple[str, ...] = (), **how: Any) -> Outcome:
    """In a process of its own, which ``prefix`` starts."""
    ended = subprocess.run(
        [*prefix, sys.executable, "-m", "chopper", *map(str, arguments)],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how},
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    return Outcome(ended.returncode, ended.stdout or "", ended.stderr)
