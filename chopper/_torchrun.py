"""torchrun without its traceback: the process that starts the ranks of a reference workload.

    python -m chopper._torchrun PARENT_PID RANKS MODULE [options of the module]

With ``-`` for RANKS the module itself is run, in this process: it starts its ranks as it likes.
Else it is torch.distributed.run on a free local port, and differs in three things: it ends when its
parent does, even by SIGKILL; ranks write to stderr, so that stdout is chopper's; and when a rank
fails it says so in one line and passes the rank's exit code on.
"""

from __future__ import annotations

import ctypes
import logging
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str]) -> int:
    """Start the ranks, wait for all, and return the exit code of the first that failed."""
    parent, ranks, module, *options = argv
    _end_with(int(parent))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    if ranks == "-":
        sys.argv = [module, *options]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return 0

    return _run(ranks, module, options)


def _run(ranks: str, module: str, options: Sequence[str]) -> int:
    # torchrun logs each signal and each failed rank, beside raising it; ranks log as they like.
    logging.disable(logging.ERROR)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    words = ["--standalone", "--nproc-per-node", ranks]
    # Until torchrun's own handlers stand: what is opened here is closed, too.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        # Torchrun makes a directory for logs, also of ranks that have none, and leaves it behind.
        with tempfile.TemporaryDirectory(
            prefix="chopper-ranks-", ignore_cleanup_errors=True
        ) as logs:
            run(parse_args([*words, "--log-dir", logs, "-m", module, *options]))
    except ChildFailedError as exc:
        rank, failure = exc.get_first_failure()
        if failure.exitcode >= 0:
            how, code = f"with exit code {failure.exitcode}", failure.exitcode
        else:
            how, code = f"by {signal.Signals(-failure.exitcode).name}", 128 - failure.exitcode
        sys.stderr.write(f"chopper: rank {rank} (process {failure.pid}) ended first, {how}\n")
        return code
    except SignalException as exc:
        return 128 + exc.sigval
    return 0


def _end_with(parent: int) -> None:
    """Have the kernel send SIGTERM when the parent dies; torchrun then ends all ranks."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # while torch is loading; torchrun's own handlers stand later
        sys.exit(128 + signal.SIGINT)
