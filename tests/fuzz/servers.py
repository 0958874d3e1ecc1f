"""Servers of the campaign: HTTP on the loopback, and an object store in memory.

Commands name them ``WEB`` and ``STORE``: where they are is known only when a command runs.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
from pathlib import Path
from random import Random
from re import fullmatch
from typing import Any

from chopper import limits
from tests.command import Outcome
from tests.fuzz.mutating import SECRET
from tests.storage.hostile_server import serving
from tests.storage.s3_server import forget

STORE = "memory://bucket/p"
_held = contextlib.ExitStack()


@functools.cache
def _place(secret: bool) -> str:
    """Start a server; one that is none of the user's has the secret."""
    limits.SLOW_S, limits.UNTOLD_BYTES = 0.5, 8 << 20
    address = _held.enter_context(serving(SECRET.encode() if secret else b"{}"))
    place: str = address.place
    return place


def placed(word: str) -> str:
    """Return a word of a command with the servers where they are."""
    if "://WEB/" in word or "@WEB/" in word:
        how = json.loads(base64.urlsafe_b64decode(word.split("WEB/")[1].split("/")[0]))
        how["to"] = how.get("to", "").replace("OTHER", _place(secret=True))
        word = word.replace(word.split("WEB/")[1].split("/")[0], packed(how), 1)
        word = word.replace("WEB", _place(secret=False), 1)
    return word.replace("STORE", STORE)


def packed(how: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(how).encode()).decode()


def address(random: Random, file: str) -> str:
    """Return an address of a server that sends a file, and does something strange or two."""
    how: dict[str, Any] = {"file": file}
    odd: tuple[dict[str, Any], ...] = (
        {"coding": "gzip"}, {"coding": "deflate"}, {"coding": "br"}, {"coding": "gzip, gzip"},
        {"coding": "gzip", "bomb": 40 << 20}, {"endless": True}, {"drip": "head"},
        {"drip": "body", "endless": True}, {"more": random.randint(1, 1 << 40)},
        {"headers": {"Content-Length": random.choice(("-1", "1", "x", "9" * 30, "+5", "٣"))}},
        {"headers": {"ETag": "e" * 9_000, "Content-Type": "\x1b[31m"}},
        {"headers": {f"X-{i}": "y" * 600 for i in range(random.choice((3, 90, 200)))}},
        {"headers": {"Transfer-Encoding": "chunked"}},
        {"status": random.choice((204, 206, 304, 400, 401, 403, 404, 410, 418, 429, 500, 503))},
        *({"status": random.choice((301, 302, 303, 307, 308)), "to": to} for to in (
            "/", "x", "http://OTHER/x/", f"http://{SECRET}:{SECRET}@OTHER/x?{SECRET}",
            f"//OTHER/{SECRET}", "http://169.254.169.254/", "http://[::ffff:a9fe:a9fe]/", "file:///",
            "ftp://OTHER/", "http://[", "http://:99999/", "https://OTHER/", "javascript:0",
        )),
    )  # fmt: skip
    for _ in range(random.choice((0, 1, 1, 1, 2))):
        how |= random.choice(odd)
    user = random.choice(("", "", f"me:{SECRET}@", f"{SECRET}@", f"me:%53{SECRET}@"))
    query = random.choice(
        ("", "", f"?X-Amz-Signature={SECRET}", f"?{SECRET}#{SECRET}", "?a=%2F..%2F")
    )
    name = random.choice(("0.json", "0.json", "..", "a%2Fb.json", "\u202e.json", "a b;c", ""))
    return f"http://{user}WEB/{packed(how)}/{name}{query}"


FOREIGN = (
    *("tables/x.parquet", "rank-00000/notes.txt", "rank-00009/step.arrow", "weights/a.bin"),
    *("attempt-1/x", "upload-0/x", f"upload-{'0' * 16}/manifest.json", "manifest.json.old", "x"),
)


class Objects:
    """The object store while commands run on one input, and what they may change in it."""

    def __init__(self, folder: Path) -> None:
        forget()
        self._before = dict[str, bytes]()
        if not folder.is_dir():
            return
        import fsspec

        self._fs = fsspec.filesystem("memory")
        self._fs.store.clear()
        self._fs.pseudo_dirs[:] = [""]
        for file in sorted(folder.rglob("*")):
            if file.is_file() and not file.is_symlink():
                name = f"/bucket/p/{file.relative_to(folder).as_posix()}"
                self._fs.pipe(name, file.read_bytes())
        self._before = self._state()
        self._folder = folder

    def _state(self) -> dict[str, bytes]:
        return {name: file.getvalue() for name, file in self._fs.store.items()}

    def problem(self, command: list[str], outcomes: list[Outcome]) -> str | None:
        """What a command changed that is not the run's, or wrote that is none."""
        if not hasattr(self, "_folder"):
            return None
        forget()
        after, done = self._state(), not any(outcome.code for outcome in outcomes)
        new = sorted(after.keys() - self._before.keys())
        if command[0] == "analyze" and len(outcomes) == 2 and not outcomes[0].code and not done:
            return f"a run that was written cannot be read\n{outcomes[1].err}"
        if outcomes[0].code and (new or after != self._before):
            return f"refused, and changed {new[:1]}"
        allowed = _ORIGINAL if "--force" in command or len(outcomes) > 1 else ()
        for name, content in self._before.items():
            if after.get(name) != content and not any(fullmatch(x, name) for x in allowed):
                return f"the object {name} was {'changed' if name in after else 'removed'}"
        ours = ("/bucket/p/upload-", "/bucket/p/manifest.json")
        odd = [name for name in new if not name.startswith(ours)]
        return f"wrote {odd[0]}" if odd else None


_ORIGINAL = (
    r"/bucket/p/manifest\.json",
    r"/bucket/p/(upload-0123456789abcdef/)?(rank-0000[01]/)?"
    r"(manifest\.json|trace(-[0-9]+)?\.json|[a-z_]+\.(arrow|parquet))",
)
"""What the run that lay there before the edits may have named, and a new one replaces."""
