"""Build an extension in C with the address and undefined-behaviour sanitizers, and use it."""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.waiting import PATIENCE_S

_FLAGS = ["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined"]
HAS_COMPILER = shutil.which(os.environ.get("CC", "cc")) is not None


def skip_without_sanitizers(tmp_path: Path) -> None:
    """Skip the test where an extension cannot be built with sanitizers."""
    if not HAS_COMPILER:
        pytest.skip("no C compiler")
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    built = subprocess.run(
        ["cc", "-fsanitize=address,undefined", str(probe), "-o", str(tmp_path / "probe")],
        capture_output=True,
    )
    if built.returncode:
        pytest.skip("the compiler has no sanitizers")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("no Python headers")


def run_program(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a fuzzing program of the tests as its own process."""
    return subprocess.run(
        [sys.executable, program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("COVERAGE")},
        timeout=PATIENCE_S,
    )


def run_fuzzer(
    doc: str | None,
    program: str,
    source: str,
    module: str,
    fuzz: Callable[[int, int], None],
    *,
    count: int = 10_000,
) -> None:
    """The command line of a fuzzing program: ``[--count N] [--seed 0] [--sanitize]``.

    Args:
        doc: of the program; its first line is the help's.
        program: its file.
        source: the extension in C that it fuzzes, and ``module``, as which that is imported.
        fuzz: called with count and seed.
        count: how many rounds when the command line does not say.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--library", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sanitize:
        arguments = ["--count", str(options.count), "--seed", str(options.seed)]
        sys.exit(sanitized(source, program, arguments))
    if options.library:
        use(module, options.library)
    fuzz(options.count, options.seed)


def sanitized(source: str, program: str, arguments: list[str]) -> int:
    """Build ``source`` and run ``program`` with what was built; the exit code.

    The program gets ``--library FILE`` in front of its arguments, and imports that with `use`.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder) / f"{Path(source).stem}.so")
        include = f"-I{sysconfig.get_path('include')}"
        build = ["cc", *_FLAGS, "-fno-sanitize-recover=all", "-shared", "-fPIC", include]
        subprocess.run([*build, str(ROOT / source), "-o", library], check=True)
        found = subprocess.run(
            ["cc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True
        )
        # Python does not free all it has: only leaks with the extension in their stack count.
        environment = {
            **os.environ,
            "LD_PRELOAD": found.stdout.strip(),
            "ASAN_OPTIONS": "detect_leaks=1:exitcode=0:abort_on_error=0:halt_on_error=1",
            "PYTHONMALLOC": "malloc",
        }
        done = subprocess.run(
            [sys.executable, program, "--library", library, *arguments],
            env=environment,
            capture_output=True,
            text=True,
        )
    print(done.stdout, end="")
    reports = done.stderr.split("\n\n")
    headers = (ROOT / source).parent.glob(f"{Path(source).stem}_*.h")
    named = [Path(source).name, *(header.name for header in headers), "ERROR: AddressSanitizer"]
    bad = [r for r in reports if any(name in r for name in named)]
    if done.returncode or bad:
        print("\n\n".join(bad) or done.stderr, file=sys.stderr)
        return 1
    return 0


def use(name: str, library: str) -> None:
    """Import an extension from a file under its usual name."""
    loader = importlib.machinery.ExtensionFileLoader(name, library)
    spec = importlib.util.spec_from_file_location(name, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[name] = module
