"""Start a command as a shell would start a job, wait for it, and leave no process behind.

Shared by ``chopper bench`` and ``chopper record``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from chopper.errors import ChopperError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from typing import IO

    import psutil

    Output = Callable[[IO[bytes]], None]

_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 5.0
"""Time for processes that outlive the command to end by themselves, then by SIGTERM."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_JOB_CONTROL = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
"""Sent by a terminal to stop a job; SIGSTOP is sent to single processes, by people."""


class CommandNotFound(ChopperError):
    """The command does not exist or is not executable. Exit code 127, as env(1)."""

    exit_code = 127


def find_command(name: str, env: Mapping[str, str]) -> str:
    """Path of the program that a command names, as a shell finds it."""
    executable = shutil.which(name, path=env.get("PATH"))
    if executable is None:
        raise CommandNotFound(f"{name}: command not found; check the name, or give a path to it")
    return executable


def is_program(name: str) -> bool:
    """Return whether a name is a script, Python, or a program that a shell finds."""
    return bool(re.fullmatch(r"python[\d.]*|.+\.(py|sh)", name)) or shutil.which(name) is not None


def runnable(command: Sequence[str]) -> tuple[str, ...]:
    """Return a command that can be started: a Python file without a shebang runs in this Python.

    Raises:
        CommandNotFound: there is no such program or file.
    """
    if command[0].endswith(".py") and os.path.isfile(command[0]) and not shutil.which(command[0]):  # noqa: PTH113
        return (sys.executable, *command)
    find_command(command[0], os.environ)
    return (*command,)


class _Job:
    """A child in its own process group, which holds the terminal while it runs."""

    def __init__(self) -> None:
        self._interrupts = 0
        self._early: list[int] = []
        self._tty = _terminal()
        self._lent = False
        self._stopped = False
        self._stop_requested = False
        self._others = {*_descendants()}
        self.group = 0

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        output: Output | None,
        *,
        hold_interrupts: bool,
    ) -> None:
        """Start the child, and pass on what signals came while it was being started."""
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
        self.lend_terminal()
        for number in self._early:
            self.forward(number, None)

    def lend_terminal(self, *_signal: Any) -> bool:
        """Make the child the terminal's foreground job, where chopper is it; returns whether it is.

        Otherwise it could not read from the terminal (SIGTTIN), and Ctrl-C would reach chopper.
        In the background (``bg``), the terminal is the shell's.
        """
        if self._tty is not None and self.group:
            with contextlib.suppress(OSError):
                if os.tcgetpgrp(self._tty) == os.getpgrp():
                    self._set_foreground(self._tty, self.group)
                    self._lent = True
        return self._lent

    def _take_terminal(self) -> None:
        """Be the foreground job again, where the child was it, or a job of its own."""
        if self._tty is not None and self._lent:
            self._lent = False
            with contextlib.suppress(OSError):
                self._set_foreground(self._tty, os.getpgrp())

    @staticmethod
    def _set_foreground(tty: int, group: int) -> None:
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        try:
            os.tcsetpgrp(tty, group)
        finally:
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

    def request_stop(self, *_signal: Any) -> None:
        """Pass on that the job is to stop (SIGTSTP); chopper stops once the command has."""
        if self._stopped or not self.group:
            self._stop()
            return
        self._stop_requested = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGTSTP)

    def _stop(self) -> None:
        """Stop this process's whole job, as a terminal does, and go on with it and the command."""
        self._stop_requested = False
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(0, signal.SIGTSTP)  # returns when somebody continues the job (fg, bg)
        signal.signal(signal.SIGTSTP, before)
        self.lend_terminal()
        self._continue_command()

    def _continue_command(self) -> None:
        if self.group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.group, signal.SIGCONT)

    def _on_stop(self, number: int) -> None:
        """The child stopped: so does chopper when the terminal's job control is why."""
        wants_terminal = number in (signal.SIGTTIN, signal.SIGTTOU) and self._tty is not None
        if wants_terminal and not self._lent and self.lend_terminal():
            # In the foreground by now: it only had to be asked for.
            self._continue_command()
            return
        by_terminal = self._lent or wants_terminal or self._stop_requested
        self._take_terminal()
        if by_terminal and number in _JOB_CONTROL:
            self._stop()

    def wait(self) -> int:
        """Wait for the child's end; stop (Ctrl-Z) and go on together with it.

        A command that somebody stops alone (SIGSTOP, or any stop without a terminal) may be
        continued alone, so chopper waits for that and does not stop: nobody would continue it.
        """
        while True:
            _, status = os.waitpid(self._popen.pid, os.WUNTRACED | os.WCONTINUED)
            if os.WIFSTOPPED(status):
                self._stopped = True
                self._on_stop(os.WSTOPSIG(status))
            elif os.WIFCONTINUED(status):
                self._stopped = False
                self.lend_terminal()
            else:
                break
        self._take_terminal()
        code = os.waitstatus_to_exitcode(status)
        self._popen.returncode = code
        return code

    def clean_up(self) -> None:
        """End what the command left running, politely first; what ran before it goes on."""
        import psutil

        def remaining() -> list[psutil.Process]:
            return _descendants(self._others)

        # Ranks whose launcher was killed may be writing what they recorded.
        _, alive = psutil.wait_procs(remaining(), timeout=_GRACE_S)
        for how in (psutil.Process.terminate, psutil.Process.kill):
            if not alive:
                break
            for process in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    how(process)
            psutil.wait_procs(alive, timeout=_GRACE_S)
            alive = remaining()
        if sys.platform != "linux" or not os.path.exists("/proc/self"):  # noqa: PTH110
            # Without a subreaper or a list of children, only their group is known.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.group, signal.SIGKILL)


def _descendants(without: Collection[psutil.Process] = ()) -> list[psutil.Process]:
    """Return what descends from this process, but for some and their descendants."""
    import psutil

    children = []
    # Without /proc, they are reached through their group only.
    with contextlib.suppress(psutil.Error, OSError):
        for child in psutil.Process().children():
            if child not in without:
                children.append(child)
                with contextlib.suppress(psutil.NoSuchProcess):
                    children += child.children(recursive=True)
    return children


def _terminal() -> int | None:
    """File descriptor of the terminal on stdin, None where there is none."""
    try:
        descriptor = sys.stdin.fileno()
        os.tcgetpgrp(descriptor)  # fails for a terminal that is another session's
    except (OSError, ValueError, AttributeError):
        return None
    return descriptor


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
    SIGTERM, a third Ctrl-C as SIGKILL; what is ignored, as SIGHUP under nohup, stays so). Ctrl-Z,
    ``fg`` and ``bg`` act on both as on one job. When it has ended, so have all of its descendants:
    those that are left get some seconds, then SIGTERM, then SIGKILL. What else this process has
    started goes on. Main thread only.

    Args:
        command: program and arguments.
        env: its environment.
        output: called once with stdout and stderr together, instead of passing them on; must return
            at once.
        hold_interrupts: start it with SIGINT blocked, until it unblocks it itself.
    """
    with _subreaper():
        job = _Job()
        handlers = {
            **dict.fromkeys(_SIGNALS, job.forward),
            signal.SIGTSTP: job.request_stop,
            signal.SIGCONT: job.lend_terminal,
        }
        before = {
            number: signal.signal(number, handler)
            for number, handler in handlers.items()
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
