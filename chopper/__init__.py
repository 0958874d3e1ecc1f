"""Chopper: where did every millisecond of a training step go?

    import chopper

    with chopper.profile("runs/mine") as prof:      # also a decorator
        for batch in prof.watch(loader):
            train_step(batch)
            prof.step()

    run = chopper.load("runs/mine")                 # or a trace file, a glob, a directory
    attribution = chopper.attribute(run)
    chopper.report(run, "report.html")
    chopper.compare("runs/before", "runs/after")    # what changed, cause by cause
    chopper.query(run, "SELECT * FROM step")        # SQL over its tables, as an Arrow table

Importing this package loads none of torch, pandas, pyarrow or a vendor library; they are loaded
by the call that needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chopper.version import __version__

if TYPE_CHECKING:
    from chopper.analyzers.compare.result import Comparison
    from chopper.analyzers.replay.answers import WhatIf
    from chopper.api import AttributedRun as Attribution
    from chopper.api import attribute, compare, load, query, report, whatif
    from chopper.errors import ChopperError
    from chopper.recording.profile import Profile, profile
    from chopper.storage.run import Run

_LAZY = {
    "Attribution": "chopper.api:AttributedRun",
    "ChopperError": "chopper.errors",
    "Comparison": "chopper.analyzers.compare.result",
    "Profile": "chopper.recording.profile",
    "Run": "chopper.storage.run",
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

        module, _, attribute_name = _LAZY[name].partition(":")
        value = getattr(importlib.import_module(module), attribute_name or name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'chopper' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
