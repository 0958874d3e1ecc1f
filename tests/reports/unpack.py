"""Reads a pack as the browser does: the same format, told a second time."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import numpy as np


def unpack(text: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    data = zlib.decompress(base64.b64decode(text))
    size = int.from_bytes(data[:4], "little")
    header = json.loads(data[4 : 4 + size])
    at = 4 + size
    arrays = {}
    for one in header["arrays"]:
        width = int(one["type"][1:]) // 8
        planes = np.frombuffer(data, np.uint8, one["count"] * width, at).reshape(width, -1)
        at += one["count"] * width
        dtype = np.dtype(f"<{one['type'][0]}{width}")
        arrays[one["name"]] = np.ascontiguousarray(planes.T).reshape(-1).view(dtype)
    assert at == len(data)
    return header["meta"], arrays


def names_of(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(text)))
    return found
