"""A worker process: a new Python that does one task after another, as its parent sends them.

Calls and answers are pickles behind their length, over stdin and stdout. It knows nothing of the
parent's program, and ends when stdin does, which the parent's end closes.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import resource
import shutil
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any, BinaryIO

from chopper.engines import lost, portable
from chopper.errors import ChopperError
from chopper.fresh_python import leave_out_pandas

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LENGTH_BYTES = 8


def send(file: BinaryIO, value: Any) -> None:
    """Write a value and the length of its pickle before it."""
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    file.write(len(data).to_bytes(_LENGTH_BYTES, "little"))
    file.write(data)
    file.flush()


def received(file: BinaryIO) -> bytes:
    """Read the pickle that :func:`send` wrote.

    Raises:
        EOFError: the other process has ended.
    """
    head = file.read(_LENGTH_BYTES)
    length = int.from_bytes(head, "little")
    data = file.read(length)
    if len(head) < _LENGTH_BYTES or len(data) < length:
        raise EOFError
    return data


def main() -> None:
    """Do what the parent sends until it ends, and remove its files then."""
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as null:  # noqa: PTH123
        os.dup2(null.fileno(), 0)
    os.dup2(2, 1)  # what a task prints is no answer
    path, folder, memory_bytes = pickle.loads(received(calls))
    sys.path[:] = [*path, *(p for p in sys.path if p not in path)]
    work_alone()
    if memory_bytes is not None:
        _limit(memory_bytes)
    waiting = queue.SimpleQueue[bytes]()

    def read() -> None:
        try:
            while True:
                waiting.put(received(calls))
        except EOFError:
            for _ in range(2):  # another worker may have been writing
                shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    while True:
        send(answers, _answer(waiting.get(), memory_bytes))


def _answer(call: bytes, memory_bytes: int | None) -> tuple[Any, Exception | None]:
    """Run a task; return what it returned, and what it raised beside errors of the user's data."""
    try:
        function, arguments = pickle.loads(call)
        return function(*arguments), None
    except (ChopperError, MemoryError) as error:
        return lost(portable(error), memory_bytes), None
    except Exception as error:  # noqa: BLE001 - raised where it is answered
        sent = portable(error)
        sent.add_note(f"in a worker process:\n{''.join(traceback.format_exception(error))}")
        return None, sent


def work_alone() -> None:
    """Prepare a process for the tasks of ranks, one after the other, on one core. Idempotent."""
    import ctypes

    import pyarrow as pa

    leave_out_pandas()
    pa.set_cpu_count(1)
    # Arrow's own pool keeps what is freed, and reserves more than it uses.
    pa.set_memory_pool(pa.system_memory_pool())
    # Arrays of a rank come and go: what is freed is not returned to the system each time. Older
    # versions of glibc refuse a threshold above 32 MiB, and would then map each array anew.
    with contextlib.suppress(OSError, AttributeError):  # another libc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)


def _limit(memory_bytes: int) -> tuple[int, int]:
    """Limit what this process may allocate, further than the user has; return the limits before."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    least = min(n for n in (memory_bytes, *before) if n != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (least, before[1]))
    return before


@contextlib.contextmanager
def limited(memory_bytes: int | None) -> Iterator[None]:
    """Limit what is allocated in the block, beside what this process has; None for no limit."""
    if memory_bytes is None:
        yield
        return
    import psutil

    before = _limit(psutil.Process().memory_info().data + memory_bytes)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


if __name__ == "__main__":
    main()
