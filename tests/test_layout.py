"""The four folders beside chopper/ are one import namespace with it, for every tool."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from chopper.version import EXTENSIONS

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("analyzers", "collectors", "reports", "workloads")
DATA_SUFFIXES = (".json", ".html", ".css", ".js", ".j2", ".md", ".typed")


def git_files(*options: str) -> list[str]:
    """Paths that git knows, without those deleted in the working tree."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: what is committed cannot be listed")
    listing = subprocess.run(
        ["git", "ls-files", "-z", *options], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [path for path in listing.stdout.split("\0") if path]


def run_tool(
    *command: str, stdin: str | None = None, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        input=stdin,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_link_is_relative_and_committed_as_a_link(folder: str) -> None:
    link = ROOT / "chopper" / folder
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{folder}"
    assert link.resolve() == ROOT / folder
    [staged] = git_files("--stage", f"chopper/{folder}")
    mode, *_ = staged.split()
    assert mode == "120000"


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_and_namespace_are_the_same_files(folder: str) -> None:
    module = importlib.import_module(f"chopper.{folder}")
    assert module is getattr(importlib.import_module("chopper"), folder)
    assert module.__file__ is not None
    assert Path(module.__file__).samefile(ROOT / folder / "__init__.py")


def test_no_module_is_loaded_under_its_bare_name() -> None:
    # Two copies of one module would have two sets of classes, and isinstance would lie.
    bare = [name for name in sys.modules if name.split(".")[0] in FOLDERS]
    assert bare == []


def test_top_level_holds_the_named_folders_and_nothing_unknown() -> None:
    present = {path.split("/")[0] for path in git_files() if "/" in path}
    assert {"chopper", "tests", *FOLDERS} <= present
    assert present <= {
        "chopper",
        "tests",
        *FOLDERS,
        ".ci",
        ".github",
        "benchmarks",
        "docs",
        "examples",
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the working tree, built in a copy so that no build/ is left here.

    From an sdist, as ``build`` does: what that lacks, the wheel lacks.
    """
    base = tmp_path_factory.mktemp("wheel")
    source = base / "source"
    for name in git_files("--cached", "--others", "--exclude-standard"):
        if not os.path.lexists(ROOT / name):
            continue
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    subprocess.run(["git", "init", "--quiet"], cwd=source, check=True)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x", "commit", "--quiet", "-m", "x"]
    subprocess.run([*git, "--allow-empty"], cwd=source, check=True)
    built = run_tool("build", "--no-isolation", "--outdir", str(base), str(source))
    assert built.returncode == 0, built.stdout + built.stderr
    [found] = base.glob("*.whl")
    return found


def test_wheel_holds_chopper_and_nothing_beside_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"chopper"}
    wanted = set()
    for path in git_files("--cached", "--others", "--exclude-standard"):
        top = path.split("/")[0]
        if (ROOT / path).is_file() and path.endswith((".py", *DATA_SUFFIXES)):
            if top == "chopper":
                wanted.add(path)
            elif top in FOLDERS:
                wanted.add(f"chopper/{path}")
    assert wanted - names == set()


def test_wheel_serves_each_python(wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [points] = (n for n in names if n.endswith("/entry_points.txt"))
        commands = archive.read(points).decode()
        commit = archive.read("chopper/data/commit.txt").decode()
    built = {n.removeprefix("chopper/").removesuffix(".abi3.so") for n in names if ".so" in n}
    assert built == set(EXTENSIONS)
    assert re.fullmatch(r"[0-9a-f]{40}\n", commit)
    # `pipx run chopper-profiler` starts the command of the distribution's name.
    assert "chopper-profiler = chopper.__main__:main" in commands
    assert any(n.endswith("/licenses/LICENSE") for n in names)


def test_wheel_imports_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import chopper, " + ", ".join(f"chopper.{folder}" for folder in FOLDERS) + "\n"
        "print(chopper.__file__, chopper.analyzers.__file__)"
    )
    shown = subprocess.run(
        [sys.executable, "-I", "-c", code, str(tmp_path)],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert shown.stdout.split() == [
        str(tmp_path / "chopper" / "__init__.py"),
        str(tmp_path / "chopper" / "analyzers" / "__init__.py"),
    ]


def test_mypy_sees_each_file_once_and_under_its_full_name(monkeypatch: pytest.MonkeyPatch) -> None:
    main = pytest.importorskip("mypy.main")
    monkeypatch.chdir(ROOT)
    sources, _ = main.process_options([])
    files = [Path(source.path).resolve() for source in sources]
    assert len(files) == len(set(files))
    names = {source.module for source in sources}
    assert {f"chopper.{folder}" for folder in FOLDERS} <= names
    assert not {name for name in names if name.split(".")[0] in FOLDERS}
