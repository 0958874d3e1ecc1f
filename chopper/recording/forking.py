"""Forks while a recording runs: no trace survives in the child, and none may harm it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from chopper.collectors.torch_trace import leave_without_destructors

_traced = False
"""True once this process, or one that it was forked from, has traced."""
_forked_from_traced = False


def has_traced() -> None:
    """Kineto's threads run in this process from here on."""
    global _traced
    _traced = True


def cannot_trace() -> bool:
    """Return whether this process was forked from one that traced: it lacks Kineto's threads."""
    return _forked_from_traced


def watch(before: Callable[[], None], in_child: Callable[[], None]) -> None:
    """Have ``before`` called before each fork, and ``in_child`` after it, in the child."""

    def after() -> None:
        global _forked_from_traced
        if _traced:
            _forked_from_traced = True
            leave_without_destructors()
        in_child()

    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(before=before, after_in_child=after)


def in_multiprocessing_child() -> bool:
    """Return whether multiprocessing started this process, which then ends without ``atexit``."""
    if "multiprocessing.util" not in sys.modules:
        return False
    import multiprocessing

    return multiprocessing.parent_process() is not None


def forks_loader_worker() -> bool:
    """Return whether torch's data loader is about to fork a worker, which only loads."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.data.dataloader":
            return True
        frame = frame.f_back
    return False
