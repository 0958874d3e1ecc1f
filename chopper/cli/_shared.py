"""Arguments, options and steps that several commands share."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from chopper.addresses import is_address
from chopper.cli.output import print_json, print_page, print_path, progress
from chopper.errors import OutputError, UsageError, printable, say, tell
from chopper.wording import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from click.shell_completion import CompletionItem

    from chopper.analyzers.attribution import Attribution
    from chopper.engines import Engine
    from chopper.reports.page import Page

    _Command = TypeVar("_Command", bound=Callable[..., Any])
    _Choice = click.Choice[str]
else:
    _Choice = click.Choice  # generic to type checkers only in some versions of click

_SUFFIXES = (
    *(".gz", ".zst", ".json", ".trace", ".pt", ".sqlite", ".rpd", ".db", ".csv", ".pickle"),
    ".parquet",
)


_RARE = frozenset(
    re.findall(
        r"\w+",
        "workers ray collect counters no_trace no_shapes from_import trace_limit gather prometheus "
        "time_zone fail_on_point allow_different all_steps timeout_s memory_bytes "
        "threads points prices flows_count queue_pairs_count node_latency_s network_latency_s "
        "uplinks_count columns "
        "sequence_parallel imbalance_ratio optimizer_kind loss attention kernels gathers_logits "
        "keeps_logits fragmentation_ratio workspace_bytes bucket_count clock_mhz from_device "
        "check efficiency_ratio host_bandwidth_bytes_per_s host_memory_bytes",
    )
)


def is_rare(option: click.Parameter) -> bool:
    """Return whether an option is rare: for large runs, other devices, single assumptions."""
    return option.name in _RARE or not (option.expose_value or option.is_eager)


class Command(click.Command):
    """A command whose help lists rare options last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the common options."""
        self._list(ctx, formatter, "Options", rare=False)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the rare options, below all else."""
        super().format_epilog(ctx, formatter)
        self._list(ctx, formatter, "Large runs and special cases", rare=True)

    def _list(
        self, ctx: click.Context, formatter: click.HelpFormatter, title: str, *, rare: bool
    ) -> None:
        options = (p for p in self.get_params(ctx) if is_rare(p) == rare)
        # Arguments without a word of help stand in the usage line.
        if rows := [row for p in options if (row := p.get_help_record(ctx)) and row[1]]:
            with formatter.section(title):
                formatter.write_dl(rows)


class NamedPath(click.Path):
    """A path with a name: an empty one, of an unset variable, would be the current directory."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path.

        Raises:
            click.BadParameter: it has no name.
        """
        if value == "":
            self.fail("an empty name (an unset variable?)", param, ctx)
        if isinstance(value, str) and "://" in value:
            return self.address(value, param, ctx)
        return super().convert(value, param, ctx)

    def address(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path | str:
        """Refuse an address where a path is expected."""
        self.fail(f"{value}: is an address, expected a path on this machine", param, ctx)


class RunPlace(NamedPath):
    """A path that a run is written to, or an address that it is copied to when it is whole."""

    def address(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path | str:
        """Return the address, or the path of one on this machine.

        Raises:
            InputError: that is no path.
            click.BadParameter: nothing follows ``://``, or it leads upwards.
        """
        from chopper.storage.remote import on_this_machine

        address = value.rstrip("/")
        if not is_address(address):
            self.fail(f"{value}: names no place (an unset variable?)", param, ctx)
        if (path := on_this_machine(address)) is not None:
            return path
        if {".", ".."} & {*address.split("/")}:
            self.fail(f"{value}: leads upwards; name the place itself", param, ctx)
        return address


def paths(_context: click.Context, _parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Have the shell complete files and directories: runs and traces."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(typed, type="file")]


class OneOf(_Choice):
    """One of some names; another one is a single line with those that are near."""

    def __init__(self, noun: str, names: Iterable[str]) -> None:
        super().__init__([*names])
        self._noun = noun

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002
        """Return the name that is meant.

        Raises:
            UsageError: there is none.
        """
        from chopper.quantities import one_of

        return one_of(self._noun, value, self.choices)


def completing(
    names: Callable[[], Iterable[str]],
) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return a completion of these names, also of the last one in a list with commas.

    The names are asked for only then.
    """

    def complete(_context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
        *named, begun = typed.lower().split(",")
        offered = (name for name in names() if name.startswith(begun) and name not in named)
        return [",".join([*named, name]) for name in offered]

    return complete


def _option(flag: str, help: str, **how: Any) -> Callable[[_Command], _Command]:
    """Return an option whose value is kept for :func:`attributed`, not passed to the command."""

    def remembered(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value is not None:
            context.meta[f"chopper.{parameter.name}"] = value

    return click.option(flag, callback=remembered, expose_value=False, help=help, **how)


_OPTIONS = {
    "ranks": _option(
        "--ranks",
        "Ranks to analyze in detail: 3,17,100-107. [default: all, or of a large run those that "
        "matter]",
        metavar="LIST",
    ),
    "steps": _option(
        "--steps",
        "Steps to analyze, by their numbers: 10-19. [default: all that were traced]",
        metavar="LIST",
    ),
    "workers": _option(
        "--workers",
        "Worker processes. [default: one per core, where that is faster]",
        type=click.IntRange(min=1),
        metavar="N",
    ),
    "ray": _option(
        "--ray",
        "Run on a Ray cluster: the one at ADDRESS, or this machine's.",
        is_flag=False,
        flag_value="auto",
        metavar="[ADDRESS]",
    ),
    "memory": _option("--memory", "Bound the memory of each worker: 2GB.", metavar="SIZE"),
}
"""Options of engines that attribute a run, and of its ranks and steps to look at."""


def engines(*names: str) -> Callable[[_Command], _Command]:
    """Return a decorator that adds these options of engines; all without names."""

    def decorated(command: _Command) -> _Command:
        for name in reversed(names or tuple(_OPTIONS)):
            command = _OPTIONS[name](command)
        return command

    return decorated


def runs(command: _Command) -> _Command:
    """Add the argument ``sources``, which every command that reads one run takes, and engines."""
    sources = click.argument(
        "sources", metavar="RUN...", nargs=-1, required=True, shell_complete=paths
    )
    return sources(engines()(command))


def given(*names: str) -> str:
    """Return those of these parameters of the command that were given, as options in words."""
    context = click.get_current_context()
    return ", ".join(
        parameter.opts[-1]
        for parameter in context.command.params
        if parameter.name in names
        and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    )


def check_of_experiments(*used: str) -> None:
    """Refuse options that an experiment would leave unused.

    Args:
        used: parameters of the command that are used.

    Raises:
        UsageError: others were given.
    """
    names = (str(parameter.name) for parameter in click.get_current_context().command.params)
    if unused := given(*(name for name in names if name not in used)):
        raise UsageError(f"{unused}: of runs alone, and found an experiment; name one of its runs")


as_json = click.option("--json", "as_json", is_flag=True, help="Print the documented JSON form.")


def output(help: str) -> Callable[[_Command], _Command]:
    """Return a decorator that adds ``-o`` for a file or directory."""
    return click.option("-o", "--output", type=NamedPath(), help=help)


def run_output(help: str) -> Callable[[_Command], _Command]:
    """Return a decorator that adds ``-o`` for a run directory, here or at an address."""
    return click.option("-o", "--output", type=RunPlace(), help=help)


def force(help: str) -> Callable[[_Command], _Command]:
    """Return a decorator that adds ``--force``."""
    return click.option("--force", is_flag=True, help=help)


def report_output(help: str, default: str = "") -> Callable[[_Command], _Command]:
    """Return a decorator that adds ``-o`` and ``--force`` for a report."""

    def decorated(command: _Command) -> _Command:
        formats = f"{help}; .html, .md, .json or .txt chooses the format.{default}"
        return output(formats)(force("Replace the file when it exists.")(command))

    return decorated


def check_report(output: Path, sources: Sequence[str] = (), *, force: bool) -> str:
    """Return the format of a report that can be written, before minutes are spent on its run.

    Raises:
        UsageError: no report has this extension.
        OutputError: it cannot be written, or would harm what is read.
    """
    from chopper.reports import format_of

    format = format_of(output)
    check_file(output, sources, force=force, option="-o", example="report.html")
    if format == "html":
        from chopper.reports.to_html import prefetch_plotly

        # Compressing Plotly takes as long as reading a trace and needs nothing of it.
        prefetch_plotly()
    return format


def check_file(
    output: Path, sources: Sequence[str], *, force: bool, option: str, example: str
) -> None:
    """Check that a file can be written, and is not read by the command.

    Raises:
        OutputError: it cannot, or is.
    """
    if output.is_dir():
        raise OutputError(f"{output}: is a directory; give a file, for example {output}/{example}")
    if not output.parent.is_dir():
        raise OutputError(
            f"{output}: the directory {output.parent} does not exist; create it or choose another "
            f"{option}"
        )
    if output.exists() and not force:
        raise OutputError(
            f"{output}: exists; pass --force to replace it, or choose another {option}"
        )
    if sources:
        from chopper.ingest import check_page

        check_page(output, sources)


def write_report(output: Path, text: str) -> int:
    """Write a report at once or not at all; return its size in bytes."""
    from chopper.storage.files import write_atomic

    data = text.encode()
    write_atomic(output, data)
    return len(data)


def present(
    page: Callable[[], Page],
    document: Callable[[], Any],
    *,
    as_json: bool,
    output: Path | None = None,
    brief: Callable[[Page], Page] | None = None,
    instead: bool = False,
) -> None:
    """Write a result to a file; and print it, or what `brief` leaves of it, or its JSON form.

    With `instead`, a page that is written to a file is not printed: its name is.

    Whoever reads what is printed may leave before its end, and the file is there; a file that
    cannot be written leaves the print.
    """
    from chopper.reports import format_of, formatted

    try:
        if output is not None:
            write_report(output, formatted(page, document, format_of(output)))
            if instead and not as_json:
                print_path(output)
            else:
                tell(f"written: {output}")
    finally:
        if as_json:
            print_json(document())
        elif output is None or not instead:
            print_page(brief(page()) if brief else page())


def engine_for(files: Iterable[Path], counted: deque[str]) -> Engine:
    """Return the engine for files, as the command's options say or what pays.

    Args:
        files: to be read, of any format.
        counted: its last element is replaced by how many tasks are done.
    """
    from chopper.engines.choice import EngineOptions, engine_of, trace_bytes
    from chopper.quantities import size_bytes

    meta = click.get_current_context().meta
    memory = meta.get("chopper.memory")
    options = EngineOptions(
        workers=meta.get("chopper.workers"),
        memory_bytes=None if memory is None else size_bytes(memory, "--memory"),
        ray=meta.get("chopper.ray"),
        progress=lambda label, count: counted.append(f" ({label}: {plural(count, 'task')} done)"),
    )
    # To the command's end: what the run's tables are read from. A cluster is joined once.
    engine: Engine | None = meta.get("chopper.engine")
    if engine is None:
        chosen = engine_of(trace_bytes(files), options)
        engine = click.get_current_context().with_resource(chosen)
        if options.ray is not None:
            meta["chopper.engine"] = engine
    return engine


_SIDES = ("A", "B")
_STATED = "chopper.device"
"""Where a command keeps the devices that the user named: (side or "", rank or None) → name."""
_TYPED, _TYPED_MAPS = "chopper.device.typed", "chopper.columns.typed"


def device_name(text: str, option: str) -> str:
    """Return the id of a device by any usual name; say which one a family's name was taken for."""
    from chopper.hardware.devices import meant, short_name

    device, *alternatives = meant(text)
    if alternatives:
        names = ", ".join(map(short_name, alternatives[:5]))
        say(
            f"{option} {text}: taken as {short_name(device)} ({device.label}); other choices: "
            f"{names}"
        )
    return short_name(device)


def device_names() -> Iterable[str]:
    """Return the names of all devices of the table, for the shell to complete."""
    from chopper.hardware.devices import known_devices, short_name

    return map(short_name, known_devices())


def read_options(command: _Command) -> _Command:
    """Add ``--device``, ``--layout`` and ``--map`` of a command that takes one run."""
    return _add_device_option(_add_layout_option(_add_map_option(command)), "", ("",))


def read_options_of_two(command: _Command) -> _Command:
    """Add ``--device``, ``--layout`` and ``--map`` of a command that takes the runs A and B."""
    more = "; A:NAME, of one of the runs"
    options = _add_layout_option(_add_map_option(command))
    return _add_device_option(options, more, ("", *_SIDES))


_LAYOUT = "chopper.layout"
"""Where a command keeps the layout that the user names, in a list of one."""


def _add_layout_option(command: _Command) -> _Command:
    def remembered(context: click.Context, _: click.Parameter, text: str | None) -> None:
        if text is not None:
            from chopper.models.layouts import parse_layout

            context.meta[_LAYOUT] = [parse_layout(text).text]

    return click.option(
        "--layout",
        metavar="DIM=N,…",
        callback=remembered,
        expose_value=False,
        help="How the job was divided over its ranks, where the recording does not tell: "
        "tp=4,pp=4,dp=4. The first varies fastest from rank to rank (Megatron's order is "
        "tp,cp,dp,pp); sizes multiply to the ranks. ep=N splits dp × cp among experts, vp=N is "
        "virtual stages per rank.",
    )(command)


_MAPPED = "chopper.columns"
"""Where a command keeps which column of a table of spans is what, as the user says."""


def _add_map_option(command: _Command) -> _Command:
    def remembered(context: click.Context, _: click.Parameter, values: Sequence[str]) -> None:
        if values:
            from chopper.collectors.formats.spans.fields import columns_of

            context.meta[_MAPPED], context.meta[_TYPED_MAPS] = columns_of(values), values

    return click.option(
        "--map",
        "columns",
        multiple=True,
        metavar="FIELD=COLUMN,…",
        callback=remembered,
        expose_value=False,
        help="Columns of a table of spans (Parquet, CSV, Chrome JSON) whose names do not say what "
        "they are: rank=worker,step=it,op=what,start=t0,duration=took,unit=ms. May be repeated.",
    )(command)


def mapped() -> dict[str, str] | None:
    """Return which column of a table of spans is what, as the user says; None for nothing."""
    return click.get_current_context().meta.get(_MAPPED) or None


def _add_device_option(command: _Command, more: str, sides: Sequence[str]) -> _Command:
    def remembered(context: click.Context, _: click.Parameter, values: Sequence[str]) -> None:
        devices: dict[tuple[str, int | None], str] = {}
        for text in values:
            side, ranks, name = _device_parts(text, sides)
            device = device_name(name, "--device")
            for rank in ranks:
                if devices.setdefault((side, rank), device) != device:
                    of = "" if rank is None else f" of rank {rank}"
                    first = devices[side, rank]
                    raise UsageError(f"--device: two devices{of}, {first} and {device}; name one")
        context.meta[_STATED] = devices
        context.meta[_TYPED] = values

    return click.option(
        "--device",
        multiple=True,
        metavar="[RANK=]NAME",
        callback=remembered,
        expose_value=False,
        shell_complete=completing(device_names),
        help="The device that it was recorded on, where the recording names none or a wrong one: "
        f"h100-sxm; 3=h100-sxm, of rank 3{more}. May be repeated.",
    )(command)


def _device_parts(text: str, sides: Sequence[str]) -> tuple[str, Sequence[int | None], str]:
    """Take apart ``A:0-3=h100-sxm`` -> side, ranks (None for all), name."""
    from chopper.quantities import integers

    side, colon, rest = text.partition(":")
    if not colon:
        side, rest = "", text
    if side not in sides:
        runs = "A:NAME or B:NAME" if len(sides) > 1 else "NAME or RANK=NAME"
        raise UsageError(f"--device {printable(text)!r}: expected {runs}")
    ranks, equals, name = rest.rpartition("=")
    return side, integers(ranks, "--device: ranks") if equals else [None], name


def typed_read_options() -> list[str]:
    """Return the options as the user typed them, for the next command that is proposed."""
    meta = click.get_current_context().meta
    typed = {"--device": _TYPED, "--map": _TYPED_MAPS, "--layout": _LAYOUT}
    options = ((option, meta.get(key) or ()) for option, key in typed.items())
    return [word for option, values in options for value in values for word in (option, value)]


def read_facts(side: str = "") -> dict[str, Any]:
    """Return what the user says of a run, by the names of arguments of ``pipeline.read``.

    Args:
        side: which of two runs.
    """
    layout = click.get_current_context().meta.get(_LAYOUT)
    return {"device": stated(side), "columns": mapped(), "layout": layout and layout[0]}


def stated(side: str = "") -> dict[int | None, str] | None:
    """Return the devices that the user named for a run, by rank; None where none is named.

    Args:
        side: which of two runs; what is named for both counts where nothing is for the one.
    """
    stated = click.get_current_context().meta.get(_STATED) or {}
    both = {rank: name for (of, rank), name in stated.items() if not of}
    return both | {rank: name for (of, rank), name in stated.items() if of and of == side} or None


def attributed(sources: Sequence[str], name: str = "") -> Attribution:
    """Load and attribute a run, by its name among several, while the terminal shows progress."""
    from chopper.quantities import integers
    from chopper.storage.remote import files_of

    counted: deque[str] = deque([""], maxlen=1)
    meta = click.get_current_context().meta
    ranks, steps = (
        None
        if (listed := meta.get(f"chopper.{option}")) is None
        else integers(listed, f"--{option}")
        for option in ("ranks", "steps")
    )
    facts = read_facts(name)
    with progress(f"looking for {name or 'the run'}", counted):
        files = files_of(sources, counted.append)
    engine = engine_for(files, counted)
    # Workers load the pipeline at the same time.
    from chopper import pipeline
    from chopper.attribution_cache import entry_of

    with progress(f"looking for {name or 'the run'}", counted):
        entry = entry_of(sources, ranks, steps, *facts.values())
        known = None if entry is None else entry.read()
    if known is not None:
        return known
    with progress(f"reading {name or 'the run'}", counted):
        run = pipeline.read(list(sources), engine, **facts)
    with progress(f"attributing {name}".rstrip(), counted):
        attribution = pipeline.attribute(run, engine, ranks, steps)
    if meta.get("chopper.engine") is not engine:
        engine.close()  # what is held stays; idle workers take memory that the views need
    if entry is not None:
        entry.write(attribution)
    return attribution


def run_name(trace: Path) -> str:
    """Return a trace's name without the extensions of the formats that are read."""
    name = trace.name
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name
