"""Waiting for the slowest rank: due to ranks that are always late, and due to chance.

At one place of a step (say the third all-reduce of a group) every rank waits for the last one:
w(r, s) = max over ranks of l − l(r, s), where l is the lateness in step s. The mean of w over the
ranks, minus w(r, s), is how much later than the mean r came. Its mean over steps is the rank's own
delay, the rest is chance:

    l(r, s) = p(r) + e(r, s),   p̂(r) = mean over s,   σ² = Σ (l − p̂)² ÷ ((n − 1)(S − 1))

The error v of p̂ is estimated from means of contiguous stretches of steps, so that a hiccup of a few
steps does not look like a slow rank. p̂ is shrunk toward zero by τ² ÷ (τ² + v), τ² = Σ p̂² ÷ (n − 1)
− v, the positive-part estimate of James and Stein (C. Morris, *Parametric Empirical Bayes
Inference*, JASA 78, 1983), and at least as much as for all places of the step together, since among
many places some differ by chance.

On N ranks, the recorded ranks keep their delays, and all others are like the median one (of two,
the faster). The last of N comes E[max] later than the mean of the recorded ones, with e normal:
E[max] = b − ∫ Π Φ((x − p(r)) ÷ σ) dx up to b.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.events.collectives import WAIT, details_of, members_of
from chopper.analyzers.events.groups import time_in
from chopper.analyzers.trace.columns import distinct_rows, ints, strings

_STEPS = 4
"""Fewest steps that tell lateness that is always there from chance."""
_STRETCHES = 10
_PLACES = 64
"""Places with the most waiting, that are looked at one by one."""
_CHANCE_RATIO = (0.5, 2.0)
"""The last one's lateness by chance over that of normal draws is believed within these: where
hiccups are rare, it is small on few ranks and not on many."""
_GRID = np.linspace(-8.0, 8.0, 1601)


class Members(msgspec.Struct, kw_only=True, frozen=True):
    """A group of ranks in runs of any size."""

    group_count: int | None = None
    """Ranks of the group, where these are fewer than the run's."""
    adjacent: bool = False
    """A smaller group of ranks that follow each other (tensor parallelism, shards of a node): it
    stays as large; one of ranks further apart grows with the run."""

    def apart(self, recorded_count: int) -> int:
        """Groups like this one, side by side in the recorded run."""
        return max(1, recorded_count // self.group_count) if self.group_count else 1

    def members_count(self, ranks_count: int, recorded_count: int) -> int:
        """Ranks of the group in a run of so many."""
        if self.group_count is not None and self.adjacent:
            return self.group_count
        return ranks_count // self.apart(recorded_count)


class Place(Members, kw_only=True, frozen=True):
    """One place of a step at which the ranks of a group wait for each other."""

    waited_ns: float
    """Of a rank of the group, mean over steps; beyond all overlap."""
    late_ns: tuple[float, ...]
    """Mean lateness of each rank of the recorded group, against their mean."""
    chance_ns: float
    """Standard deviation of a rank's lateness from step to step."""
    share_ratio: float = 1.0
    """Ranks of the group, of those of the run; less where the place is not in every step."""
    told: bool = True
    """False: there were too few steps to tell steady lateness from chance."""

    def waits_ns(self, members_count: int) -> tuple[float, float]:
        """(by the ranks that are always late, by chance), beyond the mean of the recorded ranks."""
        grown = largest_ns(self.late_ns, self.chance_ns, members_count)
        grown -= largest_ns(self.late_ns, self.chance_ns, len(self.late_ns))
        always = max(self.late_ns)
        return always, max(self.waited_ns + grown - always, 0.0)

    def quicker_ns(self, members_count: int) -> float:
        """Return the time by which the mean of so many ranks is ahead of the recorded mean."""
        late, count = sorted(self.late_ns), len(self.late_ns)
        if members_count >= count:
            return -late[(count - 1) // 2] * (members_count - count) / members_count
        # The slowest stays, with so many of the others.
        return -late[-1] * (count - members_count) / (members_count * (count - 1))


@functools.lru_cache(maxsize=1)
def _logarithms() -> tuple[np.ndarray, np.ndarray]:
    """Points, and the logarithm of the normal distribution up to them."""
    x = np.linspace(-12.0, 12.0, 4801)
    return x, np.array([math.log(0.5 * math.erfc(-v / math.sqrt(2))) for v in x.tolist()])


def _log_normal(x: np.ndarray) -> np.ndarray:
    return np.interp(x, *_logarithms())


@functools.lru_cache(maxsize=4096)
def largest_ns(late_ns: tuple[float, ...], chance_ns: float, count: int) -> float:
    """Expected lateness of the last of so many ranks, the slowest of the recorded among them.

    Args:
        late_ns: how late each of the recorded ranks is, always.
        chance_ns: standard deviation of all of them, independent and normal.
        count: beyond the recorded ones, ranks are like the middle one.
    """
    late = np.sort(np.array(late_ns))
    if chance_ns <= 0 or count < 1:
        return float(late[-1])
    x = late[-1] + chance_ns * _GRID
    each = _log_normal((x[:, None] - late) / chance_ns)
    others = each[:, :-1].sum(axis=1)
    if count < len(late):
        others *= (count - 1) / (len(late) - 1)
    more = max(count - len(late), 0)
    below = np.exp(each[:, -1] + others + more * each[:, (len(late) - 1) // 2])
    step = chance_ns * (_GRID[1] - _GRID[0])
    return float(x[-1] - (below.sum() - (below[0] + below[-1]) / 2) * step)


def expected_maximum(count: int) -> float:
    """Expected largest of so many independent standard normal draws: 0.564 of 2, 3.241 of 1000.

    H. A. David and H. N. Nagaraja, *Order Statistics*, 3rd ed., § 3.1.
    """
    return largest_ns((0.0,), 1.0, count)


def place_of(waited_ns: np.ndarray, *, kept_max: float = 1.0, **of: Any) -> Place:
    """One place of a step, from how long each rank waited there: (steps, ranks) of the group.

    Args:
        kept_max: of what ranks differ by in the mean, what is believed at most.
    """
    steps, ranks = waited_ns.shape
    mean = float(waited_ns.mean())
    if not _tells(waited_ns):
        chance = mean / expected_maximum(ranks) if ranks > 1 else 0.0
        none = (0.0,) * max(ranks, 1)
        return Place(waited_ns=mean, late_ns=none, chance_ns=chance, told=False, **of)
    late = waited_ns.mean(axis=1, keepdims=True) - waited_ns
    always = late.mean(axis=0)
    chance = math.sqrt(float(((late - always) ** 2).sum()) / ((ranks - 1) * (steps - 1)))
    chances = (late - always).max(axis=1).mean() * math.sqrt(steps / (steps - 1))
    ratio = 1.0
    if chance > 0:
        ratio = float(np.clip(chances / chance / expected_maximum(ranks), *_CHANCE_RATIO))
    own = tuple((always * min(kept_ratio([waited_ns]), kept_max)).tolist())
    return Place(waited_ns=mean, late_ns=own, chance_ns=chance * ratio, **of)


def _tells(waited_ns: np.ndarray) -> bool:
    steps, ranks = waited_ns.shape
    return bool(ranks > 1 and steps >= _STEPS)


def kept_ratio(places_ns: list[np.ndarray]) -> float:
    """Return τ² ÷ (τ² + v) of places together: the share of mean differences that is no chance."""
    seen = error = 0.0
    for waited in places_ns:
        late = waited.mean(axis=1, keepdims=True) - waited
        stretches = np.array_split(late, min(len(late), _STRETCHES))
        means = np.stack([s.mean(axis=0) for s in stretches])
        away = means - means.mean(axis=0)
        seen += float((late.mean(axis=0) ** 2).sum())
        error += float((away**2).sum()) / (len(means) - 1) / len(means)
    return max(1 - error / seen, 0.0) if seen else 0.0


def places(attribution: Attributed) -> tuple[Place, ...]:
    """The places of a step at which ranks waited, most waiting first; the rest is left out."""
    found = members_of(attribution)
    if not len(found):
        return ()
    row = ints(found.table, "event_row")
    waited = time_in(attribution.pieces, found.rank, row, WAIT)
    last = found.straggler
    step = ints(details_of(attribution, found.rank[last], row[last]), "step")
    place, count = _numbered(
        found.table.take(pa.array(found.first)), step, found.ready_ns[found.first]
    )
    size = np.diff(np.append(found.first, len(found.of)))
    total = np.bincount(place[place >= 0], found.total(waited)[place >= 0], minlength=count)
    ranks = len(attribution.ranks)
    steps = max(rank.steps for rank in attribution.ranks)
    listed, names = strings(found.table, "ranks")
    found_ns: list[np.ndarray] = []
    of: list[dict[str, Any]] = []
    for number in np.argsort(-total, kind="stable")[:_PLACES]:
        mine = np.flatnonzero(place == number)
        if total[number] <= 0:
            break
        at = found.first[mine]
        width = int(size[mine[0]])
        within = width < ranks
        name = names[listed[at[0]]] if listed[at[0]] >= 0 else ","
        found_ns.append(waited[at[:, None] + np.arange(width)].astype(np.float64))
        of.append(
            {
                "share_ratio": width / ranks * min(len(mine) / max(steps, 1), 1.0),
                "group_count": width if within else None,
                "adjacent": within and "," not in name,
            }
        )
    kept = kept_ratio([waits for waits in found_ns if _tells(waits)])
    return tuple(
        place_of(waits, kept_max=kept, **place) for waits, place in zip(found_ns, of, strict=True)
    )


def _numbered(table: pa.Table, step: np.ndarray, ready_ns: np.ndarray) -> tuple[np.ndarray, int]:
    """Place of each collective, -1 outside of steps: the n-th of its kind and group in its step."""
    keys = [strings(table, name)[0] for name in ("ranks", "group", "collective")]
    kind = distinct_rows([*keys, ints(table, "rank_count"), ints(table, "message_bytes")])[1]
    order = np.lexsort((ready_ns, step, kind))
    new = np.ones(len(order), dtype=bool)
    new[1:] = (kind[order][1:] != kind[order][:-1]) | (step[order][1:] != step[order][:-1])
    head = np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))
    nth = np.empty(len(order), dtype=np.int64)
    nth[order] = np.arange(len(order)) - head
    first, place = distinct_rows([kind, nth])
    # A trace without steps is one.
    inside = (step >= 0) | (step < 0).all()
    return np.where(inside, place, -1), len(first)
