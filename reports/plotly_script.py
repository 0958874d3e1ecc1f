"""Plotly's script, compressed in the background while something else is being done.

Light on purpose: ``prefetch`` is called before numpy and pyarrow are loaded.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import threading
import zlib
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from chopper.errors import ChopperError

_LEVEL = 4
"""Half the time of level 6, and 4 % more bytes."""


@dataclass(frozen=True, slots=True)
class Script:
    """A script as the page holds it."""

    deflated: str
    """zlib, base64."""
    policy_hash: str
    """Its source expression in a content security policy."""
    size_bytes: int
    """As it is evaluated."""


def _load() -> Script:
    # Found without importing plotly, whose figure classes the page does not need.
    spec = importlib.util.find_spec("plotly")
    origin = Path(spec.origin).parent if spec and spec.origin else Path()
    where = origin / "package_data" / "plotly.min.js"
    if not where.is_file():
        raise ChopperError(
            "plotly.min.js is not in the plotly package; reinstall it: "
            "pip install --force-reinstall plotly"
        )
    code = where.read_bytes()
    deflated = base64.b64encode(zlib.compress(code, _LEVEL)).decode("ascii")
    return Script(deflated, policy_hash(code), len(code))


def policy_hash(code: bytes) -> str:
    """The source expression that lets exactly this script run."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(code).digest()).decode("ascii") + "'"


@cache
def prefetch() -> Future[Script]:
    """Start compressing, to be ready when the rest of the report is.

    zlib works without the interpreter's lock, so this costs nothing beside reading a trace.
    """
    script: Future[Script] = Future()

    def load() -> None:
        try:
            script.set_result(_load())
        except Exception as exc:  # noqa: BLE001 - raised again where the script is waited for
            script.set_exception(exc)

    # A daemon: a command that ends with an error does not wait for it.
    threading.Thread(target=load, name="plotly", daemon=True).start()
    return script


def get() -> Script:
    """Return the script, waited for where it is being prepared.

    Raises:
        ChopperError: the plotly package does not hold it.
    """
    return prefetch().result()
