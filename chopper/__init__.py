"""Chopper: where did every millisecond of a training step go?

    import chopper

    with chopper.profile("runs/mine") as prof:      # also a decorator
        for batch in prof.watch(loader):
            train_step(batch)
            prof.step()

    run = chopper.load("runs/mine")                 # or a trace file, a glob, a directory
    run.attribution.causes.df()                     # where a step goes, as a pandas frame
    run.attribution.by("layer").pl()                # the same time by layer, as a Polars frame
    run.view("kernels").arrow()                     # a detailed table, in Arrow
    run.attribution.waterfall()                     # a Plotly figure
    chopper.report(run, "report.html")
    chopper.compare("runs/before", "runs/after")    # what changed, cause by cause

Importing this package loads none of torch, pandas, pyarrow or a vendor library; they are loaded
by the call that needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chopper.version import __version__

if TYPE_CHECKING:
    from chopper.analyzers.compare.result import Comparison
    from chopper.analyzers.replay.answers import WhatIf
    from chopper.api import Attribution, Run, attribute, compare, load, query, report, whatif
    from chopper.errors import ChopperError
    from chopper.recording.profile import Profile, profile
    from chopper.tables.frames import Table

_LAZY = {
    "Attribution": "chopper.api",
    "ChopperError": "chopper.errors",
    "Comparison": "chopper.analyzers.compare.result",
    "Profile": "chopper.recording.profile",
    "Run": "chopper.api",
    "Table": "chopper.tables.frames",
    "WhatIf": "chopper.analyzers.replay.answers",
    "attribute": "chopper.api",
    "compare": "chopper.api",
    "load": "chopper.api",
    "profile": "chopper.recording.profile",
    "query": "chopper.api",
    "report": "chopper.api",
    "whatif": "chopper.api",
}

__all__ = [
    "Attribution",
    "ChopperError",
    "Comparison",
    "Profile",
    "Run",
    "Table",
    "WhatIf",
    "__version__",
    "attribute",
    "compare",
    "load",
    "profile",
    "query",
    "report",
    "whatif",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'chopper' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
