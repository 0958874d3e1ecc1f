"""The forest of host spans: computed in C, or in numpy if there was no compiler."""

from __future__ import annotations

try:
    from chopper.analyzers.trace import span_forest_c as forest
except ImportError:
    from chopper.analyzers.trace import span_forest_numpy as forest  # type: ignore[no-redef]

    COMPILED = False
else:
    COMPILED = True

__all__ = ["COMPILED", "forest"]
