"""Watching the import of a module beside the program's own finders and loaders."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

from chopper.recording.hook.early import ImportWatch

NAME = "imported_module_of_a_test"


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What happened, in order; the module adds itself when it is executed."""
    events: list[str] = []
    (tmp_path / f"{NAME}.py").write_text(
        "import sys\nsys.events_of_a_test.append('executed')\nvalue = 7\n"
    )
    monkeypatch.setattr(sys, "events_of_a_test", events, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    importlib.invalidate_caches()
    yield events
    sys.modules.pop(NAME, None)


def watch(events: list[str]) -> ImportWatch:
    watching = ImportWatch(NAME, lambda: events.append("told"))
    watching.begin()
    return watching


def test_looking_a_module_up_is_not_importing_it(seen: list[str]) -> None:
    watching = watch(seen)
    # As transformers and accelerate do before they import torch.
    assert importlib.util.find_spec(NAME) is not None
    assert importlib.util.find_spec(NAME) is not None
    assert seen == []
    module = importlib.import_module(NAME)
    assert seen == ["executed", "told"]
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    assert type(module.__loader__).__name__ != "_Watched"
    assert watching not in sys.meta_path
    importlib.reload(module)
    assert seen == ["executed", "told", "executed"]


def test_an_import_that_fails_may_be_tried_again(seen: list[str], tmp_path: Path) -> None:
    watch(seen)
    good = (tmp_path / f"{NAME}.py").read_text()
    (tmp_path / f"{NAME}.py").write_text("raise ImportError('no driver')")
    with pytest.raises(ImportError, match="no driver"):
        importlib.import_module(NAME)
    (tmp_path / f"{NAME}.py").write_text(good + "# longer\n")
    importlib.invalidate_caches()
    importlib.import_module(NAME)
    assert seen == ["executed", "told"]


class Finder:
    """As ddtrace's and wrapt's: it wraps what the others find, and looks once more itself."""

    def __init__(self, events: list[str], name: str) -> None:
        self.events, self.name, self.busy = events, name, False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != NAME or self.busy:
            return None
        self.busy = True
        try:
            spec: Any = importlib.util.find_spec(name)
        finally:
            self.busy = False
        spec.loader = Chained(spec.loader, self)
        return spec


class Chained:
    __slots__ = ("finder", "loader")

    def __init__(self, loader: Any, finder: Finder) -> None:
        self.loader, self.finder = loader, finder

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self.loader.exec_module(module)
        self.finder.events.append(self.finder.name)


def test_hooks_of_the_program_before_and_behind(seen: list[str]) -> None:
    sys.meta_path.insert(0, Finder(seen, "behind"))
    watch(seen)
    sys.meta_path.insert(0, Finder(seen, "before"))
    assert importlib.import_module(NAME).value == 7
    assert sorted(seen) == ["before", "behind", "executed", "told"]
    assert seen[0] == "executed"


def test_a_finder_of_the_program_that_loads_from_elsewhere(seen: list[str]) -> None:
    class Own(importlib.abc.Loader):
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            return importlib.util.spec_from_loader(name, self) if name == NAME else None

        def create_module(self, spec: Any) -> None:
            return None

        def exec_module(self, module: Any) -> None:
            module.value = 8

    sys.meta_path.insert(0, Own())
    watch(seen)
    assert importlib.import_module(NAME).value == 8
    assert seen == ["told"]


def test_a_loader_that_importlib_refuses_is_refused_as_without_us(seen: list[str]) -> None:
    class Half:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            return importlib.util.spec_from_loader(name, self) if name == NAME else None  # type: ignore[arg-type]

        def exec_module(self, module: Any) -> None:
            module.value = 9

    sys.meta_path.insert(0, Half())
    watch(seen)
    with pytest.raises(ImportError, match="create_module"):
        importlib.import_module(NAME)


def test_a_lazy_module_is_imported_at_its_first_use(seen: list[str]) -> None:
    class Lazy:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            if name != NAME:
                return None
            spec = PathFinder.find_spec(name)
            assert spec is not None
            assert spec.loader is not None
            spec.loader = importlib.util.LazyLoader(spec.loader)
            return spec

    sys.meta_path.insert(0, Lazy())
    watch(seen)
    module = importlib.import_module(NAME)
    assert seen == []
    assert module.value == 7
    assert seen == ["executed", "told"]


def test_a_watch_that_ended_sees_nothing(seen: list[str]) -> None:
    watching = watch(seen)
    watching.end()
    watching.end()
    importlib.import_module(NAME)
    assert seen == ["executed"]


def test_a_watch_that_ends_during_an_import_hides_no_finder(seen: list[str]) -> None:
    watching = ImportWatch("another_module", lambda: None)
    watching.begin()

    class Ends(importlib.abc.MetaPathFinder):
        """Does what another thread may do meanwhile."""

        def find_spec(self, *_args: Any) -> None:
            watching.end()

    finders: list[Any] = [Ends(), PathFinder]
    sys.meta_path[1:] = finders
    assert importlib.import_module(NAME).value == 7
    assert sys.meta_path == finders


def test_a_watch_of_a_module_that_is_there_calls_at_once(seen: list[str]) -> None:
    importlib.import_module(NAME)
    watch(seen)
    assert seen == ["executed", "told"]


def test_an_import_that_is_under_way_may_fail_and_be_tried_again(
    seen: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = (tmp_path / f"{NAME}.py").read_text()
    monkeypatch.setattr(sys, "watch_of_a_test", lambda: watch(seen), raising=False)
    (tmp_path / f"{NAME}.py").write_text("import sys; sys.watch_of_a_test(); 1 / 0")
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(NAME)
    assert seen == []
    (tmp_path / f"{NAME}.py").write_text(good + "# longer\n\n\n")
    importlib.invalidate_caches()
    importlib.import_module(NAME)
    assert seen == ["executed", "told"]


def test_a_lazy_module_that_is_there_is_not_loaded_by_watching_it(seen: list[str]) -> None:
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    watch(seen)
    assert seen == []
    assert module.value == 7
    assert seen == ["executed", "told"]
