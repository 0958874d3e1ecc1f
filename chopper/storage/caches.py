"""Folders of this user alone, for what a later command may use again."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path

from chopper.errors import OutputError, reason_of
from chopper.storage.files import is_users

_KEPT_S = 7 * 86_400


def cache_folder(kind: str, key: str) -> Path:
    """Return the folder of ``key``, made where it is missing; remove those unused for a week.

    It is ``$XDG_CACHE_HOME/chopper/KIND/HASH`` (``~/.cache`` by default), which nobody else may
    open. Where that cannot be made, or belongs to another user (``sudo`` keeps HOME), it is a
    temporary folder that ends with this process: nothing is ever taken from others.

    Raises:
        OutputError: no temporary folder can be made either.
    """
    name = hashlib.sha256(os.fsencode(key)).hexdigest()[:16]
    # A relative path is invalid there (XDG Base Directory Specification).
    named = Path(os.environ.get("XDG_CACHE_HOME") or "")
    try:
        home = named if named.is_absolute() else Path.home() / ".cache"
        home.mkdir(parents=True, exist_ok=True)
        if not is_users(home.stat()) and home.stat().st_uid:
            raise PermissionError
        folder = home
        for part in ("chopper", kind, name):
            folder = folder / part
            _make_own(folder)
        os.utime(folder)
    except (OSError, RuntimeError):  # pathlib's, where no home is known
        return _temporary()
    for other in folder.parent.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - other.lstat().st_mtime > _KEPT_S:
                shutil.rmtree(other, ignore_errors=True)
    return folder


def _make_own(folder: Path) -> None:
    """Make a folder, or require that it is a real one of this user, and close it to others."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if sys.platform == "win32":
        return
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if not is_users(os.fstat(opened)):
            raise PermissionError
        os.fchmod(opened, 0o700)
    finally:
        os.close(opened)


def _temporary() -> Path:
    """Return a temporary folder; of a killed process, ``destination.scratch`` removes it."""
    try:
        prefix = f"chopper-cache-{socket.gethostname()}-{os.getpid()}-"
        folder = tempfile.mkdtemp(prefix=prefix)
    except OSError as exc:
        raise OutputError(
            f"no folder for temporary files can be made ({reason_of(exc)}); set TMPDIR"
        ) from exc
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
