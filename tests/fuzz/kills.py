"""Commands that are killed, stopped and continued at any moment: what they leave can be read.

A moment is a time, or the point before one of the changes that the command makes to files. After
it: what looks whole is whole, the earlier output is whole, and nothing hinders the next command.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil

from tests.command import run
from tests.waiting import PATIENCE_S

EVERY = 100
"""Other inputs between two kills."""
_SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")
_PAUSES = ("SIGHUP", "SIGSTOP")
_MARK = "CHOPPER_TEST_MARK"
_WATCHED = """
    import os, signal, sys
    at, number, below, counted = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    count = 0
    def watch(event, arguments):
        global count
        if event == "open":
            if not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR): return
        elif event not in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
            return
        elif isinstance(arguments[-1], int) and arguments[-1] > 0:  # relative to a folder
            arguments = (below,)
        if below in str(arguments[0]):
            count += 1
            if count == at: os.kill(os.getpid(), number)
    sys.addaudithook(watch)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    words = sys.argv[6:]
    try:
        exec(sys.argv[5])
    finally:
        if at < 0: open(counted, "w").write(str(count))
"""
_COMMAND = """
    from chopper import cli
    print("started", flush=True)
    sys.argv = ["chopper", *words]
    cli.main()
"""
_PROFILE = """
    import time
    import chopper
    print("started", flush=True)
    force = words[1:] == ["--force"]
    with chopper.profile(words[0], trace=False, collect=("host",), force=force) as prof:
        for _ in range(40):
            time.sleep(0.005)
            prof.step()
"""
_STEPS = (
    "import sys, time, chopper\n"
    "with chopper.profile(trace=False, collect=[]) as prof:\n"
    "    for _ in range(20): prof.step(); time.sleep(0.005)\n"
)


@dataclass(frozen=True)
class Target:
    """A command to kill, and what it leaves."""

    program: str
    words: Callable[[Path, Path], tuple[str, ...]]
    """Of the folder of base inputs, and the output."""
    output: str
    force: bool = False
    """An earlier output is there, which it replaces."""
    weight: int = 4


def _record(_: Path, output: Path) -> tuple[str, ...]:
    command = ("--", sys.executable, "-c", _STEPS)
    return "record", "-o", str(output), "--no-trace", "--collect", "host", *command


def _import(bases: Path, output: Path) -> tuple[str, ...]:
    return "import", str(bases / "ranks"), "-o", str(output)


def _report(bases: Path, output: Path) -> tuple[str, ...]:
    return "report", str(bases / "ranks"), "-o", str(output)


def _export(bases: Path, output: Path) -> tuple[str, ...]:
    return "export", str(bases / "ranks"), "--to", "csv", "-o", str(output)


def _profile(_: Path, output: Path) -> tuple[str, ...]:
    return (str(output),)


_FRESH = {
    "profile": Target(_PROFILE, _profile, "run", weight=6),
    "record": Target(_COMMAND, _record, "run"),
    "import": Target(_COMMAND, _import, "run"),
    "report": Target(_COMMAND, _report, "page.html"),
    "export": Target(_COMMAND, _export, "csv"),
}
TARGETS = {
    **_FRESH,
    **{
        f"{name}-force": Target(t.program, t.words, t.output, force=True, weight=t.weight)
        for name, t in _FRESH.items()
    },
}


@dataclass(frozen=True)
class Kill:
    """A signal, and when the command gets it."""

    target: str
    signal: str
    moment: float
    """Share of the time that the command takes, or of the changes that it makes to files."""
    by_time: bool

    def __str__(self) -> str:
        unit = "time" if self.by_time else "changes"
        return f"kill:{self.target}:{self.signal}:{self.moment:.3f} of its {unit}"


def kills(seed: int) -> Iterator[Kill]:
    """Kills without end."""
    random = Random(seed)
    names, weights = zip(*((name, t.weight) for name, t in TARGETS.items()), strict=True)
    while True:
        target = random.choices(names, weights)[0]
        pauses = _PAUSES if target == "profile" else ()
        by_time = random.random() < 0.3
        kind = random.choice(_SIGNALS + (pauses if by_time else ()))
        yield Kill(target, kind, random.random(), by_time)


def judge(kill: Kill, bases: Path, folder: Path) -> str | None:
    """Run the command, send the signal, and read what is left; returns what is wrong with it."""
    target = TARGETS[kill.target]
    folder.mkdir(parents=True)
    output = folder / target.output
    whole = _whole(kill.target, bases)
    if target.force:
        _copy(whole.output, output)
        _mark(output)
    before = _contents(output)
    program = _started(kill, target, bases, output, whole)
    problem = None
    if kill.signal == "SIGSTOP":
        # Read while it stands still; then it goes on, and ends as it should.
        problem = _read(output)
        program.send_signal(signal.SIGCONT)
        program.send_signal(signal.SIGINT)
    _await(program, output)
    problem = problem or _judge_left(target, output, before, whole)
    problem = problem or _judge_next(target, bases, output, before, whole)
    return f"{kill}: {problem}" if problem else None


@dataclass(frozen=True)
class _Whole:
    """What the command leaves that nobody kills."""

    output: Path
    changes: int
    seconds: float
    contents: dict[str, bytes]


@functools.cache
def _whole(name: str, bases: Path) -> _Whole:
    target = TARGETS[name]
    folder = Path(tempfile.mkdtemp(prefix="chopper-fuzz-whole-"))
    output, counted = folder / "out" / target.output, folder / "changes"
    output.parent.mkdir()
    if target.force:
        _copy(_whole(name.removesuffix("-force"), bases).output, output)
    program = _popen(target, target.words(bases, output), output, -1, 0, counted)
    began_s = time.monotonic()
    _await(program, output)
    seconds = time.monotonic() - began_s
    assert program.returncode == 0, (name, program.returncode)
    return _Whole(output, int(counted.read_text()), seconds, _contents(output))


def _popen(
    target: Target, words: tuple[str, ...], output: Path, at: int, number: int, counted: Path
) -> subprocess.Popen[str]:
    force = ("--force",) if target.force else ()
    words = (words[0], *force, *words[1:]) if target.program is _COMMAND else (*words, *force)
    options = [str(at), str(number), str(output.parent), str(counted)]
    codes = [textwrap.dedent(code) for code in (_WATCHED, target.program)]
    program = subprocess.Popen(
        [sys.executable, "-P", "-c", codes[0], *options, codes[1], *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"XDG_CACHE_HOME": str(output.parent / "cache"), _MARK: str(output)},
        text=True,
    )
    assert program.stdout is not None
    program.stdout.readline()
    return program


def _started(
    kill: Kill, target: Target, bases: Path, output: Path, whole: _Whole
) -> subprocess.Popen[str]:
    number = getattr(signal, kill.signal)
    at = 0 if kill.by_time else 1 + int(kill.moment * whole.changes)
    words = target.words(bases, output)
    program = _popen(target, words, output, at, number, output.parent / "changes")
    if kill.by_time:
        time.sleep(kill.moment * whole.seconds)
        program.send_signal(number)
    return program


def _await(program: subprocess.Popen[str], output: Path) -> None:
    """Wait for the command's end, and that of a recorded program, which outlives its recorder."""
    try:
        program.wait(PATIENCE_S)
        psutil.wait_procs([*_marked(output)], timeout=PATIENCE_S)
    finally:
        program.kill()
        program.wait()
        assert program.stdout is not None
        program.stdout.close()


def _marked(output: Path) -> Iterator[psutil.Process]:
    """Yield the processes that a command for this output started."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == str(output):
                yield process


def _judge_left(
    target: Target, output: Path, before: dict[str, bytes], whole: _Whole
) -> str | None:
    """Return what is wrong with the output as it stands."""
    now = _contents(output)
    if not now or now == before or _is_whole(target, now, whole):
        return None
    if target.output != "run":
        # Into a directory that is there, an export moves file by file, each of them whole.
        cut = [n for n in now if now[n] not in (before.get(n), whole.contents.get(n))]
        return f"half written: {cut}" if cut or not target.force else None
    return _read(output, half=target.words is _import)


def _judge_next(
    target: Target, bases: Path, output: Path, before: dict[str, bytes], whole: _Whole
) -> str | None:
    """Return what the next commands make of it: the earlier output, and then a new one."""
    if target.output == "run":
        # Recovers what was left, and is refused, or records nothing.
        run("record", "-o", output, "--no-trace", "--", "true")
    kept = [output, *output.parent.glob(f"{output.name}.before*")]
    now = _contents(output)
    if target.force and not any(_contents(place) == before for place in kept):
        is_new = now.keys() == before.keys() if target.output == "csv" else False
        is_new |= _is_whole(target, now, whole) or (target.output == "run" and _has_steps(output))
        if not is_new:
            return f"the earlier output is lost: {[p.name for p in output.parent.iterdir()]}"
    words = target.words(bases, output)
    if target.program is _PROFILE:
        _await(program := _popen(_forced(target), words, output, 0, 0, output), output)
        code, said = program.returncode, ""
    else:
        outcome = run(words[0], "--force", *words[1:])
        code, said = outcome.code, outcome.err
    if code:
        return f"the next command fails: {said[-1500:]}"
    left = [p.name for p in output.parent.glob(f".{output.name}*")]
    if left and target.output == "run":
        return f"left after the next command: {left}"
    if not _is_whole(target, _contents(output), whole):
        return f"the next output is not whole: {_difference(_contents(output), whole.contents)}"
    return None


def _difference(found: dict[str, bytes], expected: dict[str, bytes]) -> str:
    """Return where two outputs differ first."""
    if found.keys() != expected.keys():
        return f"files: {sorted(found)}, not {sorted(expected)}"
    for name in sorted(found):
        one, other = found.get(name, b""), expected.get(name, b"")
        if one != other:
            pairs = enumerate(zip(one, other, strict=False))
            at = next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
            return (
                f"{name}, byte {at}: {one[at - 40 : at + 40]!r}, not {other[at - 40 : at + 40]!r}"
            )
    return "nowhere"


def _forced(target: Target) -> Target:
    return Target(target.program, target.words, target.output, force=True)


def _is_whole(target: Target, contents: dict[str, bytes], whole: _Whole) -> bool:
    """Return whether the output holds all that the whole one does; times differ."""
    if target.output != "run":
        return contents == whole.contents
    return contents.keys() == whole.contents.keys()


def _has_steps(output: Path) -> bool:
    from chopper.storage.parts import has_steps

    return any(has_steps(folder) for folder in output.glob("rank-*"))


def _read(place: Path, *, half: bool = False) -> str | None:
    """Return what is wrong with what ``analyze`` says of a run; one ``half`` there is refused."""
    if not any(place.glob("rank-*/manifest.json")):
        return None  # it came before the recording
    outcome = run("analyze", place, "--json")
    if outcome.code == 0 and not half:
        json.loads(outcome.out)
        return None
    if outcome.code == 0:
        return f"a half of a run looks whole: {sorted(_contents(place))}"
    if outcome.code == 1 and len(outcome.lines) == 1:
        return None if half else f"a killed recording is refused\n{outcome.lines[0]}"
    return f"exit code {outcome.code}\n{outcome.err[-1500:]}"


def _contents(output: Path) -> dict[str, bytes]:
    if output.is_file():
        return {"": re.sub(rb"made [-\d]+ [:\d]+ UTC", b"", output.read_bytes())}
    files = (p for p in output.rglob("*") if p.is_file() and p.name != ".claim")
    return {p.relative_to(output).as_posix(): p.read_bytes() for p in files}


def _copy(output: Path, target: Path) -> None:
    if output.is_file():
        shutil.copy(output, target)
    else:
        shutil.copytree(output, target)


def _mark(output: Path) -> None:
    """Make an earlier output that can be told from a new one."""
    if output.is_file():
        output.write_bytes(output.read_bytes() + b"<!-- earlier -->\n")
    for file in output.rglob("*.csv"):
        file.write_bytes(file.read_bytes() + b"\n")
    for file in output.rglob("manifest.json"):
        file.write_bytes(file.read_bytes() + b"\n")
