"""Passes over the rows of host spans: in C, or in numpy where there was no compiler."""

from __future__ import annotations

try:
    from chopper.analyzers.trace import walks as passes
except ImportError:
    from chopper.analyzers.trace import levels as passes  # type: ignore[no-redef]

    COMPILED = False
else:
    COMPILED = True

__all__ = ["COMPILED", "passes"]
