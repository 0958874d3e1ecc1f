"""What all subcommands of ``chopper estimate`` share: options with units, and how a result is shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from chopper import quantities
from chopper.cli._output import print_json
from chopper.cli._path import NamedPath
from chopper.errors import OutputError, UsageError

if TYPE_CHECKING:
    from chopper.analyzers.estimates import Estimate
    from chopper.reports.estimates.page import Page

    _ParamType = click.ParamType[Any]
else:
    # Generic to type checkers only in some versions of click.
    _ParamType = click.ParamType


class Quantity(_ParamType):
    """A number with a unit; what cannot be read is one line, not a usage page."""

    def __init__(self, name: str, read: Callable[[str, str], Any]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read the text that the user gave; defaults that are numbers stay."""
        if not isinstance(value, str):
            return value
        name = param.opts[-1] if param is not None and param.opts else self.name
        return self._read(value, name)


_E = TypeVar("_E", bound="Estimate")


def _time_s(text: str, name: str) -> float:
    """A time with its unit: 90 of a run are days to one reader and seconds to another.

    Raises:
        UsageError: no time, no unit, or none that anything here takes.
    """
    value = quantities.seconds(text, name)
    if not text.strip()[-1].isalpha():
        raise UsageError(f"{name} {text!r}: no unit; expected a time such as 90d, 4.5us or 30ms")
    quantities.between(value, 1e-12, 3.2e11, f"{name} in s")
    return value


def _rate_bytes_per_s(text: str, name: str) -> float:
    value = quantities.rate_bytes_per_s(text, name)
    quantities.between(value, 1, 1e18, f"{name} in B/s")
    return value


SIZE = Quantity("size", quantities.size_bytes)
RATE = Quantity("rate", _rate_bytes_per_s)
TIME = Quantity("time", _time_s)
COUNT = Quantity("count", quantities.count)
NUMBER = Quantity("number", quantities.number)


def shown(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --json, -o and --force to a subcommand."""
    for option in (
        click.option("--force", is_flag=True, help="Replace the file when it exists."),
        click.option(
            "-o",
            "--output",
            type=NamedPath(),
            help="File to write besides; .html (with figures), .md, .json or .txt.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print the documented JSON form."),
    ):
        function = option(function)
    return function


def given(name: str) -> bool:
    """Whether the user gave this parameter on the command line."""
    context = click.get_current_context()
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def contradict(*names: str) -> None:
    """Refuse options of which at most one can be given.

    Raises:
        UsageError: two of them were.
    """
    found = [f"--{name.replace('_', '-')}" for name in names if given(name)]
    if len(found) > 1:
        raise UsageError(f"{' and '.join(found)} contradict each other; give one of them")


def check(output: Path | None, *, force: bool) -> None:
    """Refuse an output that cannot be written before anything is computed.

    Raises:
        UsageError: no format has its extension.
        OutputError: it exists, is a directory, or has no folder.
    """
    if output is None:
        return
    from chopper.reports import format_of

    format_of(output)
    if output.is_dir():
        raise OutputError(f"{output}: is a directory; give a file, for example {output}/x.html")
    if not output.parent.is_dir():
        raise OutputError(f"{output}: the directory {output.parent} does not exist; create it")
    if output.exists() and not force:
        raise OutputError(f"{output}: exists; pass --force to replace it, or choose another -o")


def show(estimate: _E, page: Callable[[_E], Page], *, as_json: bool, output: Path | None) -> None:
    """Print the estimate, and write it where it was asked for."""
    from chopper.reports.estimates.page import render, text

    made = page(estimate)
    if as_json:
        print_json(estimate.to_dict())
    else:
        click.echo(text(made), nl=False)
    if output is not None:
        from chopper.reports import format_of
        from chopper.storage.files import write_atomic

        write_atomic(output, render(made, estimate, format_of(output)).encode("utf-8", "replace"))
        click.echo(f"written: {output}", err=True)
