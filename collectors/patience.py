"""Calls that may never return: waited for so long, then left to a thread of their own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

DRIVER_S = 5.0
"""A driver that takes longer to say what devices there are hangs."""


def answered(call: Callable[[], T], within_s: float) -> T:
    """What a call returns or raises.

    Raises:
        TimeoutError: it has done neither; its thread keeps no process from ending.
    """
    results: list[T] = []
    problems: list[BaseException] = []

    def ask() -> None:
        try:
            results.append(call())
        except BaseException as exc:  # noqa: BLE001 - raised where the answer is awaited
            problems.append(exc)

    thread = threading.Thread(target=ask, daemon=True, name="asks")
    thread.start()
    thread.join(within_s)
    if problems:
        raise problems[0]
    if not results:
        raise TimeoutError(f"a call has not returned for {within_s:g} s")
    return results[0]
