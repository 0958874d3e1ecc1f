"""The ``chopper`` command: one module per subcommand, loaded when it is called.

Results go to stdout; messages, progress and next commands to stderr. Exit codes: 0 ok, 1 an error
or a failed gate, 2 a wrong command line; ``record`` and ``bench`` pass the command's own on.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NoReturn

import click

from chopper.addresses import remember
from chopper.errors import (
    CaptureError,
    ChopperError,
    OutputError,
    UsageError,
    message_line,
    reason_of,
    say,
)
from chopper.fresh_python import ended_by_signals, leave_out_pandas
from chopper.quantities import one_of
from chopper.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

    from click.shell_completion import CompletionItem

_FIRST = {
    "record": "Record any training command, without changing its code.",
    "report": "Write the report of a run or trace: .html, .md, .json or .txt.",
    "analyze": "Show on the terminal where the time went: what to try first, every cause.",
    "compare": "Compare two runs: what changed, cause by cause?",
    "whatif": "Predict how long a run would take with something changed.",
    "estimate": "Estimate memory, offload, networks, limits and cost from formulas.",
    "export": "Write a run for Perfetto, wandb, MLflow or TensorBoard, or as Parquet or CSV.",
    "doctor": "Show what can be collected on this machine, and what is missing.",
}
_COMMANDS = _FIRST | {
    "gate": "Fail when a run is slower than its history, or than another run: for CI.",
    "query": "Run SQL over a run's tables and views, with DuckDB.",
    "import": "Import traces of torch, Nsight Systems, rocprofv3 or rpd as one run.",
    "gather": "Combine the runs of a job's nodes into one.",
    "bench": "Record a reference workload, attribute it, show where the time went.",
    "workloads": "List the reference workloads and their options.",
    "sweep": "Measure a command at several clocks or power caps, and set them back.",
    "calibrate": "Measure what this machine achieves: GEMM, copies, links, launches.",
    "schema": "Print the tables that a run holds, or one of them.",
    "completion": "Print the shell completion script for bash, zsh or fish.",
}
_LOADING_TORCH = frozenset(("bench", "doctor", "calibrate"))
_RECORDING = frozenset(("bench", "record", "sweep", "calibrate"))
_READING = frozenset(
    ("analyze", "compare", "gate", "report", "import", "gather", "query", "whatif")
)
"""Commands that start no program of the user."""
_WITHOUT_PANDAS = _READING | {"record", "bench"}
_OTHER_NAMES = {
    "record": "profile trace capture launch exec start train",
    "report": "view show open html visualize plot ui",
    "analyze": "stats stat summary summarize breakdown explain top tree print inspect",
    "compare": "diff",
    "gate": "ci regression baseline history",
    "query": "sql",
    "whatif": "predict simulate replay",
    "export": "convert dump perfetto",
    "import": "load ingest parse",
    "gather": "merge combine join",
    "bench": "benchmark benchmarks workload",
    "doctor": "env info check status devices collectors",
    "--help": "help commands",
    "--version": "version",
}
"""Command → what other tools call it."""
_PROGRAM = re.compile(
    r"python[\d.]*|torchrun|accelerate|deepspeed|mpirun|mpiexec|srun|lightning|fabric|uv|(ba)?sh"
    r"|.+\.(py|sh)"
)
"""What a training command begins with. No other program is started without ``record``."""


def meant(words: list[str]) -> list[str]:
    """Return a command line with the command that was left out or has another name now."""
    first, *rest = words or [""]
    name = first.strip().lower()
    if name == "run":
        return ["record" if _is_program(rest) else "bench", *rest]
    if name == "compare" and any(w.startswith(("--history", "--fail-on", "--junit")) for w in rest):
        return ["gate", *rest]
    if name in _COMMANDS or not name:
        return words
    if _PROGRAM.fullmatch(Path(first).name):
        return ["record", *words]
    is_source = re.search(r"[./*?\[]", first) or os.path.exists(first)  # noqa: PTH110
    return ["report", *words] if is_source else words


def _is_program(words: list[str]) -> bool:
    """Return whether the words behind ``run`` are a program and its options, not a workload's."""
    from chopper.cli.record_ import command
    from chopper.experiments.launch import is_program
    from chopper.experiments.prepare import program

    try:
        context = command.make_context("record", [*words], resilient_parsing=True)
    except click.UsageError:  # an option that only a workload takes
        return False
    name = next(iter(context.params["command_line"]), "")
    return program(name) is None and is_program(name)


def _suggested(words: list[str]) -> str | None:
    """Return Chopper's command for the name of another tool's, or of a workload."""
    from chopper.experiments.prepare import program

    first, *rest = words
    name = first.strip().lower()
    name_here = next((ours for ours, names in _OTHER_NAMES.items() if name in names.split()), None)
    if program(name) is not None:
        return shlex.join(["chopper", "bench", *words])
    if name_here == "record" and rest and meant(rest)[0] == "report":
        name_here = "report"
    return name_here and shlex.join(["chopper", name_here, *rest])


class LazyGroup(click.Group):
    """Group that loads a command when it is called: the ``command`` of a module.

    Set ``noun`` (what they are called), ``summaries`` (name → one line), ``module`` (of a name,
    with ``{}`` in its place; ``elsewhere`` names those in the module of another, and their
    functions) and ``first_count`` (how many the first list of the help shows).
    """

    noun: str
    summaries: Mapping[str, str]
    module: str
    elsewhere: ClassVar[Mapping[str, tuple[str, str]]] = {}
    first_count: int | None = None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return a command, or raise a UsageError with the names nearest to an unknown one."""
        if not args[0].startswith("-") and not ctx.resilient_parsing:  # as completion parses
            args = [one_of(self.noun, args[0], self.summaries), *args[1:]]
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of their declaration."""
        return list(self.summaries)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Load a command; None when there is none of this name."""
        if name not in self.summaries:
            return None
        module, function = self.elsewhere.get(name, (name, "command"))
        command: click.Command = getattr(
            importlib.import_module(self.module.format(module)), function
        )
        return command

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands without loading any, then the options."""
        listed = [*self.summaries.items()]
        first = listed[: self.first_count]
        for title, rows in (("Commands", first), ("More commands", listed[len(first) :])):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
        click.Command.format_options(self, ctx, formatter)


class _Group(LazyGroup):
    noun = "command"
    summaries = _COMMANDS
    module = "chopper.cli.{}_"
    elsewhere: ClassVar[Mapping[str, tuple[str, str]]] = {
        "gate": ("compare", "gate"),
        "gather": ("import", "gather"),
        "workloads": ("bench", "workloads"),
        "completion": ("schema", "completion"),
    }
    first_count = len(_FIRST)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete commands, else files: a trace needs no command."""
        from click.shell_completion import CompletionItem

        return super().shell_complete(ctx, incomplete) or [CompletionItem(incomplete, type="file")]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not ctx.resilient_parsing:  # as completion parses
            args = meant(args)
        name = args[0].strip().lower()
        if name not in _COMMANDS and (suggested := _suggested(args)):
            raise UsageError(f"no command is called {args[0]!r}; did you mean: {suggested}")
        if name in _RECORDING and sys.platform != "linux":
            raise CaptureError(
                f"{name}: recording and measuring need Linux, this is {sys.platform}; analysis and "
                "reports work here, for example: chopper report TRACE"
            )
        if name in _LOADING_TORCH:
            _check_current_directory()
        return super().resolve_command(ctx, args)


@click.command(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--max-input",
    metavar="SIZE",
    help="Maximum unpacked size of a file from another tool, such as 40GB. [default: 200 times "
    "its size, limited by memory]",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda ctx, _param, wanted: _show_version(ctx) if wanted else None,
    help="Show the version and how it was built.",
)
def cli(max_input: str | None) -> None:
    """The hardware could do this step in X ms; it took Y ms: where did the rest go?

    \b
    Examples:
      chopper trace.json.gz                           # the report of a trace
      chopper record -o runs/mine -- torchrun --nproc-per-node 8 train.py
      chopper report runs/mine -o report.html
      chopper analyze runs/mine --by layer
    """
    if max_input is not None:
        from chopper.limits import VARIABLE
        from chopper.quantities import size_bytes

        size_bytes(max_input, "--max-input")
        os.environ[VARIABLE] = max_input  # for the processes that this one starts, too


def _show_version(ctx: click.Context) -> None:
    import platform

    from chopper.version import EXTENSIONS, build

    built = build()
    click.echo(
        f"chopper, version {__version__}\n"
        f"{built['form']}, commit {built['commit'] or 'unknown'}, "
        f"{built['extensions_count']} of {len(EXTENSIONS)} C extensions\n"
        f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    ctx.exit()


def _check_current_directory() -> None:
    """Refuse to load torch in a removed directory, where Intel's MKL would end the process."""
    try:
        os.getcwd()  # noqa: PTH109
    except OSError as exc:
        raise OutputError(
            f"the current directory cannot be used ({reason_of(exc)}); change to another one"
        ) from exc


def _end_unread() -> NoReturn:
    """Whoever read has left (``chopper … | head``): end without a word, as other tools do."""
    # What is still buffered would fail again when the interpreter ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)
    sys.exit(1)


def main() -> None:
    """Entry point: one line per error, never a traceback for what the user can mend."""
    words = sys.argv[1:]
    for line in words:
        remember(line)
    while words[:1] == ["--max-input"]:
        words = words[2:]
    word = "".join(meant(words)[:1])
    if word in _READING:
        # Arrow's own pool keeps what is freed: a report took a fifth more memory with it.
        os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    if word in _WITHOUT_PANDAS:
        leave_out_pandas()
    output = sys.stdout
    reads = word in _READING or word in ("export", "estimate")
    try:
        with ended_by_signals() if reads else contextlib.nullcontext():
            code = cli.main(standalone_mode=False)
        sys.stdout.flush()  # not at the interpreter's end, where nobody could catch it
    except click.UsageError as exc:
        click.UsageError(message_line(exc.format_message()), exc.ctx).show()
        sys.exit(2)
    except click.exceptions.Exit as exc:
        sys.exit(exc.exit_code)
    except click.Abort:
        say("interrupted")
        sys.exit(130)
    except click.ClickException as exc:
        exc.message = message_line(exc.message)  # type: ignore[misc]
        exc.show()
        sys.exit(exc.exit_code)
    except ChopperError as exc:
        from chopper.storage.remote import in_addresses

        say(in_addresses(str(exc)))
        sys.exit(exc.exit_code)
    except BrokenPipeError:
        _end_unread()
    except SystemExit as exc:
        # click catches the same error, and wraps the stream.
        if sys.stdout is not output:
            _end_unread()
        if reads and isinstance(exc.code, int) and exc.code > 128:
            name = signal.Signals(exc.code - 128).name
            say(f"ended by {name}")
        raise
    except OSError as exc:
        if exc.errno is None:
            raise
        if exc.filename is not None or exc.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            name = exc.filename
            where = (
                f"{os.fsdecode(name) if isinstance(name, str | bytes) else name}: " if name else ""
            )
            say(where + reason_of(exc))
            sys.exit(1)
        say(f"standard output: cannot be written ({exc.strerror})")
        # What is still buffered would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)
