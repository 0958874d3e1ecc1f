"""All errors that Chopper raises deliberately, and text of others as each target takes it.

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

import contextlib
import re
import sys
from typing import TYPE_CHECKING, Any

from chopper.addresses import message_without_secrets

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
    """Base of all deliberate errors; its message is a :func:`message_line` for the user."""

    exit_code = 1

    def __init__(self, message: object = "") -> None:
        super().__init__(message_line(str(message)))


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


_UNSEEN = frozenset((0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0))
"""Letters and marks without a glyph, as are the variation selectors."""


def is_shown(character: str) -> bool:
    """Return whether a character is printed as itself: not a control, not a direction mark."""
    from unicodedata import category

    code = ord(character)
    unseen = code in _UNSEEN or 0xFE00 <= code <= 0xFE0F or 0xE0100 <= code <= 0xE01EF
    return not unseen and (character.isprintable() or category(character) == "Zs")


def printable(text: str) -> str:
    """A text that cannot steer a terminal: control characters are shown as ``\\x1b``, ``\\n``.

    So are marks of direction and characters without a glyph. For what comes from data (names of
    kernels, devices, files) at the edge where people read it.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c if is_shown(c) else c.encode("unicode_escape", "replace").decode("ascii") for c in text
    )


def printable_members(document: Any) -> Any:
    """Return a JSON document with printable texts: for a page, whose scripts show them."""
    if isinstance(document, str):
        return printable(document)
    if isinstance(document, dict):
        return {printable_members(key): printable_members(v) for key, v in document.items()}
    is_array = isinstance(document, list | tuple)
    return [printable_members(item) for item in document] if is_array else document


MESSAGE_MOST = 500
"""Characters of a message."""


def message_line(text: str, most: int = MESSAGE_MOST - len("chopper: ")) -> str:
    """A message as one line that a terminal shows: its begin and its end if it is long.

    Addresses in it are without their secrets.
    """
    text = printable(message_without_secrets(text))
    text = re.sub(r"\S{300,}", lambda word: f"{word[0][:100]}…{word[0][-99:]}", text)
    return text if len(text) <= most else f"{text[: most - 200]} … {text[-197:]}"


def tell(message: str) -> None:
    """Write a line to stderr; a closed stderr is ignored.

    Whatever Chopper says there goes through here, but for lines that a terminal overwrites.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(message_line(message, MESSAGE_MOST) + "\n")
        sys.stderr.flush()


def say(message: str) -> None:
    """Tell the user something on stderr, where others write, too."""
    tell(f"chopper: {message}")


def csv_text(text: str) -> str:
    """A text as a cell of CSV, which no spreadsheet takes for a formula."""
    return printable(f"'{text}" if re.match(r"\s*[=+\-@\t\r＝＋－＠]", text) else text)


def json_text(encoded: str) -> str:
    """A JSON document in which what a terminal would obey is escaped; it reads as before."""
    if encoded.isascii() and "\x7f" not in encoded:
        return encoded

    def escaped(found: re.Match[str]) -> str:
        if is_shown(found[0]):
            return found[0]
        units = found[0].encode("utf-16-be", "surrogatepass").hex()
        return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))

    return re.sub(r"[^\x00-\x7e]", escaped, encoded)
