"""Start to record when this process begins to train; see the package's docstring.

The sign is a forward call of a module in training mode, with gradients on and something to train,
outside data loader workers; or, for models that are no modules, the first backward pass or step of
an optimizer.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

HOOK_VARIABLE = "CHOPPER_HOOK"
"""Options of the recording, JSON: keywords of ``make_options``."""
NOTES_VARIABLE = "CHOPPER_HOOK_NOTES"
"""A file that hooked processes append to: what they came to."""

_handles: list[Any] = []


def arm(note: Callable[[str, str], None]) -> None:
    """Watch for the first sign of training."""
    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def on_forward(module: torch.nn.Module, args: Any) -> None:  # noqa: ARG001
        if (
            module.training
            and torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and not _in_loader_worker()
            and any(parameter.requires_grad for parameter in module.parameters())
        ):
            session = _begin(note)
            if session is not None:
                session.enter_root(module)

    def on_step(optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG001
        if not _in_loader_worker():
            _begin(note)

    def on_backward() -> None:
        if not _in_loader_worker():
            _begin(note)

    from chopper._optimizers import BackwardWatch

    backward = BackwardWatch(before=on_backward)
    backward.begin()
    _handles.append(backward)
    _handles.append(register_module_forward_pre_hook(on_forward))
    _handles.append(register_optimizer_step_pre_hook(on_step))


def disarm() -> None:
    """Watch no longer: the program records itself, or a recording began."""
    while _handles:
        _handles.pop().remove()


def _in_loader_worker() -> bool:
    worker = sys.modules.get("torch.utils.data._utils.worker")
    return worker is not None and worker.get_worker_info() is not None


def _begin(note: Callable[[str, str], None]) -> Any:
    """Start the recording; whatever goes wrong is the recording's problem, not the program's."""
    disarm()
    from chopper import _session

    try:
        import msgspec

        wanted = msgspec.json.decode(os.environ[HOOK_VARIABLE], type=dict[str, Any])
        options = _session.make_options(output=None, automatic=True, **wanted)
        session = _session.open_session(options)
    except Exception as exc:  # noqa: BLE001 - the profiler never changes the program
        _session.say(f"not recorded: {str(exc) or type(exc).__name__}")
        note("failed", str(exc))
        return None
    note("recording", "")
    return session
