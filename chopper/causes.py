"""The tree of causes: what a nanosecond of device time can be attributed to.

Ids are dotted and stable: they stand in JSON output, in tables and in ``--fix``. Leaf causes
partition the observed time; a parent is the sum of its leaves. ``ideal`` is the time that the
hardware needs at its peak; everything else is the gap. Labels and meanings are in
``data/causes.json``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import msgspec


@dataclass(frozen=True, slots=True)
class Cause:
    """One node of the tree."""

    id: str
    label: str
    doc: str

    @property
    def parent(self) -> str | None:
        """Id of the parent, None at the top."""
        return self.id.rpartition(".")[0] or None


CAUSES: dict[str, Cause] = {
    cause.id: cause
    for cause in msgspec.json.decode(
        (Path(__file__).parent / "data" / "causes.json").read_bytes(), type=list[Cause]
    )
}
LEAVES: tuple[str, ...] = tuple(
    c for c in CAUSES if not any(other.startswith(c + ".") for other in CAUSES)
)
CODES: dict[str, int] = {cause: code for code, cause in enumerate(LEAVES)}
"""Number of each leaf, by which arrays name it."""

Level = Literal["cause", "step", "phase", "layer", "op", "kernel", "rank"]
"""What time can be grouped by."""
LEVELS: tuple[Level, ...] = get_args(Level)


def parents(cause_id: str) -> tuple[str, ...]:
    """All ancestors of a cause, nearest first."""
    parent = CAUSES[cause_id].parent
    return () if parent is None else (parent, *parents(parent))
