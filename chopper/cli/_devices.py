"""The option ``--device`` of commands that take a run: the device that it was recorded on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click

from chopper.cli import _shared as shared
from chopper.errors import UsageError, printable, say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    _Command = TypeVar("_Command", bound=Callable[..., Any])

_SIDES = ("A", "B")
_TYPED = "chopper.device.typed"


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


def device(command: _Command) -> _Command:
    """Add ``--device`` of a command that takes one run."""
    return _option(command, "", ("",))


def device_of_two(command: _Command) -> _Command:
    """Add ``--device`` of a command that takes the runs A and B."""
    return _option(command, "; A:NAME, of one of the runs", ("", *_SIDES))


def _option(command: _Command, more: str, sides: Sequence[str]) -> _Command:
    def remembered(context: click.Context, _: click.Parameter, values: Sequence[str]) -> None:
        devices: dict[tuple[str, int | None], str] = {}
        for text in values:
            side, ranks, name = _parts(text, sides)
            device = device_name(name, "--device")
            for rank in ranks:
                if devices.setdefault((side, rank), device) != device:
                    of = "" if rank is None else f" of rank {rank}"
                    first = devices[side, rank]
                    raise UsageError(f"--device: two devices{of}, {first} and {device}; name one")
        context.meta[shared.STATED] = devices
        context.meta[_TYPED] = values

    return click.option(
        "--device",
        multiple=True,
        metavar="[RANK=]NAME",
        callback=remembered,
        expose_value=False,
        shell_complete=shared.completing(device_names),
        help="The device that it was recorded on, where the recording names none or a wrong one: "
        f"h100-sxm; 3=h100-sxm, of rank 3{more}. May be repeated.",
    )(command)


def _parts(text: str, sides: Sequence[str]) -> tuple[str, Sequence[int | None], str]:
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


def typed() -> list[str]:
    """Return the options as the user typed them, for the next command that is proposed."""
    values = click.get_current_context().meta.get(_TYPED, ())
    return [word for value in values for word in ("--device", value)]
