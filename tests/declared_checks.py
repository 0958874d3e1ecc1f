"""The checks that the documentation declares."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

_FILE = Path(__file__).resolve().parent.parent / "chopper" / "data" / "checks.toml"
CHECKS: dict[str, dict[str, Any]] = tomllib.loads(_FILE.read_text(encoding="utf-8"))
