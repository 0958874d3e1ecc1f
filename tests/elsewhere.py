"""Run the command in a Python as on Windows or macOS: without what only Linux, or Unix, gives.

    python tests/elsewhere.py win32|darwin ARGUMENTS

Hidden: modules, functions and constants that the system's Python lacks, /proc and /sys, Chopper's
extensions in C and the packages of extras. Not changed: the file system, and packages with parts
for each system, which are loaded before.
"""

from __future__ import annotations

import asyncio  # noqa: F401 - with parts for each system, as what follows
import builtins
import ctypes.util  # noqa: F401
import getpass  # noqa: F401
import io
import multiprocessing.pool
import os
import platform  # noqa: F401
import shutil  # noqa: F401
import signal
import socket
import subprocess  # noqa: F401
import sys
import sysconfig
import tempfile  # noqa: F401
import webbrowser  # noqa: F401
from collections.abc import Callable
from typing import Any

UNIX_MODULES = (
    *("fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"),
    *("multiprocessing.popen_fork", "multiprocessing.popen_forkserver"),
)
EXTENSIONS = (
    "chopper.analyzers.replay._longest",
    "chopper.analyzers.trace._forest",
    "chopper.collectors._fast",
    "chopper.collectors.formats.kineto._scan",
)
EXTRAS = ("amdsmi", "fsspec", "pandas", "prometheus_client", "pynvml", "ray", "scipy", "torch")
LINUX_OS = "sched_getaffinity sched_setaffinity posix_fadvise O_DIRECT O_TMPFILE pidfd_open"
UNIX_OS = """
    fork forkpty register_at_fork getuid geteuid getgid getegid killpg getpgid setsid getloadavg
    sysconf mkfifo fchmod fchown chown lchown O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK statvfs
    wait3 wait4 waitid WNOHANG uname setpgid getpgrp readv pread pwrite preadv nice"""
UNIX_SIGNALS = """
    SIGHUP SIGKILL SIGUSR1 SIGUSR2 SIGALRM SIGPIPE SIGCHLD SIGCONT SIGSTOP SIGQUIT SIGTSTP
    pthread_sigmask setitimer alarm sigwait siginterrupt"""


class Hidden:
    """An import hook to which modules are not installed."""

    def __init__(self) -> None:
        self.names: set[str] = set(EXTRAS + EXTENSIONS)

    def find_spec(self, name: str, *_more: object) -> None:
        if name in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def refusing_kernel_files(function: Callable[..., Any]) -> Callable[..., Any]:
    def opened(path: Any, *args: Any, **more: Any) -> Any:
        name = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if str(name).startswith(("/proc", "/sys/")) and not caller.startswith("psutil"):
            raise FileNotFoundError(2, "No such file or directory", name)
        return function(path, *args, **more)

    return opened


def become(system: str) -> None:
    """Hide from this process what a system has not."""
    hidden = Hidden()
    sys.meta_path.insert(0, hidden)
    import click  # noqa: F401
    import duckdb  # noqa: F401
    import isal.isal_zlib  # noqa: F401
    import psutil  # noqa: F401
    import pyarrow.compute
    import pyarrow.dataset
    import pyarrow.parquet  # noqa: F401
    import rich.console  # noqa: F401

    sysconfig.get_config_vars()
    windows = system == "win32"
    hidden.names |= set(UNIX_MODULES if windows else ())
    for name in hidden.names:
        sys.modules.pop(name, None)
    for name in LINUX_OS.split() + (UNIX_OS.split() if windows else []):
        if hasattr(os, name):
            delattr(os, name)
    if windows:
        for name in UNIX_SIGNALS.split():
            delattr(signal, name)
        del socket.AF_UNIX
    builtins.open = io.open = refusing_kernel_files(io.open)  # type: ignore[assignment]
    for name in ("open", "stat", "listdir", "scandir", "readlink"):
        setattr(os, name, refusing_kernel_files(getattr(os, name)))
    sys.platform = system


if __name__ == "__main__":
    become(sys.argv.pop(1))
    from chopper.__main__ import main

    sys.argv[0] = "chopper"
    main()
