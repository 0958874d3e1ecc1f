"""A mixture of sources as every process knows it: shards, row groups, weights, stages, rows.

No torch here, nor in what reads and plans: loader processes do without it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from chopper.errors import ChopperError

Ints = NDArray[np.int64]
Tokens = NDArray[np.uint16]
Sample = tuple[int, int]
"""Numbers of a source and of one of its documents."""
Modality = Literal["text", "image", "tokens"]
Point = tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[float, msgspec.Meta(ge=0)]]
"""A step, and the weight that a source has from there on."""

VOCABULARY = 320
"""Ids: 0 is padding, 1 to 256 are bytes, those above are brightnesses of patches."""
MEDIA = {"media": "string", "offset": "integer", "size": "integer", "sha256": "string"}
"""Columns that say where a document's image lies → their kinds."""
_NORMALS_COUNT = 4099


class SourceError(ChopperError):
    """A source did not give what it was asked for; the message names it and the sample."""


class Packing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rows that a rank trains on."""

    width: Annotated[int, msgspec.Meta(ge=8, le=1 << 20)] = 256
    rows: Literal["packed", "padded"] = "packed"


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A stage of the curriculum: from a step on, documents up to a length are drawn."""

    step: Annotated[int, msgspec.Meta(ge=0)]
    longest: Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """Facts about a source that every process has; the documents' lengths only planners read."""

    name: str
    number: int
    shards: tuple[str, ...]
    groups: tuple[tuple[int, int, int], ...]
    """Row groups of all shards in order: shard, number in it, rows."""
    points: tuple[Point, ...]
    state_bytes: int
    """Bytes of its largest row group in memory."""
    modality: Modality = "text"
    content: str = "text"
    length: str = "length"
    latency_s: float = 0.0
    """Mean time that is added to each request of storage, as a distance would."""
    seed: int = 0

    @property
    def size(self) -> int:
        """Count its documents."""
        return sum(rows for _, _, rows in self.groups)

    @property
    def columns(self) -> dict[str, str]:
        """Columns that a document is made of → their kinds."""
        kind = "list of integers" if self.modality == "tokens" else "string"
        return {self.content: kind} | (MEDIA if self.modality == "image" else {})

    def latency_of(self, index: int) -> float:
        """Seconds added to the request for one document: around the mean, seldom twice it."""
        at = (index * 2654435761 + self.number * 40503 + self.seed * 97) % _NORMALS_COUNT
        return self.latency_s * math.exp(0.35 * float(_normals()[at]) - 0.35**2 / 2)


@functools.cache
def _normals() -> NDArray[np.float64]:
    return np.random.default_rng(0).standard_normal(_NORMALS_COUNT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """A mixture whose shards were found."""

    specs: tuple[SourceSpec, ...]
    packing: Packing
    stages: tuple[Stage, ...]
    """The first begins at step 0."""


def weight_at(points: Sequence[Point], step: int) -> float:
    """Weight of a source at a step, linear between the points."""
    steps, weights = zip(*points, strict=True)
    return float(np.interp(step, steps, weights))


def beside(shard: str, media: str) -> str:
    """Path of a file that a shard names."""
    if "://" in media or media.startswith("/"):
        return media
    if "://" in shard:
        return f"{PurePosixPath(shard).parent}/{media}".replace(":/", "://", 1)
    return str(Path(shard).parent / media)
