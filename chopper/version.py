"""The one place that holds the version, and how this copy of it was built."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__version__ = "0.1.0"
EXTENSIONS = (
    "analyzers/replay/_longest",
    "analyzers/trace/_forest",
    "collectors/formats/kineto/_scan",
)
"""Extensions in C; without them Python does the same, many times slower."""


def build() -> dict[str, str | int | None]:
    """Return how this copy was built.

    Returns:
        ``form``: of the installation; ``commit``: of its sources, null where it is not known;
        ``extensions_count``: of the extensions in C, those that are there.
    """
    import json
    from importlib.machinery import EXTENSION_SUFFIXES
    from importlib.metadata import PackageNotFoundError, distribution
    from pathlib import Path

    here = Path(__file__).resolve().parent
    form = "source tree"
    try:
        installed = distribution("chopper-profiler")
        origin = json.loads(installed.read_text("direct_url.json") or "{}")
        wheel = (installed.read_text("WHEEL") or "").splitlines()
        tags = [line.removeprefix("Tag: ") for line in wheel if line.startswith("Tag: ")]
        if origin.get("dir_info", {}).get("editable"):
            form = "editable install"
        elif tags and Path(str(installed.locate_file("chopper"))).resolve() == here:
            form = f"wheel {tags[0]}"
    except PackageNotFoundError:
        pass
    count = sum((here / f"{n}{s}").is_file() for n in EXTENSIONS for s in EXTENSION_SUFFIXES)
    return {"form": form, "commit": _commit(here), "extensions_count": count}


def _commit(here: Path) -> str | None:
    import subprocess

    built = here / "data" / "commit.txt"
    if built.is_file():
        return built.read_text(encoding="ascii").strip()
    if not (here.parent / ".git").exists():
        return None
    git = ["git", "-C", str(here.parent)]
    command = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]  # no tags
    try:
        shown = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return shown.stdout.strip()
