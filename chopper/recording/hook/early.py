"""Notes and import watches, for any Python at its start. Stdlib only; nothing here may fail.

Loaded from its file by ``sitecustomize``, as chopper may be missing there; imported by the rest.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

NOTES_VARIABLE = "CHOPPER_HOOK_NOTES"
"""A file that hooked processes append to: how far each of them came."""


def note(stage: str, detail: str = "") -> None:
    """Leave a line for ``chopper record``, which explains from them why nothing was recorded."""
    path = os.environ.get(NOTES_VARIABLE)
    if path:
        try:
            line = f"{stage}\t{os.getpid()}\t{detail or sys.executable}\n"
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
            try:
                os.write(descriptor, line.encode("utf-8", "backslashreplace"))
            finally:
                os.close(descriptor)
        except OSError:
            pass


class ImportWatch:
    """Calls ``then`` once a module is imported: at once, or by a finder that leaves it to others.

    Those behind it in ``sys.meta_path`` are asked, in their order; those before it were. Looking a
    module up (``importlib.util.find_spec``) is not importing it, and a lazy module is imported
    when it is first used.

    Args:
        name: the module.
        then: called once; what it raises within an import is dropped.
        first: called just before an import executes the module; what it raises is dropped.
    """

    def __init__(
        self, name: str, then: Callable[[], None], first: Callable[[], None] = lambda: None
    ) -> None:
        self._name = name
        self._then: Callable[[], None] | None = then
        self._first = first

    def begin(self) -> None:
        """Watch from here on; call at once where the module is there and whole."""
        module = sys.modules.get(self._name)
        if module is None:
            sys.meta_path.insert(0, self)
            return
        spec: Any = None
        with contextlib.suppress(AttributeError):  # not getattr, which loads a lazy module
            spec = object.__getattribute__(module, "__spec__")
        if type(module).__name__ == "_LazyModule" and spec is not None:
            spec.loader = _Watched(spec.loader, self)
            return
        if type(spec) is ModuleSpec and getattr(spec, "_initializing", False):
            _UnderWay.watch(spec, self)
            return
        then, self._then = self._then, None
        if then is not None:
            then()

    def end(self) -> None:
        """Watch no longer. Idempotent."""
        self._then = None
        if self in sys.meta_path:
            # A new list: an import that goes through the old one, in another thread or around this
            # one, would skip the finder that moved up.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of the finders behind this one; its loader tells when it loaded."""
        if name != self._name or self._then is None:
            return None
        finders: list[Any] = list(sys.meta_path)
        if self not in finders:
            return None
        for finder in finders[finders.index(self) + 1 :]:
            ask = getattr(finder, "find_spec", None)
            spec = None if ask is None else ask(name, path, target)
            if spec is not None:
                # Others importlib refuses, or loads in its own way: the program sees it do so.
                if hasattr(spec.loader, "exec_module") and hasattr(spec.loader, "create_module"):
                    spec.loader = _Watched(spec.loader, self)
                return spec
        return None

    def import_ended(self) -> None:
        """Called at the end of an import that was under way: it may have failed."""
        if self._name in sys.modules:
            self.imported()
        elif self._then is not None:
            self.begin()

    def importing(self) -> None:
        """Called by the loader before it executes the module."""
        if self._then is not None:
            with contextlib.suppress(Exception):  # the profiler never changes the program
                self._first()

    def imported(self) -> None:
        """Called by the loader."""
        then = self._then
        self.end()
        if then is not None:
            with contextlib.suppress(Exception):  # the profiler never changes the program
                then()


class _UnderWay(ModuleSpec):
    """The spec of a module whose import is under way; it says when that ends."""

    _watches: list[ImportWatch]

    @classmethod
    def watch(cls, spec: ModuleSpec, watch: ImportWatch) -> None:
        """Have the watch see the end of this import."""
        spec.__class__ = cls
        vars(spec).setdefault("_watches", []).append(watch)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:  # the last thing that the import system does
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            for watch in vars(self).pop("_watches"):
                watch.import_ended()


class _Watched:
    """The loader that a finder chose; it says when the module is there, and is gone by then."""

    def __init__(self, loader: Any, watch: ImportWatch) -> None:
        self._loader = loader
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", "_watch"):  # copied or unpickled: not there yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        """The module, where the loader makes it itself."""
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """Execute the module by its own loader, which is what the program finds in it."""
        loader = self._loader
        spec = object.__getattribute__(module, "__spec__")
        spec.loader = module.__loader__ = loader
        self._watch.importing()
        loader.exec_module(module)
        if spec.loader is not loader and type(module).__name__ == "_LazyModule":
            # importlib.util.LazyLoader: the loader behind it comes at the first use.
            spec.loader = _Watched(spec.loader, self._watch)
        else:
            self._watch.imported()
