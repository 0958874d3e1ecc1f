"""Click's options from the annotated fields of a struct; the suffix of a name tells the unit."""

from __future__ import annotations

import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from chopper import quantities
from chopper.analyzers.estimates import Option, OptionsOf
from chopper.cli import _shared as shared
from chopper.errors import UsageError

if typing.TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    # Generic to type checkers only in some versions of click.
    _ParamType = click.ParamType


class Options(msgspec.Struct, kw_only=True, frozen=True):
    """The options of a command: its fields that are annotated with `Option`."""

    given: frozenset[str] = frozenset()
    """Fields that the user gave on the command line."""

    def exactly_one(self, *names: str, missing: str) -> None:
        """Refuse none or several of these fields, by a UsageError."""
        named = [_shown(type(self), name) for name in names if getattr(self, name)]
        if len(named) != 1:
            message = f"{' and '.join(named)} contradict each other" if named else missing
            every = [_shown(type(self), name) for name in names]
            raise UsageError(f"{message}; give one of {', '.join(every[:-1])} and {every[-1]}")

    def contradict(self, *names: str) -> None:
        """Refuse two of these fields, of which at most one can be given, by a UsageError."""
        named = [_shown(type(self), name) for name in names if name in self.given]
        if len(named) > 1:
            raise UsageError(f"{' and '.join(named)} contradict each other; give one of them")

    def first_given(self, *names: str) -> str | None:
        """The option, as the user writes it, of the first of these fields that was given."""
        return next((_shown(type(self), name) for name in names if name in self.given), None)


class Quantity(_ParamType):
    """A number with a unit; what cannot be read is one line, not a usage page."""

    def __init__(
        self, name: str, read: Callable[[str, str], Any], write: Callable[[Any], str]
    ) -> None:
        self.name = name
        self._read = read
        self.write = write
        """Write a number as `read` reads it, for the help of a default."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002
        """Read the text that the user gave; defaults that are numbers stay."""
        if not isinstance(value, str):
            return value
        name = param.opts[-1] if param is not None and param.opts else self.name
        return self._read(value, name)


def _time_s(text: str, name: str) -> float:
    value = quantities.seconds(text, name)
    quantities.between(value, 1e-12, 3.2e11, f"{name} in s")
    return value


def _rate_bytes_per_s(text: str, name: str) -> float:
    value = quantities.rate_bytes_per_s(text, name)
    quantities.between(value, 1, 1e18, f"{name} in B/s")
    return value


def _any_number(text: str, name: str) -> float:
    """Read a number; zero and others that make no sense are refused where it is used."""
    try:
        return float(text)
    except ValueError as exc:
        raise UsageError(f"{name} {text!r}: is not a number; expected one such as 0.5") from exc


def _write_time(seconds: float) -> str:
    return f"{seconds / 86400:g}d" if seconds >= 1 else f"{seconds * 1e6:g}us"


def _write_count(count: int) -> str:
    return f"{count // 10**6}M" if count and not count % 10**6 else str(count)


_NUMBER = Quantity("number", quantities.number, "{:g}".format)
_BY_SUFFIX: dict[str, Quantity] = {
    "_bytes_per_s": Quantity("rate", _rate_bytes_per_s, lambda rate: f"{rate / 1e9:g}GB/s"),
    "_flop_per_s": Quantity("rate", quantities.flop_per_s, lambda rate: f"{rate / 1e12:g}TFLOP/s"),
    "_bytes": Quantity(
        "size", quantities.size_bytes, lambda size: f"{size / 1e9:g}GB" if size else "0"
    ),
    "_count": Quantity("count", quantities.count, _write_count),
    "_s": Quantity("time", _time_s, _write_time),
    "_w": Quantity("power", quantities.power_w, "{:g}W".format),
    "_ratio": Quantity("number", _any_number, "{:g}".format),
}


def _model_names() -> list[str]:
    from chopper.models.architectures import CATALOGUE

    return [*CATALOGUE]


_DEVICE = Quantity("device", shared.device_name, str)
_DEVICE_FIELDS = ("device", "from_device", "against")
_COMPLETED = {**dict.fromkeys(_DEVICE_FIELDS, shared.device_names), "model": _model_names}
"""Fields whose values the shell completes."""


def _suffix(name: str) -> str:
    name = f"_{name}"  # a field may be called like its unit
    rate = name.endswith("_per_s") and not name.endswith(("_bytes_per_s", "_flop_per_s"))
    return "" if rate else next((s for s in _BY_SUFFIX if name.endswith(s)), "")


def _flag(name: str, option: Option) -> str:
    return option.name or name.removesuffix(_suffix(name)).replace("_", "-")


def _annotated(struct: type[msgspec.Struct]) -> dict[str, tuple[Any, Option | OptionsOf]]:
    """Return type and annotation of each field that has one."""
    hints = typing.get_type_hints(struct, include_extras=True)
    of = ((name, hint, getattr(hint, "__metadata__", (None,))[0]) for name, hint in hints.items())
    return {
        name: (hint.__origin__, note)
        for name, hint, note in of
        if isinstance(note, Option | OptionsOf)
    }


def _shown(struct: type[msgspec.Struct], name: str) -> str:
    for field, (_, note) in _annotated(struct).items():
        if isinstance(note, OptionsOf):
            if name in note.struct.__struct_fields__:
                return _shown(note.struct, name)
        elif field == name:
            return field.upper() if note.argument else f"--{_flag(field, note)}"
    raise KeyError(name)


def written(struct: type[msgspec.Struct], values: dict[str, Any]) -> str:
    """Return values of a struct's fields as the user writes them."""
    return " ".join(
        _shown(struct, name) + ("" if value is True else f" {value}")
        for name, several in values.items()
        for value in (several if isinstance(several, tuple) else (several,))
    )


def _parameter(name: str, kind: Any, note: Option, default: Any) -> click.Parameter:
    """One argument or option; `default` is shown, and applied by the struct."""
    completion = shared.completing(_COMPLETED[name]) if name in _COMPLETED else None
    if note.argument:
        return click.Argument([name], required=False, shell_complete=completion or shared.paths)
    flag = f"--{_flag(name, note)}"
    if kind is bool:
        return click.Option([flag, name], is_flag=True, help=note.help)
    many = typing.get_origin(kind) is tuple
    inner: set[Any] = {t for t in (*typing.get_args(kind), kind) if isinstance(t, type)} - {
        type(None)
    }
    read = _type(name, inner)
    text = note.help
    if default not in (None, ()) and "[default:" not in text:
        write = read.write if isinstance(read, Quantity) else str
        text += f"  [default: {', '.join(map(write, default if many else [default]))}]"
    return click.Option(
        [flag, name],
        type=read,
        multiple=many,
        metavar=note.metavar,
        help=text,
        shell_complete=completion,
    )


def _type(name: str, kinds: set[Any]) -> Any:
    """Return click's type of a field, by its types and its unit."""
    suffix = _suffix(name)
    if name in _DEVICE_FIELDS:
        return _DEVICE
    if Path in kinds:
        return shared.NamedPath()
    if float in kinds:
        return _NUMBER if suffix == "_count" else _BY_SUFFIX.get(suffix, _NUMBER)
    if int in kinds:
        return _BY_SUFFIX.get(suffix, click.INT)
    return click.STRING


def parameters(struct: type[msgspec.Struct]) -> list[click.Parameter]:
    """Return the arguments and options of a struct and of those that it holds the options of."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
    options: list[click.Parameter] = []
    for name, (kind, note) in _annotated(struct).items():
        if isinstance(note, OptionsOf):
            options += parameters(note.struct)
        else:
            options.append(_parameter(name, kind, note, defaults[name]))
    return options


def read(struct: type[Options], values: dict[str, Any]) -> Options:
    """Return the struct with the user's values; the others are the fields' defaults."""
    context = click.get_current_context()
    commandline = click.core.ParameterSource.COMMANDLINE
    given = {n: v for n, v in values.items() if context.get_parameter_source(n) is commandline}
    fields: dict[str, Any] = {}
    for name, (_, note) in _annotated(struct).items():
        if isinstance(note, OptionsOf):
            inner = _annotated(note.struct)
            fields[name] = {n: v for n, v in given.items() if n in inner}
        elif name in given:
            fields[name] = given[name]
    return struct(**fields, given=frozenset(given))
