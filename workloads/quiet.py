"""Run a workload as one rank, without a word of it when it is interrupted.

    python -m chopper.workloads.quiet PARENT_PID MODULE [options of the module]

It ends when the process that started it does, even by SIGKILL. Ctrl-C reaches all ranks at once.
While torch is imported it would come out as a traceback from the middle of that, or as another
error; later, ranks also fail because another one has already left.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from typing import NoReturn

from chopper.fresh_python import end_with_parent

INTERRUPTED = 128 + signal.SIGINT
STORE_VARIABLE = "CHOPPER_STORE_FD"
"""A listening socket, in rank 0, for the store by which the ranks meet; set in all of them."""
HELD = (signal.SIGINT, signal.SIGTERM)
"""Whoever starts this may hold them back, so that it is not Python's own start that is hit."""


def main(parent: int, module: str, words: list[str]) -> None:
    """Import the module and call its ``main``."""
    sys.argv = [module, *words]
    # Under nohup, and in a shell's background, it is ignored, and stays so.
    heard = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    if heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
    end_with_parent(parent, signal.SIGTERM)
    workload = importlib.import_module(module)

    interrupted = threading.Event()

    def interrupt(_number: int, _frame: object) -> NoReturn:
        interrupted.set()
        sys.unraisablehook = lambda _told: None
        threading.excepthook = lambda _told: None
        raise KeyboardInterrupt

    if heard:
        signal.signal(signal.SIGINT, interrupt)
    try:
        workload.main()
    except BaseException:
        # What a rank fails of after an interrupt, it fails of because of it.
        if not interrupted.is_set():
            raise
        # Torch's threads may abort an interpreter that ends in the middle of an exchange.
        os._exit(INTERRUPTED)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
