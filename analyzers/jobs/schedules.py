"""Pipeline schedules: the order in which each pipeline rank runs its actions, and their bubbles.

Symbols as in the papers: ``p`` pipeline ranks, ``m`` micro-batches per step, ``v`` virtual stages
(model chunks) per rank. Stage ``s`` of the model runs on rank ``s % p`` (except DualPipe's second
direction). Pure functions: no times, no communication.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from chopper.errors import UsageError

FORWARD, BACKWARD = "forward", "backward"
BACKWARD_INPUT, BACKWARD_WEIGHT = "backward_input", "backward_weight"
COMPUTE = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
"""Actions on a micro-batch; a full backward is its input part, then its weight part."""
PASSING = (FORWARD, BACKWARD, BACKWARD_INPUT)
"""Actions whose result the next stage waits for."""


class Action(NamedTuple):
    """One action of a schedule: what is computed, by which stage, for which micro-batch."""

    kind: str
    stage: int
    micro_batch: int


Order = list[list[Action]]
"""Actions of each pipeline rank, in the order in which it runs them."""


def gpipe(p: int, m: int, v: int = 1) -> Order:
    """All forwards, then all backwards (Huang et al., 1811.06965).

    With several stages per rank this is breadth-first (Lamy-Poirier, 2211.05953): a stage runs all
    micro-batches before the rank's next stage begins.
    """
    orders = []
    for rank in range(p):
        stages = range(rank, p * v, p)
        # torch's GPipe runs backwards in order, its breadth-first schedule in reverse order.
        batches = range(m) if v == 1 else range(m - 1, -1, -1)
        forwards = [Action(FORWARD, s, i) for s in stages for i in range(m)]
        orders.append(forwards + [Action(BACKWARD, s, i) for s in stages[::-1] for i in batches])
    return orders


def one_f_one_b(p: int, m: int, v: int = 1) -> Order:
    """Warm up with p - 1 - rank forwards, then one forward and one backward (1806.03377).

    Raises:
        UsageError: several stages per rank; that is :func:`interleaved`.
    """
    if v > 1:
        raise UsageError("1f1b has one stage per rank; use --schedule interleaved")
    return [_alternate(p, m, 1, rank, min(p - 1 - rank, m), m) for rank in range(p)]


def interleaved(p: int, m: int, v: int = 2) -> Order:
    """Interleaved 1F1B: rounds of p micro-batches through the v stages of a rank (2104.04473).

    Raises:
        UsageError: m is not a multiple of the number of rounds, max(1, m // p).
    """
    per_round = _per_round("interleaved", p, m)
    return [
        _alternate(p, m, v, rank, min((v - 1) * per_round + 2 * (p - 1 - rank), m * v), per_round)
        for rank in range(p)
    ]


def zb1p(p: int, m: int, v: int = 1) -> Order:
    """Zero-bubble ZB-H1/ZB1P: weight gradients fill the bubble (Qi et al., 2401.10241).

    Rank r defers r weight parts; memory stays that of 1F1B.

    Raises:
        UsageError: m is not a multiple of the number of rounds, max(1, m // p).
    """
    per_round = _per_round("zb1p", p, m)
    orders = []
    for rank in range(p):
        warm_up = min((v - 1) * per_round + p - 1 - rank, m * v)
        forwards, backwards = _stages(p, m, v, rank, per_round)
        order = [Action(FORWARD, *next(forwards)) for _ in range(warm_up)]
        deferred: deque[tuple[int, int]] = deque()
        for turn, backward in enumerate(backwards):
            order += [Action(FORWARD, *forward) for forward in [next(forwards, None)] if forward]
            order.append(Action(BACKWARD_INPUT, *backward))
            deferred.append(backward)
            if turn >= rank:
                order.append(Action(BACKWARD_WEIGHT, *deferred.popleft()))
        orders.append(order + [Action(BACKWARD_WEIGHT, *part) for part in deferred])
    return orders


def dualpipe(p: int, m: int, v: int = 1) -> Order:
    """Bidirectional DualPipe (DeepSeek-V3, 2412.19437; order of its published code).

    Rank r holds stages r and p - 1 - r. Micro-batches below m / 2 enter at rank 0, the others at
    rank p - 1. A forward that overlaps a backward is listed before it.

    Raises:
        UsageError: p is odd, m is odd or below 2 p, or v is not 1.
    """
    if v != 1 or p % 2 or m % 2 or m < 2 * p:
        raise UsageError(
            f"dualpipe needs an even number of stages, an even number of micro-batches of at least "
            f"twice as many, and no virtual stages; found {p} stages, {m} micro-batches, {v} "
            "stage(s) per rank"
        )
    return [_dual(p, m, rank) for rank in range(p)]


SCHEDULES: Mapping[str, Callable[[int, int, int], Order]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved": interleaved,
    "zb1p": zb1p,
    "dualpipe": dualpipe,
}
"""Schedules by name. Of two with the same order (one micro-batch, one rank) the first is meant."""


def recognize(orders: Sequence[Sequence[tuple[str, int]]], v: int) -> str | None:
    """Return the name of the schedule that ran; None if it is none of :data:`SCHEDULES`.

    Args:
        orders: of each pipeline rank, the (action, stage) pairs in the order in which they ran.
        v: stages per rank.
    """
    forwards = sum(kind == FORWARD for order in orders for kind, _ in order)
    p, m = len(orders), forwards // max(len(orders) * v, 1)
    ran = [_merged(order) for order in orders]
    for name, schedule in SCHEDULES.items():
        # DualPipe's two stages per rank are its two directions, each with half of the batches.
        shape = (p, 2 * m, 1) if name == "dualpipe" else (p, m, v)
        try:
            expected = schedule(*shape)
        except UsageError:
            continue
        if [_merged([(a.kind, a.stage) for a in order]) for order in expected] == ran:
            return name
    return None


def _merged(order: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Join the two parts of a backward that run one after the other, as torch does.

    The first stage has no input to take gradients of: its weight part is its backward.
    """
    merged: list[tuple[str, int]] = []
    for kind, stage in order:
        if kind == BACKWARD_WEIGHT and merged[-1:] == [(BACKWARD_INPUT, stage)]:
            merged[-1] = (BACKWARD, stage)
        elif stage == 0 and kind == BACKWARD_WEIGHT:
            merged.append((BACKWARD, stage))
        elif stage > 0 or kind != BACKWARD_INPUT:
            merged.append((kind, stage))
    return merged


def bubble_bound_ns(
    schedule: str,
    p: int,
    v: int,
    *,
    forward_ns: float,
    backward_ns: float,
    weight_ns: float | None = None,
) -> float | None:
    """Idle time per rank and step that a schedule implies, with equal stages and free transfers.

    GPipe and 1F1B (p - 1)(F + B); interleaved (p - 1)(F + B) / v; ZB1P (p - 1)(F + B - 2W);
    DualPipe (p / 2 - 1)(F&B + B - 3W) (table 2 of DeepSeek-V3), with F&B = F + B, no overlap.

    Args:
        schedule: a name of :data:`SCHEDULES`.
        p, v: pipeline ranks, virtual stages per rank.
        forward_ns, backward_ns: one micro-batch through all stages of a rank.
        weight_ns: weight part of that backward.

    Returns:
        Nanoseconds, at least 0; None if the weight part is needed and unknown.
    """
    both_ns = forward_ns + backward_ns
    if schedule in ("gpipe", "1f1b", "interleaved"):
        return (p - 1) * both_ns / v
    if weight_ns is None:
        return None
    if schedule == "zb1p":
        bound_ns = (p - 1) * (both_ns - 2 * weight_ns) / v
    else:
        bound_ns = (p / 2 - 1) * (both_ns + backward_ns - 3 * weight_ns)
    return max(bound_ns, 0.0)


def _per_round(name: str, p: int, m: int) -> int:
    """Micro-batches of one round (torch's rule, which relaxes Megatron's m % p == 0)."""
    rounds = max(1, m // p)
    if m % rounds:
        raise UsageError(
            f"{name}: {m} micro-batches cannot be split into {rounds} equal rounds of {p} stages; "
            f"use a multiple of {p}"
        )
    return m // rounds


def _stages(
    p: int, m: int, v: int, rank: int, per_round: int
) -> tuple[Iterator[tuple[int, int]], Iterator[tuple[int, int]]]:
    """Return (stage, micro-batch) of the forwards and of the backwards of a rank, in order."""

    def turns(*, backward: bool) -> Iterator[tuple[int, int]]:
        count = [0] * v
        for turn in range(m * v):
            chunk = turn // per_round % v
            if backward:
                chunk = v - 1 - chunk
            yield chunk * p + rank, count[chunk]
            count[chunk] += 1

    return turns(backward=False), turns(backward=True)


def _alternate(p: int, m: int, v: int, rank: int, warm_up: int, per_round: int) -> list[Action]:
    """Return ``warm_up`` forwards, then a forward before each backward while there are any."""
    forwards, backwards = _stages(p, m, v, rank, per_round)
    order = [Action(FORWARD, *next(forwards)) for _ in range(warm_up)]
    for backward in backwards:
        order += [Action(FORWARD, *forward) for forward in [next(forwards, None)] if forward]
        order.append(Action(BACKWARD, *backward))
    return order


def _dual(p: int, m: int, rank: int) -> list[Action]:
    """Return DualPipe's order of one rank; the eight steps are those of its published code."""
    half, near = p // 2, min(rank, p - 1 - rank)
    is_second_half = rank >= half
    count = {FORWARD: [0, 0], BACKWARD: [0, 0]}
    weights: deque[Action] = deque()
    order: list[Action] = []

    def take(kind: str, phase: int) -> tuple[int, int]:
        direction = phase ^ is_second_half
        number = count[kind][direction]
        count[kind][direction] += 1
        return (p - 1 - rank if direction else rank), number + direction * (m // 2)

    def forward(phase: int) -> None:
        order.append(Action(FORWARD, *take(FORWARD, phase)))

    def backward(phase: int, *, split: bool = False) -> None:
        batch = take(BACKWARD, phase)
        order.append(Action(BACKWARD_INPUT if split else BACKWARD, *batch))
        if split:
            weights.append(Action(BACKWARD_WEIGHT, *batch))

    for _ in range(2 * (half - near - 1)):
        forward(0)
    for _ in range(near + 1):
        forward(0)
        forward(1)
    for _ in range(half - near - 1):
        backward(1, split=True)
        order.append(weights.popleft())
        forward(1)
    for _ in range(m // 2 - p + near + 1):
        forward(0)
        backward(1)
        forward(1)
        backward(0)
    for _ in range(half - near - 1):
        backward(1)
        forward(1)
        backward(0)
    split = False
    for turn in range(near + 1):
        split = split or (turn == (near + 1) // 2 and near % 2 == 1)
        backward(1, split=split)
        split = split or (turn == (near + 1) // 2 and near % 2 == 0)
        backward(0, split=split)
    for _ in range(half - near - 1):
        order.append(weights.popleft())
        backward(0, split=True)
    return [*order, *weights]
