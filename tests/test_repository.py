"""The files around the code say what is true of it."""

from __future__ import annotations

import re
import stat
import subprocess
import tomllib
from pathlib import Path

import pytest

import chopper

ROOT = Path(__file__).resolve().parent.parent
# Paths of the machine it was written on; assembled, so that this file does not hold them.
WORKPLACE_PATHS = re.compile(rb"(?<![\w.-])/" + b"work/|shared/" + b"traces")
VERSION = re.compile(r"(?<![\d.])" + re.escape(chopper.__version__) + r"(?![\d.])")


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: what is committed cannot be listed")
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    files = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [path for path in files if path.is_file() and not path.is_symlink()]


def make_targets() -> dict[str, str]:
    """Target → prerequisites and recipe."""
    targets: dict[str, str] = {}
    name = None
    for line in read("Makefile").splitlines():
        head = re.match(r"([a-z-]+):(?!=)(.*)", line)
        if head:
            name = head[1]
            targets[name] = head[2]
        elif name and line.startswith("\t"):
            targets[name] += "\n" + line
    return targets


def test_version_is_written_in_one_place() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    assert "version" not in project
    assert "version" in project["dynamic"]
    holders = [
        path.relative_to(ROOT).as_posix()
        for path in tracked_files()
        if path.suffix in (".py", ".toml", "")
        and path.relative_to(ROOT).parts[0] not in ("tests", "benchmarks", "LICENSE")
        and VERSION.search(path.read_text(encoding="utf-8"))
    ]
    assert holders == ["chopper/version.py"]


def test_make_targets_named_in_documents_exist() -> None:
    targets = make_targets()
    for path in [ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        for target in re.findall(r"(?:^|`)make ([a-z]+)", text, flags=re.MULTILINE):
            assert target in targets, f"{path.relative_to(ROOT)} names make {target}"


def test_make_test_runs_everything_that_guards_the_code() -> None:
    targets = make_targets()

    def reach(name: str) -> str:
        asked, _, recipe = targets.get(name, "").partition("\n")
        names = [*asked.split("##")[0].split(), *re.findall(r"\$\(MAKE\).* ([a-z]+)$", recipe)]
        return "\n".join([recipe, *map(reach, names)])

    reached = reach("test")
    for guard in ("ruff check", "ruff format --check", "mypy", "lint-imports", "pytest", "mkdocs"):
        assert guard in reached


def test_ci_calls_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    text = script.read_text(encoding="utf-8")
    assert re.search(r"^make\b.*\btest$", text, flags=re.MULTILINE)
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_every_dependency_is_pinned() -> None:
    name = re.compile(r"[A-Za-z0-9._-]+")
    project = tomllib.loads(read("pyproject.toml"))
    extras = project["project"]["optional-dependencies"]
    wanted = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *(one for extra in ("dev", "docs", "torch") for one in extras[extra]),
    ]
    pins: set[str] = set()
    for line in read("constraints.txt").splitlines():
        if line and not line.startswith("#"):
            assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line), line
            pins.add(re.sub(r"[-_.]+", "-", line.split("==")[0]).lower())
    for requirement in wanted:
        match = name.match(requirement)
        assert match is not None
        if match[0] != "chopper-profiler":
            assert re.sub(r"[-_.]+", "-", match[0]).lower() in pins, requirement


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(document: str) -> None:
    text = re.sub(r"```.*?```", "", read(document), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert links
    for link in links:
        if not re.match(r"[a-z]+:", link):
            target, _, anchor = link.partition("#")
            path = ROOT / target
            assert path.exists(), f"{document}: {link}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), flags=re.MULTILINE)
                slugs = {
                    re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings
                }
                assert anchor in slugs, f"{document}: {link}"


def test_files_on_the_map_of_the_house_exist() -> None:
    named = re.findall(r"`([a-z_]+/[\w/]+\.(?:py|json|md))`", read("CONTRIBUTING.md"))
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_no_path_of_a_workplace_is_committed() -> None:
    found = []
    for path in tracked_files():
        held = WORKPLACE_PATHS.findall(path.read_bytes())
        found += [f"{path.relative_to(ROOT)}: {text.decode()}" for text in held]
    assert found == []


def test_nothing_that_is_built_is_committed() -> None:
    paths = [path.relative_to(ROOT) for path in tracked_files()]
    assert not [p for p in paths if p.suffix in (".pyc", ".so", ".whl")]
    assert not [p for p in paths if p.parts[0] in ("build", "dist", "runs", "site", ".venv")]
    assert not [p for p in paths if p.parent == Path() and p.suffix == ".html"]
