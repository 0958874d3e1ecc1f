"""Measure statements in fresh interpreters, one after the other in turns."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass

_CHILD = """
import json, os, resource, sys, time
exec({setup!r})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter(); cpu = sum(os.times()[:4])
exec({code!r})
wall, cpu = time.perf_counter() - start, sum(os.times()[:4]) - cpu
peak = max(
    resource.getrusage(w).ru_maxrss for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
)
sys.stderr.flush()
print("\\n@" + json.dumps(dict(wall=wall, cpu=cpu, peak=peak * 1024, before=before * 1024)))
"""


@dataclass(frozen=True)
class Sample:
    """Seconds of wall and CPU time and peak resident bytes; of the process and its children."""

    wall_s: float
    cpu_s: float
    peak_bytes: int


def measure(setup: str, code: str, python: str = sys.executable) -> Sample:
    """Run ``code`` after ``setup`` in a fresh interpreter; only ``code`` is timed."""
    done = subprocess.run(
        [python, "-c", _CHILD.format(setup=setup, code=code)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        check=False,
    )
    line = next((x for x in done.stdout.splitlines() if x.startswith("@")), None)
    if line is None:
        raise RuntimeError(f"a measured program failed:\n{done.stderr[-2000:]}")
    found = json.loads(line[1:])
    return Sample(found["wall"], found["cpu"], found["peak"])


def best(samples: list[Sample]) -> Sample:
    """Least wall and CPU time seen (noise only adds), median peak."""
    return Sample(
        min(s.wall_s for s in samples),
        min(s.cpu_s for s in samples),
        int(statistics.median(s.peak_bytes for s in samples)),
    )


def peer_python(module: str) -> str | None:
    """An interpreter that can import a peer: this one, or the one that CHOPPER_PEERS names."""
    for python in (os.environ.get("CHOPPER_PEERS"), sys.executable):
        if (
            python
            and (
                subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False)
            ).returncode
            == 0
        ):
            return python
    return None
