"""What engines of the tests run in their workers."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from chopper.engines import Lost
from chopper.errors import InputError
from chopper.storage.results import Result, leave

Left = tuple[int, Result]


def done(results: Iterable[Any]) -> list[Any]:
    """Return what came back of the tasks that were not lost."""
    return [result for result in results if not isinstance(result, Lost)]


def doubled(number: int) -> int:
    return 2 * number


def table(rows: int, folder: Path | None) -> Left:
    """The number of rows of a table that is left for later tasks."""
    return rows, leave({"number": rows, "rows": pa.table({"row": np.arange(rows)})}, folder)


def noted_table(rows: int, folder: Path | None, notes: Path) -> Left:
    """A table; each time that it is made leaves a note."""
    (notes / f"{rows}.{os.getpid()}.{time.monotonic_ns()}").touch()
    return table(rows, folder)


def total(left: Result, more: int) -> tuple[int, int]:
    held = left.get()
    return held["number"], int(np.asarray(held["rows"]["row"]).sum()) + more


def where(_number: int) -> tuple[int, str, bool]:
    """The process, what it is the main program of, and whether it may use one thread alone."""
    main = sys.modules["__main__"]
    return os.getpid(), getattr(main, "__file__", "none"), pa.cpu_count() == 1


def killed_once(number: int, victim: int, marker: Path) -> int:
    if number == victim and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def killed(number: int, victim: int) -> int:
    if number == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def refused(number: int) -> int:
    if number % 2:
        raise InputError(f"trace {number}: is no trace")
    return number


class Odd(InputError):
    """Cannot be read back: its class wants more than its text."""

    def __init__(self, text: str, more: int) -> None:
        super().__init__(text)
        self.more = more


def odd(number: int) -> int:
    raise Odd(f"trace {number} is odd", 1)


def wrong(number: int) -> int:
    return number // 0


def filled(size_bytes: int) -> int:
    """Touch memory."""
    return int(np.ones(size_bytes, np.uint8)[-1])


def arrow_filled(size_bytes: int) -> int:
    return int(pa.allocate_buffer(size_bytes, resizable=True).size)


def noise(size_bytes: int, folder: Path | None) -> Left:
    """Something left that cannot be compressed."""
    return size_bytes, leave(np.random.default_rng(0).bytes(size_bytes).hex(), folder)


def begun(folder: Path, number: int) -> None:
    """Say that it began, and go on for ever."""
    (folder / f"{number}.{os.getpid()}").touch()
    while True:
        time.sleep(60)


def nested(arguments: dict[str, Any], more: int) -> tuple[int, int]:
    """A task with a result inside an argument, as tables are inside a run."""
    return total(arguments["left"], more)


def imports_pandas() -> bool:
    """Tell whether an Arrow array is made with pandas loaded."""
    pa.array([1])
    return "pandas" in sys.modules
