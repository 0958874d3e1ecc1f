"""JSON of structs that may hold names of files, which on Linux are bytes and need not be UTF-8."""

from __future__ import annotations

from typing import Any

import msgspec


def encode(value: Any) -> bytes:
    """Serialize as JSON; a byte 0xff of a name that is not UTF-8 reads ``\\udcff``."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_readable(msgspec.to_builtins(value)))


def _readable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_readable(k): _readable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(v) for v in value]
    return value
