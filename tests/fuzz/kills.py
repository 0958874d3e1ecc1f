"""Recordings that are killed, stopped and continued at any moment: what they leave can be read."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.command import run
from tests.waiting import PATIENCE_S

EVERY = 250
"""Other inputs between two kills."""
_SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGSTOP")
_AFTER_MOST_S = 2.0
_PROGRAM = """
    import os, sys, time
    print("started", flush=True)
    import chopper
    with chopper.profile(sys.argv[1], trace=False, collect=("host",)) as prof:
        while os.getppid() == int(sys.argv[2]):
            time.sleep(0.005)
            prof.step()
"""


@dataclass(frozen=True)
class Kill:
    """A signal, and when after its start the program gets it."""

    signal: str
    after_s: float

    def __str__(self) -> str:
        return f"kill:{self.signal}:{self.after_s:.3f}"


def kills(seed: int) -> Iterator[Kill]:
    """Kills without end."""
    random = Random(seed)
    while True:
        yield Kill(random.choice(_SIGNALS), random.uniform(0, _AFTER_MOST_S))


def judge(kill: Kill, folder: Path) -> str | None:
    """Record, send the signal, and read what is left; returns what is wrong with it."""
    folder.mkdir(parents=True)
    place = folder / "run"
    program = subprocess.Popen(
        [sys.executable, "-P", "-c", textwrap.dedent(_PROGRAM), str(place), str(os.getpid())],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert program.stdout is not None
    try:
        program.stdout.readline()
        select.select([], [], [], kill.after_s)
        program.send_signal(getattr(signal, kill.signal))
        if kill.signal == "SIGSTOP":
            # Read while it stands still; then it goes on, and ends as it should.
            problem = _read(place, str(kill))
            program.send_signal(signal.SIGCONT)
            program.send_signal(signal.SIGINT)
            program.wait(PATIENCE_S)
            return problem or _read(place, str(kill))
        program.wait(PATIENCE_S)
        return _read(place, str(kill))
    finally:
        with contextlib.suppress(ProcessLookupError):
            program.send_signal(signal.SIGCONT)
        program.kill()
        program.wait()
        program.stdout.close()


def _read(place: Path, label: str) -> str | None:
    if not place.exists() or not any(place.glob("rank-*/manifest.json")):
        return None  # it came before the recording
    outcome = run("analyze", place, "--json")
    if outcome.code == 0:
        json.loads(outcome.out)
        return None
    if outcome.code == 1 and len(outcome.lines) == 1:
        return f"{label}: a killed recording is refused\n{outcome.lines[0]}"
    return f"{label}: exit code {outcome.code}\n{outcome.err[-1500:]}"
