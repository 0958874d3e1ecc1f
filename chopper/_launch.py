"""Start a command as a shell would start a job, wait for it, and leave no process behind.

Shared by ``chopper run`` and ``chopper record``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from chopper.errors import ChopperError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import IO

    Output = Callable[[IO[bytes]], None]

_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 5.0
"""How long processes that outlive the command may take to end by themselves, then by SIGTERM."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class CommandNotFound(ChopperError):
    """The command does not exist or is not executable. Exit code 127, as env(1)."""

    exit_code = 127


def find_command(name: str, env: Mapping[str, str]) -> str:
    """Path of the program that a command names, as a shell finds it.

    Raises:
        CommandNotFound: there is none.
    """
    executable = shutil.which(name, path=env.get("PATH"))
    if executable is None:
        raise CommandNotFound(f"{name}: command not found; check the name, or give a path to it")
    return executable


class _Job:
    """A child in its own process group, which holds the terminal while it runs."""

    def __init__(self) -> None:
        self._interrupts = 0
        self._early: list[int] = []
        self._tty = _foreground_tty()
        self.group = 0

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        output: Output | None,
        *,
        hold_interrupts: bool,
    ) -> None:
        """Start the child, and pass on what signals came while it was being started.

        Raises:
            CommandNotFound: there is no such command, or it cannot be executed.
        """
        executable = find_command(command[0], env)
        held = {signal.SIGINT} if hold_interrupts else set()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
        try:
            self._popen = subprocess.Popen(
                [*command],
                executable=executable,
                env=env,
                process_group=0,
                stdout=None if output is None else subprocess.PIPE,
                stderr=None if output is None else subprocess.STDOUT,
            )
        except OSError as exc:
            raise CommandNotFound(f"{command[0]}: cannot be started ({exc.strerror})") from exc
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if output is not None:
            assert self._popen.stdout is not None
            output(self._popen.stdout)
        self.group = self._popen.pid
        self._hand_terminal(self.group)
        for number in self._early:
            self.forward(number, None)

    def _hand_terminal(self, group: int) -> None:
        # Without the terminal, the command could not read from it (SIGTTIN), and Ctrl-C would
        # reach chopper instead of the command.
        if self._tty is None:
            return
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        with contextlib.suppress(OSError):
            os.tcsetpgrp(self._tty, group)
        signal.signal(signal.SIGTTOU, before)

    def forward(self, number: int, frame: Any) -> None:  # noqa: ARG002
        """Pass a signal on; a second Ctrl-C asks less kindly, a third does not ask."""
        if not self.group:
            self._early.append(number)
            return
        if number == signal.SIGINT:
            self._interrupts += 1
            number = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)[min(self._interrupts, 3) - 1]
        elif number == signal.SIGHUP:
            # Ranks close their recordings on SIGTERM; a hang-up would end them at once.
            number = signal.SIGTERM
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, number)

    def wait(self) -> int:
        """Wait for the child's end; stop (Ctrl-Z) and go on together with it."""
        while True:
            _, status = os.waitpid(self._popen.pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                break
            self._hand_terminal(os.getpgrp())
            os.kill(os.getpid(), signal.SIGSTOP)
            self._hand_terminal(self.group)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.group, signal.SIGCONT)
        self._hand_terminal(os.getpgrp())
        code = os.waitstatus_to_exitcode(status)
        self._popen.returncode = code
        return code

    def clean_up(self) -> None:
        """End what the command left running, politely first."""
        import psutil

        def left() -> list[psutil.Process]:
            return psutil.Process().children(recursive=True)

        # Ranks whose launcher was killed may be writing what they recorded.
        _, alive = psutil.wait_procs(left(), timeout=_GRACE_S)
        for how in (psutil.Process.terminate, psutil.Process.kill):
            if not alive:
                break
            for process in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    how(process)
            psutil.wait_procs(alive, timeout=_GRACE_S)
            alive = left()
        if sys.platform != "linux":  # no subreaper: orphans are reached through their group only
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.group, signal.SIGKILL)


def _foreground_tty() -> int | None:
    """File descriptor of the terminal when chopper is its foreground job, else None."""
    try:
        fd = sys.stdin.fileno()
        return fd if os.isatty(fd) and os.tcgetpgrp(fd) == os.getpgrp() else None
    except (OSError, ValueError, AttributeError):
        return None


@contextlib.contextmanager
def _subreaper() -> Iterator[None]:
    """Adopt orphaned grandchildren, so that they can be found and ended (Linux only)."""
    if sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def launch(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    output: Output | None = None,
    hold_interrupts: bool = False,
) -> int:
    """Run ``command`` to its end and return its exit code (128 + n when signal n killed it).

    The command runs in a process group of its own, which holds the terminal; SIGINT, SIGTERM and
    SIGHUP that reach this process are passed on to the whole group (SIGHUP and a second Ctrl-C as
    SIGTERM, a third Ctrl-C as SIGKILL; what is ignored, as SIGHUP under nohup, stays so). When it
    has ended, so have all of its descendants: those that are left get some seconds, then SIGTERM,
    then SIGKILL.

    Must be called from the main thread.

    Args:
        command: program and arguments.
        env: its environment.
        output: called once with what the command writes, stdout and stderr together, when it is
            not to go where this process' own output goes; must return at once.
        hold_interrupts: start it with SIGINT blocked, until it unblocks it itself.

    Raises:
        CommandNotFound: there is no such command, or it cannot be executed.
    """
    with _subreaper():
        job = _Job()
        before = {
            number: signal.signal(number, job.forward)
            for number in _SIGNALS
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            job.start(command, env, output, hold_interrupts=hold_interrupts)
            code = job.wait()
            job.clean_up()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return code if code >= 0 else 128 - code
