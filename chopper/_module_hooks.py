"""Global hooks of torch's modules that the program does not notice, and the modules' parameters.

What a program overrides (``parameters``, ``named_modules``) may take and return anything, so it is
not called here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_DICTIONARIES = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
)
_PREDICATE = "_has_any_global_hook"

_own_ids: set[int] = set()
"""Handles of chopper's own global hooks."""


def named_submodules(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """What ``named_modules`` gives, whatever the program made of that method."""
    seen: set[int] = set()
    left = [("", root)]
    while left:
        name, module = left.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        children = [
            (f"{name}.{part}" if name else part, child)
            for part, child in module._modules.items()
            if child is not None
        ]
        left.extend(reversed(children))


def parameters(root: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """What ``parameters`` gives, whatever the program made of that method."""
    for _, module in named_submodules(root):
        for parameter in module._parameters.values():
            if parameter is not None:
                yield parameter


class GlobalHooks:
    """Handles of global module hooks, of which torch.compile does not warn the program.

    A compiled module warns at each call where there are global hooks, as they fire twice for it.
    """

    def __init__(self, *handles: Any) -> None:
        self._handles = handles
        _own_ids.update(handle.id for handle in handles)
        _hide()

    def remove(self) -> None:
        """Remove the hooks. Idempotent."""
        handles, self._handles = self._handles, ()
        for handle in handles:
            handle.remove()
            _own_ids.discard(handle.id)


def _hide() -> None:
    """Have torch's predicate count the hooks of others only. It stays so: it tells the same."""
    from torch.nn.modules import module as nn_module

    torch_module: Any = nn_module
    original = getattr(torch_module, _PREDICATE, None)
    if original is None or hasattr(original, "_chopper"):
        return

    def has_any_global_hook() -> Any:
        if not _own_ids:
            return original()
        dictionaries = (getattr(torch_module, name, ()) for name in _DICTIONARIES)
        return any(key not in _own_ids for hooks in dictionaries for key in tuple(hooks))

    has_any_global_hook._chopper = True  # type: ignore[attr-defined]
    setattr(torch_module, _PREDICATE, has_any_global_hook)
