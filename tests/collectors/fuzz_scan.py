"""Feed damaged texts to the scanner, in pieces that end anywhere, and see that it lives.

    python tests/collectors/fuzz_scan.py [--count 10000] [--seed 0] [--sanitize]

With ``--sanitize`` the scanner is first built with the address and undefined-behaviour
sanitizers; any report of theirs, and any leak that the scanner is part of, is a failure.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.machinery
import importlib.util
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NAME = "chopper.collectors.kineto._scan"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--library", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sanitize:
        sys.exit(sanitized(options.count, options.seed))
    if options.library:
        use(options.library)
    fuzz(options.count, options.seed)


def sanitized(count: int, seed: int) -> int:
    """Build, and run this program with what was built; the exit code."""
    flags = ["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined"]
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder) / "_scan.so")
        source = str(ROOT / "collectors/kineto/_scan.c")
        include = f"-I{sysconfig.get_path('include')}"
        build = ["cc", *flags, "-fno-sanitize-recover=all", "-shared", "-fPIC", include, source]
        subprocess.run([*build, "-o", library], check=True)
        found = subprocess.run(
            ["cc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True
        )
        # Python does not free all it has: only leaks with the scanner in their stack count.
        environment = {
            **os.environ,
            "LD_PRELOAD": found.stdout.strip(),
            "ASAN_OPTIONS": "detect_leaks=1:exitcode=0:abort_on_error=0:halt_on_error=1",
            "PYTHONMALLOC": "malloc",
        }
        mine = [sys.executable, __file__, "--library", library]
        done = subprocess.run(
            [*mine, "--count", str(count), "--seed", str(seed)],
            env=environment,
            capture_output=True,
            text=True,
        )
    print(done.stdout, end="")
    reports = done.stderr.split("\n\n")
    bad = [r for r in reports if "_scan.c" in r or "ERROR: AddressSanitizer" in r]
    if done.returncode or bad:
        print("\n\n".join(bad) or done.stderr, file=sys.stderr)
        return 1
    return 0


def use(library: str) -> None:
    """Import the scanner from a file."""
    loader = importlib.machinery.ExtensionFileLoader(NAME, library)
    spec = importlib.util.spec_from_file_location(NAME, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[NAME] = module


def fuzz(count: int, seed: int) -> None:
    """Scan ``count`` texts, half of them damaged."""
    sys.path.insert(0, str(ROOT))
    from chopper.collectors.kineto import _native
    from tests.collectors.scan_cases import Writer, mutated

    class Exact:
        """The scanner, given memory that ends where the text does: one byte too far is seen."""

        def __init__(self, **how: Any) -> None:
            self.scanner = Scanner(**how)
            self.take, self.finish = self.scanner.take, self.scanner.finish

        def feed(self, text: bytes) -> int:
            return self.scanner.feed((ctypes.c_char * len(text)).from_buffer_copy(text))

    Scanner, _native.Scanner = _native.Scanner, Exact  # type: ignore[attr-defined, assignment]
    accepted = 0
    for i in range(count):
        rng = random.Random(seed + i)
        text = Writer(rng, rng.choice((0.0, 0.02, 0.3))).trace(rng.randrange(8))
        if rng.random() < 0.6:
            text = mutated(text, rng)
        ends = sorted(rng.randrange(len(text) + 1) for _ in range(rng.choice((0, 1, 3, 20))))
        pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
        try:
            _native._scan_pieces(iter(pieces))
            accepted += 1
        except (ValueError, RecursionError):
            pass
    print(f"{count} texts, {accepted} accepted")


if __name__ == "__main__":
    main()
