"""Run commands in a Python as on Windows or macOS: without what only Linux, or Unix, gives.

    echo '[["--version"], ["report", "trace.json.gz"]]' | python tests/elsewhere.py win32|darwin

Writes a list of [exit code, stdout, stderr]; on Windows, stdout has its old encoding. Hidden are
modules, functions and constants that the system's Python lacks, /proc and /sys, Chopper's
extensions in C and the packages of extras. Not changed: the file system, and packages with parts
for each system, which are loaded before.
"""

from __future__ import annotations

import asyncio  # noqa: F401 - with parts for each system, as what follows
import builtins
import contextlib
import ctypes.util  # noqa: F401
import getpass  # noqa: F401
import io
import json
import multiprocessing.pool  # noqa: F401
import os
import platform  # noqa: F401
import shutil  # noqa: F401
import signal
import socket
import subprocess  # noqa: F401
import sys
import sysconfig
import tempfile  # noqa: F401
import traceback
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
    "chopper.collectors.formats.kineto._scan",
)
EXTRAS = ("amdsmi", "fsspec", "pandas", "prometheus_client", "pynvml", "ray", "torch")
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
    builtins.open = io.open = refusing_kernel_files(io.open)
    for name in ("open", "stat", "listdir", "scandir", "readlink"):
        setattr(os, name, refusing_kernel_files(getattr(os, name)))
    sys.platform = system


def run(arguments: list[str], encoding: str) -> tuple[Any, str, str]:
    """Run one command in this process -> exit code, stdout, stderr."""
    from chopper.__main__ import main

    sys.argv = ["chopper", *arguments]
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=e) for e in (encoding, "utf-8")]
    code: Any = None
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            main()
        except SystemExit as exc:
            code = exc.code
        except Exception:  # noqa: BLE001 - a failure, which the test shows
            traceback.print_exc()
            code = "traceback"
    shown = []
    for stream in streams:
        stream.seek(0)
        shown.append(stream.read())
    return code or 0, shown[0], shown[1]


if __name__ == "__main__":
    commands = json.load(sys.stdin)
    become(sys.argv[1])
    windows = sys.argv[1] == "win32"
    json.dump([run(c, "cp1252" if windows else "utf-8") for c in commands], sys.stdout)
