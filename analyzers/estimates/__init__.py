"""Estimates: what a model, a network or a price list would give, from formulas with a source.

Pure functions from numbers to numbers; no run is needed unless a function asks for one. Each
result is a frozen struct with its schema, so that its JSON form is its fields. Numbers that make no
sense raise a UsageError which names them.
"""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any, ClassVar

import msgspec

from chopper.notebook import as_cell

_ASSUMPTIONS = tomllib.loads(
    files("chopper").joinpath("data", "assumptions.toml").read_text(encoding="utf-8")
)


def assumed(*names: str) -> tuple[str, ...]:
    """Return the texts of ``chopper/data/assumptions.toml`` under these names."""
    return tuple(text for name in names for text in _ASSUMPTIONS[name])


class Estimate(msgspec.Struct, kw_only=True, frozen=True):
    """The part that all estimates share: the schema and the assumptions."""

    SCHEMA: ClassVar[str] = "chopper.estimate/0"

    assumptions: tuple[str, ...]
    """Conditions under which the numbers hold."""

    def to_dict(self) -> dict[str, Any]:
        """The documented JSON form: the schema, then the fields."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return {"schema": self.SCHEMA, **fields}

    def _repr_html_(self) -> str:
        name = self.SCHEMA.removeprefix("chopper.estimate.").partition("/")[0]
        return as_cell(self, f"chopper.cli.estimates.{name}:page")


class Option(msgspec.Struct, frozen=True):
    """The command-line option of a field, as its annotation; the field's name tells the unit."""

    help: str
    name: str = ""
    """Without it: the field's name less its unit."""
    metavar: str | None = None
    argument: bool = False
    """Given by its position instead of by a name."""


class OptionsOf(msgspec.Struct, frozen=True):
    """Annotates a dictionary that receives the options of another struct, those that were given."""

    struct: type[msgspec.Struct]
