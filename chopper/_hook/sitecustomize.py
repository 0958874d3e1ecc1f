"""Imported by every Python at its start, when this folder is on PYTHONPATH. Stdlib only.

Nothing in here may fail, print, or be noticed: the process may be any program at all.
"""

from __future__ import annotations

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib costs 5 ms


def _note(stage: str, detail: str = "") -> None:
    """Leave a line for ``chopper record``, which explains from them why nothing was recorded."""
    path = os.environ.get("CHOPPER_HOOK_NOTES")
    if path:
        try:
            line = f"{stage}\t{os.getpid()}\t{detail or sys.executable}\n"
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(descriptor, line.encode("utf-8", "backslashreplace"))
            finally:
                os.close(descriptor)
        except OSError:
            pass


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


def _arm() -> None:
    """Have the first sign of training start a recording; called when torch is imported."""
    try:
        from chopper._hook import arming
    except Exception as exc:  # noqa: BLE001 - chopper may be missing here, or any part of it
        _note("chopper-missing", f"{sys.executable}: {exc}")
        return
    arming.arm(_note)


class _TorchFinder:
    """Notices the import of torch, which it leaves to the ordinary finders."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:  # noqa: ARG002
        if name != "torch":
            return None
        from importlib.util import find_spec

        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = find_spec("torch")
        loader = spec.loader if spec is not None else None
        if loader is None:
            return spec

        def exec_module(module: object) -> None:
            del loader.exec_module
            loader.exec_module(module)  # type: ignore[arg-type]
            _note("torch")
            _arm()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("CHOPPER_HOOK"):
    _note("python")
    if "torch" in sys.modules:
        _arm()
    else:
        sys.meta_path.insert(0, _TorchFinder())  # type: ignore[arg-type]
_run_hidden()
