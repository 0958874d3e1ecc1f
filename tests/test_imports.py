"""What an import may cost, and what the package says that it offers."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import chopper

ROOT = Path(__file__).resolve().parent.parent
# All that `import chopper` may load, as top-level names; of chopper itself two modules.
ALLOWED_MODULES = {
    "__future__",
    "_typing",
    "abc",
    "collections",
    "contextlib",
    "copyreg",
    "functools",
    "operator",
    "re",
    "types",
    "typing",
    "warnings",
}
ALLOWED_OF_CHOPPER = {"chopper", "chopper.version"}
# Slow to load, or a vendor's: wanted only by the call that needs them.
HEAVY = {"amdsmi", "numpy", "pandas", "plotly", "pyarrow", "pynvml", "scipy", "torch"}


def loaded_by(code: str) -> set[str]:
    """Modules that ``code`` adds to those of a fresh interpreter."""
    script = (
        "import sys\n"
        "before = set(sys.modules)\n"
        f"{code}\n"
        "sys.stderr.write(' '.join(sorted(set(sys.modules) - before)))\n"
    )
    # Coverage of a measured run would start in the child and load modules of its own.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_")}
    shown = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    return set(shown.stderr.splitlines()[-1].split())


def top_level(modules: set[str]) -> set[str]:
    return {name.split(".")[0] for name in modules}


def test_import_chopper_loads_only_what_is_listed() -> None:
    loaded = loaded_by("import chopper")
    assert {m for m in loaded if m.split(".")[0] == "chopper"} <= ALLOWED_OF_CHOPPER
    assert top_level(loaded) - {"chopper"} <= ALLOWED_MODULES


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["analyze", "--help"], ["schema", "host_span"]]
)
def test_help_and_version_load_nothing_heavy(arguments: list[str]) -> None:
    loaded = loaded_by(
        "from chopper.cli import main\n"
        f"sys.argv = ['chopper', *{arguments!r}]\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code, stop.code\n"
    )
    assert "click" in loaded
    assert top_level(loaded) & HEAVY == set()


def test_a_report_loads_what_it_needs(tmp_path) -> None:
    # A tenth of a second each, of the second that a report of a small trace may take.
    trace = str(ROOT / "tests/golden/own/fsdp2/rank-00000/trace.json.gz")
    loaded = loaded_by(
        "from chopper.cli import main\n"
        f"sys.argv = ['chopper', 'report', {trace!r}, '-o', {str(tmp_path / 'r.html')!r}]\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code, stop.code\n"
    )
    assert (tmp_path / "r.html").is_file()
    unwanted = {"asyncio", "pandas", "plotly", "pynvml", "rich", "scipy", "torch"}
    assert top_level(loaded) & unwanted == set()


@pytest.mark.parametrize("package", ["analyzers", "reports"])
def test_analysis_never_loads_torch(package: str) -> None:
    loaded = loaded_by(
        "import importlib, pkgutil\n"
        f"import chopper.{package} as package\n"
        "for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "    importlib.import_module(module.name)\n"
    )
    assert f"chopper.{package}" in loaded
    assert top_level(loaded) & {"amdsmi", "pynvml", "torch"} == set()


def test_public_names_are_sorted_and_resolve_in_a_fresh_interpreter() -> None:
    assert chopper.__all__ == sorted(chopper.__all__)
    assert len(chopper.__all__) == len(set(chopper.__all__))
    assert set(dir(chopper)) >= set(chopper.__all__)
    # Fresh, because a name that another test resolved stays resolved here.
    loaded = loaded_by("import chopper\nfor name in chopper.__all__: getattr(chopper, name)")
    assert "chopper" in loaded


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        chopper.no_such_name  # noqa: B018


def test_each_public_name_is_documented() -> None:
    for name in set(chopper.__all__) - {"__version__"}:
        assert (getattr(chopper, name).__doc__ or "").strip(), f"chopper.{name} has no docstring"


def test_entry_point_exists() -> None:
    assert callable(importlib.import_module("chopper.cli").main)
