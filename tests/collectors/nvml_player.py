"""NVML through the real binding, against a library that plays a script (tests/native/nvml_shim.c).

A player runs code in a process of its own that finds the shim where it would find the driver's
library.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

ONE = """
    gpu 0 GPU-aaaa0000-0000-0000-0000-000000000000 NVIDIA H100 80GB HBM3
    set 0 sm 1980
    set 0 mem 2619
    set 0 field:186 650000
    set 0 reasons 4
"""
TWO = (
    ONE
    + """
    gpu 1 GPU-bbbb0000-0000-0000-0000-000000000000 NVIDIA H100 80GB HBM3
    set 1 sm 1755
    set 1 reasons 0
    """
)

WAITING = """
import select, time
PATIENCE_NS = 600 * 10**9
def until(condition):
    give_up_ns = time.monotonic_ns() + PATIENCE_NS
    while not condition():
        assert time.monotonic_ns() < give_up_ns
        select.select([], [], [], 0.002)
"""

PRELUDE = """
import ctypes, json, sys
from chopper.collectors import nvml
from chopper.collectors.nvml import _sources
from chopper.collectors.sampler import Sink
shim = ctypes.CDLL("libnvidia-ml.so.1")
def at(ms):
    shim.shim_set_time_ms(ctypes.c_int64(ms))
def rows(source, *times_ms):
    found = []
    for ms in times_ms:
        at(ms)
        sink = Sink()
        try:
            source.sample(sink, 0)
        except RuntimeError as exc:
            found.append(str(exc))
        found += [[table, *values] for table, values in sink.take()]
    return found
def opened(source, ms=0):
    at(ms)
    source.open()
    return source
def probed():
    from pathlib import Path
    from chopper.collectors.base import CollectorContext
    context = CollectorContext(directory=Path(), run_path=Path(), pid=1)
    answer = nvml.NvmlCollector().probe(context)
    return [answer.ok, answer.reason, answer.remedy]
"""


def build(folder: Path) -> Path:
    """Compile the library into a folder, which is returned."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the stand-in for libnvidia-ml.so.1")
    source = Path(__file__).parent.parent / "native" / "nvml_shim.c"
    subprocess.run(
        [
            *(compiler, "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"),
            *("-Wl,-soname,libnvidia-ml.so.1", "-o", folder / "libnvidia-ml.so.1", source),
        ],
        check=True,
    )
    return folder


class Player:
    """Runs code in a process that sees the scripted devices."""

    def __init__(self, library: Path, folder: Path) -> None:
        self._library = library
        self._folder = folder

    def environment(self, script: str) -> dict[str, str]:
        path = self._folder / "script.txt"
        path.write_text("".join(f"{line.strip()}\n" for line in script.splitlines()))
        return {
            **{k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"},
            "LD_LIBRARY_PATH": str(self._library),
            "NVML_SHIM_SCRIPT": str(path),
        }

    def __call__(self, script: str, code: str, **environment: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
            env={**self.environment(script), **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
