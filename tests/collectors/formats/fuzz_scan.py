"""Feed damaged texts to the scanner, in pieces that end anywhere, and see that it lives.

    python tests/collectors/formats/fuzz_scan.py [--count 10000] [--seed 0] [--sanitize]

With ``--sanitize`` the scanner is first built with the address and undefined-behaviour
sanitizers; any report of theirs, and any leak that the scanner is part of, is a failure.
"""

from __future__ import annotations

import ctypes
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.sanitizing import run_fuzzer


def fuzz(count: int, seed: int) -> None:
    """Scan ``count`` texts, half of them damaged."""
    from chopper.collectors.formats.kineto import _native
    from tests.collectors.formats.scan_cases import Writer, mutated

    class Exact:
        """The scanner, given memory that ends where the text does: one byte too far is seen."""

        def __init__(self, **how: Any) -> None:
            self.scanner = Scanner(**how)
            self.take, self.finish = self.scanner.take, self.scanner.finish

        def __getattr__(self, name: str) -> Any:
            return getattr(self.scanner, name)

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
        _native._TEXT_BYTES = rng.choice((1, 100, 1 << 24))
        try:
            _native.scan_pieces(iter(pieces), threads=rng.choice((1, 2)))
            accepted += 1
        except (ValueError, RecursionError):
            pass
    print(f"{count} texts, {accepted} accepted")


if __name__ == "__main__":
    run_fuzzer(
        __doc__,
        __file__,
        "collectors/formats/kineto/_scan.c",
        "chopper.collectors.formats.kineto._scan",
        fuzz,
    )
