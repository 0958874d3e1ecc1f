"""Start a workload's ranks on this host, each on its own or two joined by a shaped link.

    python -m chopper.workloads.processes PARENT_PID RANKS MODULE [options of the module]
    python -m chopper.workloads.processes rank PARENT_PID MODULE [options of the module]

The second form runs one rank, and is started by the first. The first ends when its parent does,
even by SIGKILL, and all write to stderr, so that stdout is chopper's. Torchrun could not reach
ranks in network namespaces, and its agent loads torch, which takes longer than some of the runs.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from chopper.errors import say
from chopper.experiments.declarations import as_program
from chopper.fresh_python import end_with_parent, own_python
from chopper.workloads import link

STORE_VARIABLE = "CHOPPER_STORE_FD"
"""A listening socket, in rank 0, for the store by which the ranks meet; set in all of them."""
_INTERRUPTED = 128 + signal.SIGINT
_HELD_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Blocked while a rank starts, so that it is not Python's own start that is hit."""
_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_MODULE = "chopper.workloads.processes"
_POLL_S = 0.05
_CLOSING_S = 5.0
"""Time for ranks to end by themselves after an interrupt; one may wait for another that is gone."""
_GRACE_S = 30.0
"""And after SIGTERM, on which they close their recordings, as torchrun gives them."""


def run_ranks(module: str, ranks: int, *, linked: bool, words: Sequence[str] = ()) -> None:
    """Run ranks to their end, as the first that failed; a line says which that was, and how."""
    with running_ranks(module, ranks, linked=linked, words=words) as started:
        failed = first_failure(started)
        if failed is None:
            return
        code = failed.code
        if code not in (130, -signal.SIGINT):  # which was wanted
            how = f"with exit code {code}" if code > 0 else f"by {signal.Signals(-code).name}"
            process = f"rank {failed.rank} (process {started[failed.rank].pid})"
            say(f"{process} ended first, {how}")
        raise SystemExit(code if code > 0 else 128 - code)


@contextlib.contextmanager
def running_ranks(
    module: str,
    ranks: int,
    *,
    linked: bool,
    words: Sequence[str],
    environment: Mapping[str, str] = os.environ,
    **started_with: Any,
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start ``ranks`` processes of a module for the length of the block; none is left after it.

    Each is given ``words``; with a link also ``--channel``, a socket for ``link.enter``. SystemExit
    says that there can be none.
    """
    channels = [socket.socketpair() for _ in range(ranks)]
    started: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as held, _ended(started):
        store = None if linked else held.enter_context(_listening_on_loopback())
        for ours, theirs in channels:
            held.enter_context(ours)
            held.enter_context(theirs)
        with _signals_held():
            for rank, (_, theirs) in enumerate(channels):
                channel = ["--channel", str(theirs.fileno())] if linked else []
                passed = [theirs.fileno()]
                if store is not None and rank == 0:
                    passed.append(store.fileno())
                started.append(
                    subprocess.Popen(
                        own_python(_MODULE, "rank", str(os.getpid()), module, *words, *channel),
                        env=_environment(environment, rank, ranks, store),
                        pass_fds=passed,
                        **started_with,
                    )
                )
        for _, theirs in channels:
            theirs.close()  # so that a rank that ends is noticed
        if store is not None:
            store.close()
        if linked:
            try:
                link.connect((started[0].pid, started[1].pid), (channels[0][0], channels[1][0]))
            except OSError as exc:
                raise SystemExit(f"the ranks of {module} cannot be linked: {exc}") from exc
        yield started


class Failure(NamedTuple):
    """The rank that failed first, and its exit code: -n where signal n killed it."""

    rank: int
    code: int


def first_failure(
    started: Sequence[subprocess.Popen[bytes]], timeout_s: float = math.inf
) -> Failure | None:
    """Wait until all have ended well, or one has not; TimeoutError when that takes too long."""
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        codes = [process.poll() for process in started]
        failed = [Failure(rank, code) for rank, code in enumerate(codes) if code]
        if failed:
            # Of several at once, one that was killed: the others fail of losing it.
            return min(failed, key=lambda of: of.code > 0)
        if None not in codes:
            return None
        time.sleep(_POLL_S)
    raise TimeoutError(f"the ranks did not end within {timeout_s:.0f} s")


def _environment(
    base: Mapping[str, str], rank: int, ranks: int, store: socket.socket | None
) -> dict[str, str]:
    # A torchrun around all this would be asked for its store, and counts restarts of its own.
    env = {name: v for name, v in base.items() if not name.startswith("TORCHELASTIC_")}
    env |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    if store is None:  # in namespaces of their own, where nobody else listens
        env |= {"MASTER_ADDR": link.ADDRESSES[0], "MASTER_PORT": "29500"}
        env["GLOO_SOCKET_IFNAME"] = link.INTERFACE
    else:
        address, port = store.getsockname()
        env |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        env[STORE_VARIABLE] = str(store.fileno())
        # Nobody on the network has to reach the ranks of one host. The user's own choice stands.
        for library in ("GLOO", "NCCL"):
            env.setdefault(f"{library}_SOCKET_IFNAME", _LOOPBACK)
    # Torch warns, with its stack, of each peer that has gone, and of a link's addresses, which
    # nobody names.
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return env


def _listening_on_loopback() -> socket.socket:
    """A socket for rank 0's store. Torch itself would have it listen on all interfaces."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(socket.SOMAXCONN)
    return listener


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Hold signals back, so that none comes between a start and its being known."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _ended(started: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """End the processes when the block does, politely first."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except KeyboardInterrupt:
        # It has reached the ranks of this group, too, which close their recordings.
        _await([p for p in started if os.getpgid(p.pid) == os.getpgrp()], _CLOSING_S)
        raise
    finally:
        # A second one would end this process, and leave those that do not end by themselves.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
                for process in started:
                    if process.poll() is None:
                        end(process)
                _await(started, _GRACE_S)
        finally:
            signal.signal(signal.SIGTERM, before)


def _await(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    until = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))


def run_rank(parent: int, module: str, words: list[str]) -> None:
    """Run a workload as one rank; interrupted, it ends without a traceback.

    It ends when the process that started it does, even by SIGKILL. Ctrl-C reaches all ranks at
    once: while torch is imported it would come out as a traceback from the middle of that, or as
    another error; later, ranks also fail because another one has already left.
    """
    sys.argv = [module, *words]
    # Under nohup, and in a shell's background, it is ignored, and stays so.
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if not ignored:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_SIGNALS)
    end_with_parent(parent, signal.SIGTERM)
    workload = importlib.import_module(module)

    interrupted = threading.Event()

    def interrupt(_number: int, _frame: object) -> NoReturn:
        interrupted.set()
        sys.unraisablehook = lambda _: None
        threading.excepthook = lambda _: None
        raise KeyboardInterrupt

    if not ignored:
        signal.signal(signal.SIGINT, interrupt)
    try:
        workload.main()
    except BaseException:
        # A failure after an interrupt is a consequence of it.
        if not interrupted.is_set():
            raise
        # Torch's threads may abort an interpreter that ends in the middle of an exchange.
        os._exit(_INTERRUPTED)


def main() -> None:
    """Start the ranks of a workload and wait for all; ends as the first that failed."""
    if sys.argv[1] == "rank":
        run_rank(int(sys.argv[2]), sys.argv[3], sys.argv[4:])
        return
    parent, ranks, module, *words = sys.argv[1:]
    # Held back by the parent, so that it is not Python's own start that is hit.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # All ranks are ended then.
    end_with_parent(int(parent), signal.SIGTERM)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    workload = importlib.import_module(module).WORKLOAD
    try:
        linked = workload.linked and link.usable(workload.parse(words), int(ranks))
        run_ranks(module, int(ranks), linked=linked, words=words)
    finally:
        workload.clean_up()


if __name__ == "__main__":
    as_program(main)
