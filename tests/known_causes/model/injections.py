"""Injections into the model: one cause at a time in three magnitudes, and five together.

Beside the plain ones stand those that are easily booked wrongly: hidden behind a queue, across the
end of a step, inside one another, two at one gap, late because of another rank. What they are
stands in ``injections.json``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tests.known_causes.model.plan import Clock, Dose, Plan
from tests.known_causes.results import MAGNITUDES

_MS = 1e6


class _Clock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The clock is low between times, which lie anywhere in kernels; without any, always."""

    ratios: tuple[float, float, float]
    reason: int
    low_ms: tuple[tuple[float, float], ...] = ()

    def clocks(self, at: int) -> tuple[Clock, ...]:
        ratio = self.ratios[at]
        return tuple(
            Clock(ratio, self.reason, round(begin * _MS), round(end * _MS))
            for begin, end in self.low_ms
        ) or (Clock(ratio, self.reason),)


class Injection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of trouble, or several at once; each amount for small, medium and large."""

    cause: str = ""
    about: str = ""
    ms: dict[str, tuple[float, float, float]] = {}
    """Doses of time by knob of the plan."""
    doses: dict[str, tuple[float, float, float]] = {}
    ranks: tuple[int, ...] | None = None
    """That get the doses; null: all."""
    knobs: dict[str, tuple[Any, Any, Any]] = {}
    clock: _Clock | None = None
    base: dict[str, Any] = {}
    """Knobs that are turned with and without the injection."""
    scale_ms: tuple[float, float, float] | None = None
    """Of errors, where the truth is that it costs nothing."""
    factor: str | None = None
    """The factor that an honest attribution may say it did not measure; null: none."""
    parts: tuple[Injection, ...] = ()

    def turns(self, magnitude: str) -> dict[str, Any]:
        """Knobs of the plan to turn."""
        at = MAGNITUDES.index(magnitude)
        turned: dict[str, Any] = {k: values[at] for k, values in self.knobs.items()}
        for doses, unit in ((self.ms, _MS), (self.doses, 1.0)):
            turned |= {k: Dose(v[at] * unit, ranks=self.ranks) for k, v in doses.items()}
        if self.clock is not None:
            turned["clocks"] = self.clock.clocks(at)
        for part in self.parts:
            turned |= part.turns(magnitude)
        return turned

    def scale_ns(self, magnitude: str) -> int | None:
        """Unit of errors, where it is not what was injected."""
        scale = self.scale_ms
        return None if scale is None else round(scale[MAGNITUDES.index(magnitude)] * _MS)

    def plans(self, magnitude: str, *, flavour: str, seed: int) -> tuple[Plan, Plan]:
        """The job without and with it."""
        base = dict(self.base)
        for part in self.parts:
            base |= part.base
        without = Plan(flavour=flavour, seed=seed, **base)
        return without, replace(without, **self.turns(magnitude))


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    alone: dict[str, Injection]
    mixed: dict[str, tuple[str, ...]]


_TABLE = msgspec.json.decode(Path(__file__).with_suffix(".json").read_bytes(), type=_Table)
INJECTIONS = _TABLE.alone
MIXES = {
    name: Injection(parts=tuple(INJECTIONS[part] for part in parts))
    for name, parts in _TABLE.mixed.items()
}
