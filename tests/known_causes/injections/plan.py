"""Plan of injections by step: read by the ranks and by who scores them."""

from __future__ import annotations

import random

import msgspec

BASELINE = -1
"""Level of a step into which nothing is injected."""
ARRIVAL = "arrival"
"""Measurement: when a rank came to the collective, in a clock that the ranks share."""
MEETING = "meeting"
"""Measurement: when a rank came to the barrier before it, in the same clock."""
VOCABULARY = 512
WARM_UP_STEPS = 3
"""Run before the first recorded step: lazy set-up, first allocations, the loader's start."""


class Plan(msgspec.Struct, kw_only=True, frozen=True):
    """One recording: pairs of steps, one with the injection and one without, in random order.

    Both are neighbours, so drift of the machine and what else runs on it weigh on both alike.
    """

    injection: str
    """Key into ``program.INJECTORS``."""
    amounts: tuple[float, ...]
    """Amount of each level: seconds, repetitions, or bits per second."""
    pairs_count: int
    seed: int = 0
    scale: int = 1
    """Length of the sequences, in those of the injector."""

    def levels(self) -> list[int]:
        """Level of each step from 0, warm-up included; BASELINE for none."""
        order = random.Random(self.seed)
        by_step = [BASELINE] * WARM_UP_STEPS
        for _ in range(self.pairs_count):
            levels = list(range(len(self.amounts)))
            order.shuffle(levels)
            for level in levels:
                pair = [BASELINE, level]
                order.shuffle(pair)
                by_step += pair
        return by_step

    def pairs(self) -> list[tuple[int, int, int]]:
        """(level, step with the injection, step without) in time order."""
        levels = self.levels()
        pairs = []
        for step in range(WARM_UP_STEPS, len(levels), 2):
            first, second = levels[step], levels[step + 1]
            pairs.append((second, step + 1, step) if first == BASELINE else (first, step, step + 1))
        return pairs


class Truth(msgspec.Struct, kw_only=True):
    """Times per step, from step 0, that one rank's injector measured with its own clock."""

    injected_ns: dict[str, list[int]] = {}
    skipped: str | None = None


class Job(msgspec.Struct, kw_only=True, frozen=True):
    """All recordings of one pair of processes."""

    directory: str
    """Each plan is recorded to ``<directory>/<injection>``, its truth to
    ``<directory>/<injection>.truth-<rank>.json``."""
    plans: tuple[Plan, ...]
    linked: bool = False
    """The ranks live in network namespaces of their own, joined by a link."""
