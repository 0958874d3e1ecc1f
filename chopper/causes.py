"""The tree of causes: what a nanosecond of device time can be attributed to.

Ids are dotted and stable: they stand in JSON output, in tables and in ``--fix``. Leaf causes
partition the observed time; a parent is the sum of its leaves. ``ideal`` is the time that the
hardware needs at its peak; everything else is the gap. All that is said of a cause is in
``data/causes.toml``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import msgspec


class Cause(msgspec.Struct, frozen=True):
    """One node of the tree; ``basis`` is what its number rests on, with words in braces.

    ``waits`` is set of leaves in which a rank waits for others, whatever makes these late.
    ``remedies`` stand in place of ``advice`` where a recording rules that out, by what it shows.
    """

    label: str
    doc: str
    color: str
    advice: str = ""
    basis: str = ""
    remedies: dict[str, str] = {}
    measured: bool = False
    waits: bool = False


class _File(msgspec.Struct):
    causes: dict[str, Cause]
    phases: dict[str, str]


_FILE = msgspec.toml.decode(
    Path(__file__).with_name("data").joinpath("causes.toml").read_bytes(), type=_File
)
CAUSES = _FILE.causes
PHASE_COLORS = _FILE.phases
"""Colours of the phases; those that only one program has take that of ``other``."""
LEAVES: tuple[str, ...] = tuple(
    c for c in CAUSES if not any(other.startswith(c + ".") for other in CAUSES)
)
CODES: dict[str, int] = {cause: code for code, cause in enumerate(LEAVES)}
"""Number of each leaf, by which arrays name it."""
WAITS = frozenset(c for c in LEAVES if CAUSES[c].waits)
"""Leaves in which a rank waits for other ranks."""

Level = Literal[
    "cause",
    "step",
    "phase",
    "layer",
    "op",
    "kernel",
    "rank",
    "pipeline",
    "data",
    "expert",
    "context",
    "tensor",
]
"""What time can be grouped by; the last ones are dimensions of parallelism."""
LEVELS: tuple[Level, ...] = get_args(Level)


def parent(cause: str) -> str | None:
    """Return the id of a cause's parent, None at the top."""
    return cause.rpartition(".")[0] or None


def parents(cause: str) -> tuple[str, ...]:
    """Return the ids of all ancestors of a cause, nearest first."""
    above = parent(cause)
    return () if above is None else (above, *parents(above))


def inherited(cause: str, field: Literal["color", "advice", "basis"]) -> str:
    """Return a text about a cause, or about its nearest ancestor that has one."""
    nodes = (CAUSES[node] for node in (cause, *parents(cause)) if node in CAUSES)
    return next((text for node in nodes if (text := getattr(node, field))), "")
