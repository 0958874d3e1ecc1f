"""Give up waiting for a call that may never return, such as one into a driver that hangs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

DRIVER_TIMEOUT_S = 5.0
"""A driver that takes longer to list its devices hangs."""


def call_within(timeout_s: float, call: Callable[[], T]) -> T:
    """Return what a call returns, or raise what it raises.

    Raises:
        TimeoutError: it did neither in time; its thread keeps no process from ending.
    """
    results: list[T] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as exc:  # noqa: BLE001 - raised by the thread that waits
            problems.append(exc)

    thread = threading.Thread(target=run, daemon=True, name="call")
    thread.start()
    thread.join(timeout_s)
    if problems:
        raise problems[0]
    if not results:
        raise TimeoutError(f"a call has not returned for {timeout_s:g} s")
    return results[0]
