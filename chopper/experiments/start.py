"""The process between ``chopper run`` and what starts the ranks of a reference workload.

    python -m chopper.experiments.start PARENT_PID STARTER RANKS MODULE [options of the module]

It is the starter, run as ``python -m`` would, and differs in two things: it ends when its parent
does, even by SIGKILL; and all write to stderr, so that stdout is chopper's.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Sequence

from chopper.experiments.declarations import as_program
from chopper.fresh_python import end_with_parent


def main(argv: Sequence[str]) -> None:
    """Start the ranks and wait for all; ends as the first that failed."""
    parent, starter, *words = argv
    # Held back by the parent, so that it is not Python's own start that is hit.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # The starter then ends all ranks.
    end_with_parent(int(parent), signal.SIGTERM)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.argv = [starter, *words]
    runpy.run_module(starter, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    as_program(lambda: main(sys.argv[1:]))
