"""``chopper record``: any training command, without changing its code."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from chopper.cli import _shared as shared
from chopper.collectors import registry
from chopper.errors import (
    CaptureError,
    ChopperError,
    OutputError,
    RunFormatError,
    UsageError,
    say,
)
from chopper.hardware.launchers import recorders_job
from chopper.recording.hook import arming
from chopper.recording.hook.early import NOTES_VARIABLE
from chopper.recording.options import DEFAULT_LIMIT_TEXT, DEFAULT_WINDOWS_TEXT
from chopper.storage import manifest as m
from chopper.storage.destination import NOTES
from chopper.storage.files import create
from chopper.wording import next_command

if TYPE_CHECKING:
    from chopper.recording.live import Snapshot


@click.command(
    "record",
    cls=shared.Command,
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
)
@shared.run_output("Directory of the run, here or at an address. [default: runs/<time>]")
@click.option(
    "--collect",
    metavar="A,B",
    shell_complete=shared.completing(registry.names),
    help="Collectors to use; `chopper doctor` lists them.  [default: all of the default ones]",
)
@click.option(
    "--steps",
    metavar="START:STOP",
    help=f"Steps to trace, counted from 0. [default: {DEFAULT_WINDOWS_TEXT}]",
)
@click.option("--no-trace", is_flag=True, help="Record telemetry and step times only.")
@click.option(
    "--memory", is_flag=True, help="Trace allocations too, and keep the allocator's history."
)
@click.option(
    "--counters",
    is_flag=True,
    help="Also count tensor operations and memory traffic of each kernel (NVIDIA, one rank), in "
    "three steps of their own after a traced window.",
)
@click.option(
    "--no-shapes",
    is_flag=True,
    help="Trace without operator shapes: cheaper, but FLOP and bytes are then unknown.",
)
@click.option(
    "--stacks", is_flag=True, help="Trace Python call stacks too, which slows the steps down."
)
@click.option(
    "--from-import",
    is_flag=True,
    help="Record from the import of torch on, by time: for programs that neither train nor call a "
    "module again and again, such as functions of tensors in a loop.",
)
@click.option(
    "--trace-limit",
    type=float,
    default=1.0,
    metavar="FACTOR",
    help=f"Multiply the limit of a trace ({DEFAULT_LIMIT_TEXT}) by FACTOR.  [default: 1]",
)
@click.option(
    "--gather",
    is_flag=True,
    help="When the job ends, copy the ranks of all nodes into rank 0's directory through the "
    "job's own store, for nodes without a shared disk. Pass it on every node.",
)
@click.option(
    "--live",
    is_flag=True,
    help="Show ranks, clocks, power, memory and the latest attribution while it runs.",
)
@click.option(
    "--prometheus",
    metavar="[HOST:]PORT",
    help="Also serve these metrics to Prometheus, on the loopback interface unless HOST is given.",
)
@shared.force("Replace an earlier run in the output directory.")
@click.argument("command_line", metavar="[--] COMMAND...", nargs=-1, type=click.UNPROCESSED)
def command(
    output: Path | str | None,
    collect: str | None,
    steps: str | None,
    no_trace: bool,
    memory: bool,
    counters: bool,
    no_shapes: bool,
    stacks: bool,
    from_import: bool,
    trace_limit: float,
    gather: bool,
    live: bool,
    prometheus: str | None,
    force: bool,
    command_line: tuple[str, ...],
) -> int:
    """Record any training command, without changing its code.

    Every process of COMMAND that trains with torch becomes a rank of the run: the ranks of
    torchrun, accelerate, deepspeed, Lightning, mpirun, srun or mp.spawn, or a plain script.
    Processes that are not ranks of the same job (pool workers, trials of a sweep, a second script)
    are recorded as separate runs inside it, listed at the end. A program without an optimizer that
    calls modules again and again, such as inference, is traced by time and has no steps. The exit
    code is that of COMMAND (128 + n if signal n ended it); 127 if the command does not exist; 1 if
    COMMAND succeeded but nothing was recorded, or no step that could replace a run. Ctrl-C reaches
    all of its processes, and what was recorded is kept.

    \b
    Examples:
      chopper record -- python train.py
      chopper record -o runs/mine -- torchrun --nproc-per-node 8 train.py
      chopper record --gather -- torchrun --nnodes 2 --master-addr node0 train.py
      chopper record --steps 100:105 -- torchrun --nproc-per-node 8 train.py
      chopper record --no-trace --prometheus 9400 -- python train.py
      chopper record --stacks -- python train.py
    """
    from chopper.experiments.launch import launch, runnable
    from chopper.recording.live import parse_address
    from chopper.recording.options import make_options
    from chopper.storage.destination import new_output

    if not command_line:
        raise click.UsageError("no command; use: chopper record -- python train.py")
    # What is wrong with the options is said here and now, not by each rank.
    options: dict[str, Any] = {"collect": collect, "steps": steps, "trace_limit": trace_limit}
    options |= {"trace": not no_trace, "shapes": not no_shapes, "memory": memory, "gather": gather}
    options |= {"stacks": stacks, "from_import": from_import, "counters": counters}
    make_options(output=None, **options)
    address = parse_address(prometheus) if prometheus is not None else None
    _check_combination(memory=memory, counters=counters, no_trace=no_trace, live=live)
    target, target_name = _places(output, force=force)
    command_line = runnable(command_line)  # before anything is replaced
    code: int | None = None
    try:
        job = recorders_job(command_line)
        with new_output(target, force=force, say=say, job=job) as path:
            say(f"recording to {target_name}")
            # In the run: whoever is killed leaves nothing elsewhere.
            notes = path / f"{NOTES}.{socket.gethostname()}-{os.getpid()}"
            create(notes).close()
            try:
                environment = os.environ | arming.hooked(str(path), "record", options)
                environment |= {NOTES_VARIABLE: str(notes)}
                with _watched(path, str(target_name), live=live, address=address) as sink:
                    code = launch(command_line, env=environment, output=sink)
                messages = _messages(notes)
            finally:
                notes.unlink(missing_ok=True)
            code, following = _close(path, target_name, command_line, code, messages)
        _end(target, output, following, force=force)
        return code
    except (ChopperError, OSError) as exc:
        if code is None:
            if isinstance(exc, ChopperError):
                raise
            raise CaptureError(f"recording cannot start: {exc}") from exc
        # The command has ended: whatever fails from here on, its exit code is the answer.
        say(str(exc))
        return code or 1


def _places(output: Path | str | None, *, force: bool) -> tuple[Path, Path]:
    """Return where to record, and what messages call it."""
    from chopper.recording.claim import choose_output
    from chopper.storage import remote

    if isinstance(output, str):
        remote.check_upload(output, force=force)
        output = Path("runs", remote.name_of(output))
    if output is not None:
        return output, output
    target = choose_output(None, None)
    return target, _relative(target)


def _end(run: Path, output: Path | str | None, following: str | None, *, force: bool) -> None:
    """Say what to do next, and copy a recorded run to its address, if it has one; it stays here."""
    from chopper.storage import remote

    if following is not None:
        say(f"next: {following}")
    if isinstance(output, str):
        try:
            remote.upload(run, output, force=force)
        except ChopperError as exc:
            raise OutputError(f"{exc}; the run is in {run}") from exc
        say(f"copied to {output}")


def _check_combination(*, memory: bool, counters: bool, no_trace: bool, live: bool) -> None:
    """Refuse options that exclude each other or that this terminal cannot serve."""
    if (memory or counters) and no_trace:
        option = "--memory" if memory else "--counters"
        raise UsageError(
            f"{option} belongs to the trace, which --no-trace disables; use one of them"
        )
    if live and not sys.stderr.isatty():
        raise UsageError("--live needs a terminal on stderr; --prometheus works without one")


def _relative(path: Path) -> Path:
    """The path from the current directory, where there still is one."""
    try:
        return Path(os.path.relpath(path))
    except FileNotFoundError:
        return path


_POLL_S = 1.0
_DRAIN_S = 5.0


class Watch:
    """Polls a run once a second in a thread of its own.

    Args:
        path: the run's directory.
        attribute: also say what bounds the run, as ``chopper analyze`` does, after each new trace.
    """

    def __init__(self, path: Path, *, attribute: bool) -> None:
        from chopper.recording.live import LiveRun

        self._live = LiveRun(path)
        self._attribute = attribute
        self._stop = threading.Event()
        self._path = path
        self._seen: list[Path] = []
        self.latest: Snapshot = self._live.poll()
        self.verdict = ""
        """What bounds the run, in a sentence."""
        self._thread = threading.Thread(target=self._run, name="chopper-watch", daemon=True)
        self.changed: Callable[[], None] = lambda: None
        """Called after each poll."""

    def start(self) -> None:
        """Begin to poll."""
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_POLL_S):
            self.poll()

    def poll(self) -> None:
        """Read new rows and update the display."""
        self.latest = self._live.poll()
        if self._attribute and self.latest.traces != self._seen:
            # A rank that is still writing cannot be read yet: the next poll tries again.
            with contextlib.suppress(ChopperError, OSError):
                from chopper.api import attribute

                self.verdict = attribute(self._path).verdict.sentence
                self._seen = self.latest.traces
        self.changed()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._live.close()


@contextlib.contextmanager
def _panel(path: Path, title: str) -> Iterator[Callable[[IO[bytes]], None]]:
    """A panel at the bottom of the terminal; gives what takes the command's output.

    The output goes through this process line by line and scrolls by above the panel.
    """
    from rich.console import Console
    from rich.live import Live

    from chopper.reports import live as rendering

    console = Console(stderr=True)
    watch = Watch(path, attribute=True)
    pumps: list[threading.Thread] = []

    def pump(stream: IO[bytes]) -> None:
        for line in iter(stream.readline, b""):
            text = line.decode(errors="replace").rstrip("\n")
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    def take(stream: IO[bytes]) -> None:
        pumps.append(threading.Thread(target=pump, args=(stream,), daemon=True))
        pumps[-1].start()

    with Live(rendering.panel(watch.latest, title), console=console, auto_refresh=False) as display:
        watch.changed = lambda: display.update(
            rendering.panel(watch.latest, title, watch.verdict), refresh=True
        )
        watch.start()
        try:
            yield take
        finally:
            # All that held the pipe has ended, or was ended: what is left of it comes at once.
            for thread in pumps:
                thread.join(timeout=_DRAIN_S)
            watch.stop()
            watch.poll()


@contextlib.contextmanager
def _endpoint(path: Path, address: tuple[str, int]) -> Iterator[int]:
    """Serve the run's metrics meanwhile; gives the port.

    Raises:
        ChopperError: the address cannot be taken, or prometheus-client is missing.
    """
    from chopper.recording.live import serve

    watch = Watch(path, attribute=False)
    port, stop = serve(address, lambda: watch.latest)
    watch.start()
    try:
        yield port
    finally:
        stop()
        watch.stop()


@contextlib.contextmanager
def _watched(
    path: Path, title: str, *, live: bool, address: tuple[str, int] | None
) -> Iterator[Callable[[IO[bytes]], None] | None]:
    """Serve the endpoint and show the panel as asked; yields the panel's sink of output, if any."""
    with contextlib.ExitStack() as stack:
        if address is not None:
            port = stack.enter_context(_endpoint(path, address))
            say(f"metrics at http://{address[0]}:{port}/metrics")
        yield stack.enter_context(_panel(path, title)) if live else None


def _close(
    path: Path, target_name: Path, command_line: tuple[str, ...], code: int, messages: _Messages
) -> tuple[int, str | None]:
    """Make a run from the ranks' files and print a summary.

    Returns:
        The exit code, and what to do next, if anything was recorded.
    """
    from chopper.recording.finish import OF_WHOLE_RUN, finalize
    from chopper.recording.handover import HANDED_OVER
    from chopper.storage import processes
    from chopper.storage.parts import read_manifest
    from chopper.wording import some

    failed = False
    for file in path.glob(f".rank-*.{HANDED_OVER}"):  # its rank was killed while it received
        shutil.rmtree(file, ignore_errors=True)
    owners = sorted({owner for _, owner in processes.recorders(path)})
    try:
        run = finalize(path, command=command_line, exit_code=code)
    except RunFormatError:
        ended = f"; the command ended with exit code {code}" if code else ""
        why = (
            _why_nothing(messages, command_line)
            if path.is_dir()
            else f"the command removed the output directory {target_name}"
        )
        say(f"nothing was recorded: {why}{ended}")
        return code or 1, None
    except OutputError as exc:
        try:
            run = read_manifest(path)
        except RunFormatError:
            say(f"nothing was recorded: {exc}")
            return code or 1, None
        say(f"{exc}; what the ranks recorded is kept and readable")
    try:
        if owners:
            say(f"{some(owners)} still recording: the last to end completes the run")
            run.findings = [f for f in run.findings if f.code not in OF_WHOLE_RUN]
        _summarize(run, path, target_name, code)
    except (ChopperError, OSError) as exc:
        say(f"warning: the recording cannot be read back: {exc}")
        failed = True
    following = "chopper analyze {RUN}"
    if any(f.code == "run.ranks_missing" for f in run.findings):
        following = "chopper gather {RUN} THOSE-OF-OTHER-NODES -o all-nodes"
    return code or int(failed), next_command(following, RUN=[target_name])


_LAUNCHERS_ELSEWHERE = ("ray", "deepspeed", "mpirun", "mpiexec", "srun", "accelerate", "fabric")


_Messages = dict[str, str]
"""The first message about each stage that the hooked processes left about themselves."""


def _messages(notes: Path) -> _Messages:
    first: _Messages = {}
    with contextlib.suppress(FileNotFoundError):  # the command removed the run
        for line in notes.read_text(encoding="utf-8", errors="replace").splitlines():
            stage, _, rest = line.partition("\t")
            first.setdefault(stage, rest.partition("\t")[2])
    return first


def _why_nothing(messages: _Messages, command_line: tuple[str, ...]) -> str:
    """Return why no rank recorded, and what to do about it, in one line."""
    if "failed" in messages:
        return messages["failed"]
    if "chopper-missing" in messages:
        return (
            f"chopper cannot be imported in the command's Python ({messages['chopper-missing']}); "
            "install chopper-profiler there"
        )
    if "recording" in messages:
        return "a process began to record and could not write; see its message above"
    elsewhere = ""
    launcher = Path(command_line[0]).name
    if launcher in _LAUNCHERS_ELSEWHERE:
        elsewhere = (
            f"; processes that {launcher} starts on other hosts, or in a cluster that was already "
            "running, do not inherit this command's environment: pass on PYTHONPATH and all "
            "variables that begin with CHOPPER_"
        )
    if "torch" in messages:
        return (
            "torch was imported, but nothing trained (no forward in training mode with an "
            "optimizer, no backward pass, no step) and no module was called three times; to record "
            f"functions by time: chopper record --from-import -- …{elsewhere}"
        )
    if "python" in messages:
        return f"Python was started, but torch was never imported{elsewhere}"
    return (
        f"`{shlex.join(command_line[:3])}` started no Python that could be hooked; options -S, -I "
        "and -E of Python and a cleared environment (env -i, sudo) prevent this: call "
        "chopper.profile in the program instead"
    )


def _summarize(run: m.RunManifest, path: Path, target_name: Path, code: int) -> None:
    from chopper.storage.layout import rank_dir_name
    from chopper.storage.parts import other_processes, recorded_steps
    from chopper.wording import plural

    part = run.ranks[0]
    steps = recorded_steps(path / rank_dir_name(part.rank))
    first, stop = part.traced_steps or (0, 0)
    if first < stop:
        last = f"s {first} to {stop - 1}" if stop - first > 1 else f" {first}"
        trace = f"step{last} traced"
    elif part.traces:
        trace = "a trace without whole steps"
    else:
        reports = [r.reason for r in part.collectors if r.name == "torch_trace" and r.reason]
        trace = ": ".join(["no trace", *reports])
    say(f"recorded {plural(len(run.ranks), 'rank')}, {plural(steps.num_rows, 'step')}, {trace}")
    further = other_processes(path, target_name)
    for finding in (*further, *run.findings, *(f for p in run.ranks for f in p.findings)):
        say(f"{finding.severity}: {finding.message}")
    for report in part.collectors:
        if report.status == "failed":
            say(f"collector {report.name} failed: {report.reason}")
    if code:
        say(f"the command ended with exit code {code}; its recording is kept")
