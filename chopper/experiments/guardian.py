"""Process that restores clocks and power caps when the process that set them has ended.

    python fresh_python.py chopper.experiments.guardian LOCK

It runs in a session of its own, ignores what a terminal sends, and holds the lock: until all is as
before, nobody else sets anything. The state goes to the lock's file before anything is set; where
even this process was killed, the next one finds it there and goes back first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from chopper.collectors.knobs import Knob, driver
from chopper.errors import ChopperError, CollectorUnavailable, OutputError
from chopper.fresh_python import own_python
from chopper.storage.files import open_own

_READY, _BUSY = b"ready\n", b"busy\n"


def lock_path() -> Path:
    """Return the file that whoever sets clocks of this machine locks."""
    import socket

    from chopper.hardware.calibration import default_path

    return default_path().parent / f"sweep-{socket.gethostname()}.lock"


@contextlib.contextmanager
def guarded(knobs: Sequence[Knob], lock: Path) -> Iterator[None]:
    """Inside, knobs may be set; afterwards, or when this process dies, they are as before.

    Raises:
        OutputError: another sweep is under way on this machine.
        ChopperError: something could not be brought back.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise OutputError(f"{lock.parent}: cannot be made ({exc.strerror})") from exc
    process = subprocess.Popen(
        own_python("chopper.experiments.guardian", str(lock)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode([*knobs]) + b"\n")
            process.stdin.flush()
        answer = process.stdout.readline()
        if answer == _BUSY:
            raise OutputError(
                f"{lock}: another sweep sets clocks of this machine; wait until it has ended"
            )
        if answer != _READY:
            why = answer.decode().strip() or "no process could guard it"
            raise ChopperError(f"nothing is set: {why}")
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        problems = process.stdout.read().decode().strip()
        process.stdout.close()
        process.wait()
        if problems:
            raise ChopperError(f"not all is as before: {problems}")


def main(lock: Path) -> None:
    """Hold the lock, wait for the end of whoever started this, and bring everything back."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    try:
        held = open_own(lock, 0o600)
    except (OSError, OutputError) as exc:
        _say(f"{exc}\n".encode())
        return
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _say(_BUSY)
        return
    remaining = _state(os.read(held, 1 << 24))
    problems = _undo(remaining)
    if problems:
        _say(f"an earlier sweep was killed, and its settings stay: {problems}".encode() + b"\n")
        return
    knobs = _state(sys.stdin.buffer.readline())
    if not knobs:
        return  # whoever started this has gone already
    _write(held, msgspec.json.encode(knobs))
    _say(_READY)
    sys.stdin.buffer.read()
    problems = _undo(knobs)
    if problems:
        _say(problems.encode())
        return
    _write(held, b"")


def _state(text: bytes) -> list[Knob]:
    try:
        return msgspec.json.decode(text, type=list[Knob]) if text.strip() else []
    except msgspec.DecodeError:
        return []  # cut off while it was written: nothing had been set yet


def _write(held: int, text: bytes) -> None:
    os.ftruncate(held, 0)
    os.pwrite(held, text, 0)
    os.fsync(held)


def _undo(knobs: Sequence[Knob]) -> str:
    """Restore the settings, the last first; return which failed, and why."""
    problems = []
    for knob in reversed(knobs):
        try:
            driver(knob.vendor).undo(knob)
        except (ChopperError, CollectorUnavailable) as exc:
            problems.append(str(exc))
    return "; ".join(problems)


def _say(text: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(1, text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
