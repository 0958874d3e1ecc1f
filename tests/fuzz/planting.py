"""What others put at the names that commands write to: links, pipes, files of another user.

The names are those that a command was seen to write below its folder, and those of its locks and of
what a killed one leaves. What a command answers must not depend on what stands there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from tests.command import Outcome, run
from tests.fuzz import servers

OTHER_USER = 12345
Commands = list[list[str]]
_NAMED = ("out/run", "out/history")
_PLACES = ("out", "home")
"""Where commands write."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

_seen: set[str] | None = None
"""Names that were opened to write, while it is watched."""
_known: dict[str, tuple[list[str], list[Outcome]]] = {}


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is None:
        return
    if event == "open":
        name, mode, flags = arguments
        if mode is None or flags & _WRITING:
            _note(name)
    elif event in ("os.mkdir", "os.remove", "os.utime", "os.chmod"):
        _note(arguments[0])
    elif event in ("os.rename", "os.link", "os.symlink"):
        _note(arguments[0])
        _note(arguments[1])


def _note(name: object) -> None:
    if isinstance(name, str | bytes | os.PathLike) and _seen is not None:
        _seen.add(str(Path.cwd() / os.fsdecode(name)))


@contextlib.contextmanager
def _watched() -> Iterator[set[str]]:
    global _seen
    if not getattr(sys, "_chopper_planting", False):
        sys.addaudithook(_hook)
        sys._chopper_planting = True  # type: ignore[attr-defined]
    _seen = set()
    try:
        yield _seen
    finally:
        _seen = None


def written(commands: Commands, place: Path, environment: Callable[[Path], Any]) -> list[str]:
    """Return the names that commands write below ``out`` and ``home``, where nothing stands.

    Their answers are kept for :func:`otherwise`.
    """
    key = repr(commands)
    if key not in _known:
        with tempfile.TemporaryDirectory(prefix="chopper-planting-") as name:
            folder = Path(name)
            shutil.copytree(place, folder / "in")
            for one in _PLACES:
                (folder / one).mkdir()
            prepare(commands, folder)
            with contextlib.chdir(folder), environment(folder), _watched() as seen:
                outcomes = [_answer(command, folder) for command in commands]
            found = {os.path.relpath(n, folder) for n in seen if n.startswith(f"{folder}/")}
            found |= {
                str(p.relative_to(folder)) for one in _PLACES for p in (folder / one).rglob("*")
            }
        names = sorted(n for n in found if n.partition("/")[0] in _PLACES and "/" in n)
        _known[key] = names, outcomes
    return _known[key][0]


def _answer(command: list[str], folder: Path) -> Outcome:
    outcome = run(*map(servers.placed, command))
    return Outcome(outcome.code, _same(outcome.out, folder), outcome.err)


def _same(text: str, folder: Path) -> str:
    return text.replace(str(folder), "FOLDER")


def prepare(commands: Commands, folder: Path) -> None:
    """Lay out what a command replaces."""
    if "--force" in commands[0]:
        run("import", folder / "in" / "0.json", "-o", folder / "out" / "run")


def is_planted(commands: Commands, folder: Path) -> bool:
    """Return whether something is planted where commands write; other inputs have the same ones."""
    return repr(commands) in _known and (folder / "outside" / "folder").is_dir()


def otherwise(commands: Commands, outcomes: list[Outcome], folder: Path) -> str | None:
    """Say which answer differs from the one where nothing was planted."""
    if not is_planted(commands, folder):
        return None
    for before, now in zip(_known[repr(commands)][1], outcomes, strict=False):
        if before.code == 0 == now.code and before.out != _same(now.out, folder):
            return (
                f"another answer\n{now.out[:1000]}\nwhere nothing is planted:\n{before.out[:1000]}"
            )
    return None


def places(random: Random, names: list[str]) -> str:
    """Choose a name to plant something at."""
    host, pid = socket.gethostname(), os.getpid()
    if random.random() < 0.6 or not names:
        return random.choice(names) if names else "out/.run.claim"
    name = random.choice(("run", "page.html", "page.md", "x", "rows.parquet", "history"))
    return random.choice(
        (
            *(f"out/.{name}{end}" for end in (".claim", ".chopper-read", f".{pid}.tmp")),
            *(f"out/.{name}.{h}{p}.{what}" for h in (f"{host}-", "") for p in (pid, 4_194_303)
              for what in ("old", "new")),
            f"out/{name}", f"out/{name}.before", "out/run/.claim", "out/run/.hook-notes",
            "out/run/.chopper-probe", "out/run/rank-00000", "out/run/manifest.json",
            "out/run/tables",
            f"out/run/.manifest.json.{pid}.tmp", "out/run/.rank-00001.handed-over.new",
            "home/chopper", "home/chopper/imports", "home/chopper/remote",
            "home/chopper/calibration.json", f"home/chopper/.calibration.json.{pid}.tmp",
            f"home/chopper/sweep-{host}.lock", "home/.cache", "home/.ray", "home/.duckdb",
        )
    )  # fmt: skip


def plant(random: Random, folder: Path, name: str) -> None:
    """Put something at a name, as somebody who may write to the folder could."""
    place, outside = folder / name, folder / "outside"
    with contextlib.suppress(OSError):  # something stands in the way already
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
        # An output may be a link: the user named it.
        kinds = [k for k in _KINDS if name not in _NAMED or not k.startswith("link")]
        _KINDS[random.choice(kinds)](place, outside)


def _of_another(place: Path, outside: Path) -> None:
    place.write_text("1")
    os.chown(place, OTHER_USER, OTHER_USER)


def _folder_of_another(place: Path, outside: Path) -> None:
    shutil.copytree(outside / "folder", place)
    for one in (place, *place.iterdir()):
        os.chown(one, OTHER_USER, OTHER_USER)
    place.chmod(0o777)


def _socket(place: Path, outside: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening, contextlib.chdir(place.parent):
        listening.bind(place.name)


_KINDS: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda place, outside: place.symlink_to(outside / "victim.txt"),
    "link to a secret": lambda place, outside: place.symlink_to(outside / "secret.txt"),
    "link to a folder": lambda place, outside: place.symlink_to(outside / "folder"),
    "link to nothing": lambda place, outside: place.symlink_to(outside / "new"),
    "link to itself": lambda place, outside: place.symlink_to(place),
    "hard link": lambda place, outside: place.hardlink_to(outside / "victim.txt"),
    "pipe": lambda place, outside: os.mkfifo(place),
    "folder": lambda place, outside: place.mkdir(),
    "full folder": lambda place, outside: shutil.copytree(outside / "folder", place),
    "socket": _socket,
    "file of another": _of_another,
    "folder of another": _folder_of_another,
}
