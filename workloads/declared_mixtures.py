"""Mixtures that are declared: which Parquet shards, drawn with which weights when, in what rows.

The TOML file of ``chopper bench dataloader -- --mixture FILE``:

    [packing]
    width = 256                  # tokens of a row; longer documents are left out
    rows = "packed"              # or "padded": a row for each document

    [[sources]]
    name = "web"
    shards = "s3://bucket/web/*.parquet"     # or a list; paths are relative to the file
    weight = [[0, 3.0], [1000, 1.0]]         # or a number: [step, weight], linear in between
    modality = "text"                        # text, image or tokens
    content = "text"                         # column with the document
    length = "length"                        # column with its tokens, by which steps are planned

    [[curriculum]]
    step = 0
    longest = 64                 # documents that are longer are not drawn yet

Text becomes bytes. An image is one of the bytes ``offset`` to ``offset + size`` of the file
``media`` (columns of these names, the file relative to the shard), its digest the column
``sha256``; it becomes a token for each patch, behind those of its caption. Tokens are a list of
integers; those beyond the vocabulary are folded into it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import msgspec

from chopper.errors import InputError
from chopper.workloads.mixture import (
    Modality,
    Packing,
    Point,
    Sources,
    SourceSpec,
    Stage,
    weight_at,
)
from chopper.workloads.shards import groups_of, matching

_THREADS = 16


class Declared(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A source as it is declared."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    shards: str | list[str]
    weight: Annotated[float, msgspec.Meta(ge=0)] | list[Point] = 1.0
    modality: Modality = "text"
    content: str = "text"
    length: str = "length"

    @property
    def points(self) -> tuple[Point, ...]:
        """Weights by step."""
        return ((0, self.weight),) if isinstance(self.weight, float) else tuple(self.weight)


class Declaration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A mixture as it is declared."""

    sources: Annotated[list[Declared], msgspec.Meta(min_length=1, max_length=4096)]
    packing: Packing = Packing()
    curriculum: list[Stage] = []


def read_mixture(file: Path) -> Sources:
    """Read the declaration of a mixture, and the footers of its shards.

    Raises:
        InputError: it is not one, or a shard is not as it says; one line.
    """
    try:
        declared = msgspec.toml.decode(file.read_bytes(), type=Declaration)
    except OSError as exc:
        raise InputError(f"{file}: cannot be read ({exc.strerror})") from exc
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as exc:
        why = " ".join(str(exc).split()).replace("`$.", "`").replace("`$`", "the file")
        raise InputError(f"{file}: {why[0].lower()}{why[1:]}") from exc
    stages = _checked(file, declared)
    with ThreadPoolExecutor(_THREADS) as pool:
        specs = list(pool.map(lambda n: _found(file, declared, n), range(len(declared.sources))))
    return Sources(specs=tuple(specs), packing=declared.packing, stages=stages)


def _checked(file: Path, declared: Declaration) -> tuple[Stage, ...]:
    """Check what no type says, and return the stages with a first one."""
    names = Counter(source.name for source in declared.sources)
    if twice := [name for name, count in names.items() if count > 1]:
        raise InputError(f"{file}: two sources are named {twice[0]}; choose another name")
    for number, source in enumerate(declared.sources):
        _require_ascending(file, f"sources[{number}].weight", [s for s, _ in source.points])
    for step in sorted({s for source in declared.sources for s, _ in source.points} | {0}):
        if not sum(weight_at(source.points, step) for source in declared.sources) > 0:
            raise InputError(
                f"{file}: all weights are 0 at step {step}; give a source a weight above 0"
            )
    if declared.curriculum:
        _require_ascending(file, "curriculum", [stage.step for stage in declared.curriculum])
    width = declared.packing.width
    for number, stage in enumerate(declared.curriculum):
        if stage.longest > width:
            raise InputError(
                f"{file}: curriculum[{number}].longest: {stage.longest} tokens, expected at most "
                f"packing.width, {width}"
            )
    return tuple(declared.curriculum) or (Stage(step=0, longest=width),)


def _require_ascending(file: Path, what: str, steps: Sequence[int]) -> None:
    if not steps or steps[0] != 0 or any(a >= b for a, b in itertools.pairwise(steps)):
        raise InputError(f"{file}: {what}: steps {steps}, expected 0 first and ascending ones then")


def _found(file: Path, declared: Declaration, number: int) -> SourceSpec:
    """Find a source's shards and read their footers."""
    source = declared.sources[number]
    patterns = [source.shards] if isinstance(source.shards, str) else source.shards
    shards: list[str] = []
    for pattern in patterns:
        if "://" not in pattern:
            pattern = str(file.parent / pattern)
        if not (found := matching(pattern)):
            raise InputError(f"{file}: sources[{number}].shards: nothing matches {pattern}")
        shards += found
    bare: dict[str, Any] = {
        "name": source.name,
        "number": number,
        "shards": tuple(shards),
        "points": source.points,
        "modality": source.modality,
        "content": source.content,
        "length": source.length,
    }
    spec = SourceSpec(**bare, groups=(), state_bytes=0)
    groups, state_bytes = groups_of(spec)
    return SourceSpec(**bare, groups=groups, state_bytes=state_bytes)
