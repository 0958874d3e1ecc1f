"""Loaders that a mixture needs: how many, and which sources each of them holds.

By Little's law, rate × time per read are in flight: what a loader's threads, its core under
Python's lock and its memory allow for decides. A source that needs more than one loader gets
several.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from chopper.workloads.planning import Floats
from chopper.workloads.sources import Ints, SourceSpec

CPU_S = 100e-6
"""Decoding one document, about: for the first guess at the number of loaders."""


@dataclass(slots=True, kw_only=True)
class Load:
    """Load of serving each source, per sample; from its metadata at first, then as observed."""

    share: Floats
    """Share of all samples drawn."""
    wait_s: Floats
    cpu_s: Floats
    """Time of one core, under Python's lock."""
    state_bytes: int

    @classmethod
    def of(cls, sources: Sequence[SourceSpec]) -> Load:
        """By the metadata of sources."""
        weights = np.array([source.weight for source in sources])
        return cls(
            share=weights / weights.sum(),
            wait_s=np.array([source.latency_s for source in sources]),
            cpu_s=np.full(len(sources), CPU_S),
            state_bytes=sum(source.state_bytes for source in sources),
        )

    def busy(self) -> Floats:
        """Share of a thread's time that each source takes, at a sample per second."""
        return self.share * (self.wait_s + self.cpu_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one loader, and of how many there may be."""

    threads: int
    memory_bytes: int
    """State that one loader may hold."""
    most: int
    least: int = 1
    """Loaders that stay, however little they have to do."""
    target: float = 0.75
    """Share of its threads, and of its core, that a loader should be busy at most."""


def copies_needed(load: Load, samples_per_s: float, limits: Limits, loaders: int) -> Ints:
    """Count the loaders that each source needs, of ``loaders`` in all."""
    threads = samples_per_s * load.busy() / (limits.threads * limits.target)
    cores = samples_per_s * load.share * load.cpu_s / limits.target
    copies = np.ceil(np.maximum(threads, cores) - 1e-9).astype(np.int64).clip(1, loaders)
    while copies.sum() < loaders:  # no loader is without a source
        copies[np.argmax(load.busy() / copies)] += 1
    return copies


def loaders_needed(load: Load, samples_per_s: float, limits: Limits) -> int:
    """Count the loaders that serve ``samples_per_s``: by Little's law, by core and by memory."""
    wanted = max(
        samples_per_s * float(load.busy().sum()) / (limits.threads * limits.target),
        samples_per_s * float((load.share * load.cpu_s).sum()) / limits.target,
        load.state_bytes / limits.memory_bytes,
    )
    return max(1, min(max(math.ceil(wanted - 1e-9), limits.least), limits.most))


def place(
    busy: Floats, copies: Ints, loaders: int, before: Sequence[Sequence[int]] = ()
) -> list[list[int]]:
    """Sources of each loader, so that all are as busy; no loader is without one.

    A source is on as many loaders as it has ``copies``, on none twice. Of those where they were
    ``before``, only what makes a loader busier than the others moves, for it is opened again.
    """
    # A little for holding the state: sources that are not drawn are spread as well.
    each = (busy + (busy.sum() or 1.0) * 1e-6) / copies
    fair = float((each * copies).sum()) / loaders
    placed = [sorted(here, key=lambda s: each[s]) for here in before[:loaders]]
    placed += [[] for _ in range(loaders - len(placed))]
    for here in placed:
        while len(here) > 1 and each[here].sum() > 1.1 * fair:
            here.pop(0)
    held = Counter(s for here in placed for s in here)
    for s, count in held.items():
        for here in sorted((h for h in placed if s in h), key=len)[::-1][: count - int(copies[s])]:
            here.remove(s)
    # Each loader that is without one gets one, and those that are left stay where there are most.
    while sum(map(len, placed)) > copies.sum() - sum(not here for here in placed):
        max(placed, key=len).pop(0)
    held = Counter(s for here in placed for s in here)
    load = [float(each[here].sum()) for here in placed]
    for source in np.argsort(-each, kind="stable").tolist():
        for _ in range(int(copies[source]) - held[source]):
            free = [i for i in range(loaders) if source not in placed[i]]
            least = min(free, key=lambda i: (bool(placed[i]), load[i]))
            placed[least].append(source)
            load[least] += float(each[source])
    return [sorted(here) for here in placed]


@dataclass
class Autoscaler:
    """Follows what serving the sources took, and says when to change the number of loaders."""

    load: Load
    limits: Limits
    memory: float = 0.8
    patience: int = 30
    """So many observations in a row must agree before loaders are taken away: giving one too many
    costs memory, one too few costs throughput."""
    samples_per_s: float = 0.0
    _surplus: int = field(default=0, init=False)

    def observe(self, elapsed_s: float, counts: Ints, wait_s: Floats, cpu_s: Floats) -> None:
        """Take in a period: samples and seconds by source."""
        load, new = self.load, 1 - self.memory
        rate = float(counts.sum()) / elapsed_s
        past = self.samples_per_s or rate
        self.samples_per_s = self.memory * past + new * rate
        read, each = counts > 0, np.maximum(counts, 1)
        load.wait_s = np.where(read, self.memory * load.wait_s + new * wait_s / each, load.wait_s)
        load.cpu_s = np.where(read, self.memory * load.cpu_s + new * cpu_s / each, load.cpu_s)

    def decide(self, current: int, *, starving: bool) -> int:
        """Count the loaders that there should be, now that there are ``current``.

        More help only where it is ``starving``; else trainers are slow, however busy loaders are.
        """
        needed = loaders_needed(self.load, self.samples_per_s, self.limits)
        if needed >= current:
            self._surplus = 0
            return needed if starving else current
        self._surplus += 1
        return needed if self._surplus >= self.patience else current
