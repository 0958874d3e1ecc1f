"""Imported by every Python at its start, when this folder is on PYTHONPATH. Stdlib only.

Nothing in here may fail, print, or be noticed: the process may be any program at all.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib costs 5 ms


def _run_hidden() -> None:
    """Run the sitecustomize that this one hides, as if this one were not there."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]  # noqa: PTH100
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _early() -> Any:
    """The module ``early`` beside this file, under no name that the program could meet."""
    from importlib.machinery import SourceFileLoader
    from types import ModuleType

    module = ModuleType("_chopper_early")
    SourceFileLoader(module.__name__, os.path.join(_HERE, "early.py")).exec_module(module)  # noqa: PTH118
    return module


def _begin() -> None:
    """Have the first sign of training start a recording, once torch is imported."""
    early = _early()

    def start(**how: bool) -> Any:
        from chopper.recording.session import start_from_environment

        return start_from_environment(**how)

    def arm() -> None:
        early.note("torch")
        try:
            from chopper.recording.hook import arming
        except Exception as exc:  # noqa: BLE001 - chopper may be missing here, or any part of it
            early.note("chopper-missing", f"{sys.executable}: {exc}")
            return
        arming.arm(start)

    early.note("python")
    if "torch" in sys.modules:
        arm()
    else:
        early.ImportWatch("torch", arm).begin()


if os.environ.get("CHOPPER_HOOK"):
    _begin()
_run_hidden()
