"""Give the loop in C plans of all kinds, sound and unsound, and a driver that answers anything.

    python tests/collectors/fuzz_fast.py [--count 300] [--seed 0] [--sanitize]

With ``--sanitize`` it is first built with the address and undefined-behaviour sanitizers; any
report of theirs, and any leak that the extension is part of, is a failure.
"""

from __future__ import annotations

import ctypes
import random
import select
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.sanitizing import run_fuzzer
from tests.waiting import PATIENCE_S

_CODES = (*(0,) * 16, 3, 10, 10, 15, 999, -1)
_BYTES = 256
_REFUSED = (ValueError, TypeError, OverflowError, SystemError, MemoryError)


def fuzz(count: int, seed: int) -> None:
    """Make loops, and let those that can be made run for some ticks."""
    from chopper.collectors._fast import Loop

    driver = Driver()
    for make in (Loop.__new__, lambda kind: kind.__new__(kind, 1, 2, 3)):
        try:
            make(Loop)
        except TypeError:
            continue
        raise AssertionError("a loop without a plan")
    made = rows = refused = 0
    for i in range(count):
        rng = random.Random(seed + i)
        driver.rng = rng
        try:
            loop = Loop(*plan(rng, driver))
        except _REFUSED:
            refused += 1
            continue
        made += 1
        rows += run(rng, loop)
    print(f"{count} rounds, {made} loops made, {refused} refused, {rows} rows")
    assert made
    assert refused
    assert rows


class Driver:
    """Functions that write anything where they are told to, and return any code."""

    def __init__(self) -> None:
        self.rng = random.Random(0)
        two = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        three = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p)
        one = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
        self._kept = (
            two(lambda size, out: self.fill(size, out)),
            three(lambda size, _argument, out: self.fill(size, out)),
            two(lambda _handle, _snapshot: self.rng.choice(_CODES)),
            one(lambda _request: self.rng.choice(_CODES)),
        )
        self.plain, self.argued, self.snapshot, self.compute = (
            ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self._kept
        )

    def fill(self, size: int | None, out: int | None) -> int:
        """The handle is the size of the buffer."""
        if size and out:
            content = self.rng.choice((b"\xff", b"\0", None))
            ctypes.memmove(out, content * size if content else self.rng.randbytes(size), size)
        return self.rng.choice(_CODES)


def plan(rng: random.Random, driver: Driver) -> tuple[Any, ...]:
    """Arguments of a loop: mostly sound ones, and now and then something that is not."""
    columns = rng.randint(0, 6)
    devices = tuple(device(rng, driver, columns) for _ in range(rng.choice((0, 1, 2, 3, 3))))
    outcomes = ((3, 1), (15, 2)) if rng.random() < 0.95 else rng.choice((((3,),), (3, 1), None))
    return (
        odd(rng, rng.choice((200_000, 1_000_000))),
        odd(rng, rng.choice((1, 2, 64))),
        odd(rng, columns),
        outcomes,
        rng.random() < 0.5,
        devices if rng.random() < 0.98 else (None,),
    )


def odd(rng: random.Random, sound: int) -> Any:
    """A number, or now and then one that is not sound."""
    if rng.random() < 0.997:
        return sound
    return rng.choice((-1, 0, 3, 33, 1 << 40, 1 << 62, 1 << 70, None, 1.5))


def device(rng: random.Random, driver: Driver, columns: int) -> Any:
    calls = tuple(call(rng, driver) for _ in range(rng.choice((0, 1, 1, 2, 3))))
    made = tuple(column(rng, len(calls)) for _ in range(columns))
    return (odd(rng, 7), odd(rng, rng.choice((-1, 0, 5))), calls, made)


def call(rng: random.Random, driver: Driver) -> Any:
    size = rng.choice((0, 40, *(_BYTES,) * 20))
    content = rng.randbytes(size)
    kind = rng.random()
    every = rng.choice((1, 1, 1, 2, 10))
    turns = (odd(rng, every), odd(rng, rng.randrange(every)))
    if kind < 0.2:
        interval = (driver.compute, 1, 2, odd(rng, 0), odd(rng, 8))
        return (driver.snapshot, 1, None, content, interval, *turns)
    if kind < 0.6:
        return (driver.plain, size, None, content, None, *turns)
    if kind < 0.98:
        return (driver.argued, size, rng.randint(0, 1 << 31), content, None, *turns)
    odd_ones = ((0, 0, None, content, None, 1, 0), (driver.plain, 1, None, "", 5, 1, 0))
    return rng.choice((*odd_ones, (1, 2), None))


def column(rng: random.Random, calls: int) -> Any:
    if rng.random() < 0.1 or not calls:
        return None
    kind = odd(rng, rng.randint(0, 5))
    width = rng.choice((1, 2, 4, 8))
    places = tuple(
        (
            odd(rng, rng.choice((0, 8, 16, 40))),
            odd(rng, width),
            rng.choice((0, 1, 2, 1 << 40, -1, odd(rng, 1))),
        )
        for _ in range(rng.choice((1, 1, 1, 2, 2, 5, 5, 64)) + (rng.random() < 0.005))
    )
    factor = 1.0 if kind == 5 else rng.choice((1, 1000, 0.5, 1e300, float("nan"), (1 << 62)))
    if rng.random() < 0.01:
        wrong: Any = (None, (), (1, 2), ((1, 2),))
        places = rng.choice(wrong)
    most = odd(rng, rng.choice((0, 100)))
    return (
        kind,
        odd(rng, rng.randrange(calls)),
        places,
        factor,
        rng.random() < 0.3,
        rng.random() < 0.3,
        most,
    )


def run(rng: random.Random, loop: Any) -> int:
    """Let it run until it ticked twice or has nothing left to read; how many rows came of it."""
    rows = 0
    if rng.random() < 0.05:
        return rows  # never started
    if rng.random() < 0.05:
        try:
            # Not 0: that is now, on a machine that started within the hour.
            old = time.monotonic_ns() - 2 * 3600 * 10**9
            loop.start(rng.choice((old, 1 << 62, -(1 << 62))))
        except ValueError:
            return rows
        raise AssertionError("a deadline of another age")
    loop.start(time.monotonic_ns() + rng.choice((-1_000_000, 0, 1_000_000)))
    while True:
        select.select([], [], [], 0.0005)
        rows += loop.take()[0]
        devices, jitter, cost, ticks = loop.statistics()
        assert sum(jitter.values()) == sum(d[1] for d in devices)
        assert sum(cost.values()) == ticks
        if rng.random() < 0.1:
            loop.relieve(rng.choice((0, 1, 1_000_000)))
        if ticks >= 4 or all(d[6] for d in devices):
            break
        if rng.random() < 0.05:
            loop.set_period(rng.choice((100_000, 2_000_000)))
    if rng.random() < 0.1:
        return int(rows)  # freed while it runs
    assert loop.stop(round(PATIENCE_S * 1e9)) == 0
    return int(rows + loop.take()[0])


if __name__ == "__main__":
    run_fuzzer(__doc__, __file__, "collectors/_fast.c", "chopper.collectors._fast", fuzz, count=300)
