"""amdsmi by its real binding, against a library that plays tests/native/amd_shim.c.in's script.

The binding binds every symbol at import; those that no test needs are generated to answer "not
supported". A player runs code in a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

NATIVE = Path(__file__).parent.parent / "native"
PACKAGE = importlib.util.find_spec("amdsmi")
needs_amdsmi = pytest.mark.skipif(PACKAGE is None, reason="amdsmi is not installed")

PRELUDE = """
import ctypes, json, sys
from chopper.collectors import amd
_sources = amd
from chopper.collectors.sampler import Sink
from chopper.tables import TABLES
def rows(source, *times_ns):
    found = []
    for now_ns in times_ns:
        sink = Sink()
        try:
            source.sample(sink, now_ns)
        except RuntimeError as exc:
            found.append(str(exc))
        for table, values in sink.take():
            names = [c.name for c in TABLES[table].columns][2:]
            found.append(dict(zip(names, values, strict=True)))
    return found
def opened(source):
    source.open()
    return source
def probed():
    from pathlib import Path
    from chopper.collectors.base import CollectorContext
    context = CollectorContext(directory=Path(), run_path=Path(), pid=1)
    answer = amd.AmdCollector().probe(context)
    return [answer.ok, answer.reason, answer.remedy]
"""


def build(folder: Path, binding: Path | None = None) -> tuple[Path, dict[str, list[int]]]:
    """Compile the library into ``lib`` of a folder; that, and where each field of metrics lies.

    Args:
        binding: directory of an amdsmi before 6.4, in place of the installed one.
    """
    assert PACKAGE is not None
    assert PACKAGE.origin is not None
    package = Path(PACKAGE.origin).parent if binding is None else binding / "amdsmi"
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the stand-in for libamd_smi.so")
    (folder / "lib").mkdir()
    template = (NATIVE / "amd_shim.c.in").read_text()
    wrapper = (package / "amdsmi_wrapper.py").read_text()
    names = set(re.findall(r"_libraries\['libamd_smi\.so'\]\.(\w+)", wrapper))
    played = set(re.findall(r"^int (amdsmi_\w+)\(", template, re.MULTILINE))
    assert played <= names or binding is not None
    stubs = "".join(f"int {name}(void) {{ return 2; }}\n" for name in sorted(names - played))

    def compiled(metrics_bytes: int, serial_at: int) -> None:
        sizes = f"#define METRICS_BYTES {metrics_bytes}\n#define ASIC_SERIAL_OFFSET ({serial_at})\n"
        (folder / "shim.c").write_text(f"{sizes}{template}\n{stubs}")
        target = folder / "lib" / "libamd_smi.so"
        subprocess.run(
            [compiler, "-Wall", "-Werror", "-shared", "-fPIC", "-o", target, folder / "shim.c"],
            check=True,
        )

    compiled(1, -1)
    code = """
    t, asic = amd.load().amdsmi_gpu_metrics_t, amd.load().amdsmi_asic_info_t
    fields = {n: [getattr(t, n).offset, getattr(t, n).size] for n, *_ in t._fields_}
    print(json.dumps({**fields, "size": [ctypes.sizeof(t), asic.asic_serial.offset]}))
    """
    environment = {} if binding is None else {"PYTHONPATH": str(binding)}
    fields: dict[str, list[int]] = run_in(folder, environment, code)
    metrics_bytes, serial_at = fields["size"]
    compiled(metrics_bytes, -1 if binding is None else serial_at)
    return folder, fields


def run_in(folder: Path, environment: dict[str, str], code: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        env={**os.environ, "ROCM_PATH": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Player:
    """Runs code in a process that sees the scripted devices."""

    def __init__(self, folder: Path, fields: dict[str, list[int]], script_folder: Path) -> None:
        self._folder = folder
        self._fields = fields
        self._script = script_folder / "script.txt"

    def set(self, gpu: int, name: str, value: int, since: int = 0, item: int | None = None) -> str:
        """A line that sets a field of the metrics, or an item of 2 or 8 bytes of an array."""
        offset, width = self._fields[name]
        if item is not None:
            width = 8 if name.endswith("_acc") else 2
            offset += item * width
        return f"set {gpu} {offset} {width} {value} {since}"

    def environment(self, *lines: str) -> dict[str, str]:
        self._script.write_text("\n".join(lines) + "\n")
        return {"ROCM_PATH": str(self._folder), "AMD_SHIM_SCRIPT": str(self._script)}

    def __call__(self, lines: list[str], code: str, **environment: str) -> Any:
        return run_in(self._folder, self.environment(*lines) | environment, code)


ONE = "gpu 0 0 GPU-e1e8b5c8c3a9f2d1 SPX"
