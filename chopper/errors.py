"""All errors that Chopper raises deliberately.

    ChopperError                 exit 1
    ├── UsageError               exit 2   the command or call was wrong
    ├── InputError               exit 1   a file is not what it should be
    │   └── RunFormatError       exit 1   a run directory is damaged, newer, or not a run
    ├── SchemaError              exit 1   a table lacks or mistypes a column
    ├── CollectorUnavailable     exit 1   a requested collector cannot run here
    ├── CaptureError             exit 1   recording could not start, continue or be written
    └── OutputError              exit 1   a result cannot be written to its destination

Messages are one line: what, where, found, expected, remedy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import msgspec

    JSON_ERRORS: tuple[type[msgspec.MsgspecError], type[UnicodeError], type[RecursionError]]
    """What decoding JSON raises; msgspec lets errors of UTF-8 and of deep nesting through."""
else:

    def __getattr__(name: str) -> object:
        """Load msgspec with the first who decodes: ``chopper --help`` does not."""
        if name != "JSON_ERRORS":
            raise AttributeError(name)
        import msgspec

        return msgspec.MsgspecError, UnicodeError, RecursionError


class ChopperError(Exception):
    """Base of all deliberate errors; its message is one line for the user."""

    exit_code = 1


class UsageError(ChopperError):
    """The command line or a call's arguments are wrong."""

    exit_code = 2


class InputError(ChopperError):
    """An input file or directory is missing, unreadable or not of a known kind."""


class RunFormatError(InputError):
    """A run directory is damaged, written by a newer version, or not a run at all."""


class SchemaError(ChopperError):
    """A table does not match its declared schema."""


class CollectorUnavailable(ChopperError):
    """A collector that the user requested cannot run on this machine."""


class CaptureError(ChopperError):
    """Recording could not start, continue or be written."""


class OutputError(ChopperError):
    """A result cannot be written to its destination."""


def reason_of(exc: OSError) -> str:
    """Return the reason of a failed system call, also without ``strerror``."""
    return exc.strerror or str(exc) or type(exc).__name__


def printable(text: str) -> str:
    """A text that cannot steer a terminal: control characters are shown as ``\\x1b``, ``\\n``.

    For what comes from data (names of kernels, devices, files) at the edge where people read it.
    """
    if text.isprintable():
        return text
    from unicodedata import category

    return "".join(
        c
        if c.isprintable() or category(c) == "Zs"
        else c.encode("unicode_escape", "replace").decode("ascii")
        for c in text
    )
