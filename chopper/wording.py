"""One way to print a number or a name for people.

Unknown is "–". Durations come in nanoseconds, whole; three significant digits are shown, because
the fourth is noise on any machine. Nothing here is read back by a program: JSON keeps integers.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, wraps
from pathlib import Path

from chopper.addresses import without_secrets
from chopper.errors import is_shown, message_line, printable

UNKNOWN = "–"
_MINUTE_NS = 60 * 10**9
_DAYS_FROM_NS = 4 * 86400e9
_MOST_RATIO = 1e4


def _known(show: Callable[[float], str]) -> Callable[[float | None], str]:
    """Make a formatter of numbers print a dash for an unknown one."""

    @wraps(show)
    def shown(value: float | None) -> str:
        return UNKNOWN if value is None else show(value)

    return shown


def device_name(device_id: int | None) -> str:
    """``device 3``, or ``unknown device`` where the recorder did not say which one it was."""
    return "unknown device" if device_id is None or device_id < 0 else f"device {device_id}"


def some(values: Sequence[object]) -> str:
    """The first eight of them, and whether there are more."""
    return ", ".join(map(str, values[:8])) + (" …" if len(values) > 8 else "")


def quoted(*names: str | Path) -> str:
    """Return names as bash and zsh take them; what a terminal would obey is escaped."""
    return " ".join(map(_quoted, names))


def _quoted(name: str | Path) -> str:
    text = without_secrets(str(name))
    if printable(text) == text:
        return shlex.quote(text)
    return f"$'{''.join(map(_in_shell, text))}'"


def _in_shell(character: str) -> str:
    if is_shown(character):
        return f"\\{character}" if character in "\\'" else character
    errors = "surrogateescape" if "\udc80" <= character <= "\udcff" else "replace"
    return "".join(f"\\x{byte:02x}" for byte in character.encode(errors=errors))


_COMMAND_MOST = 390
"""Characters of a command in a message, which says other things before it."""


def next_command(words: str, **names: Iterable[str | Path]) -> str:
    """Return a command to copy: ``chopper report {RUN} -o {FILE}`` with the names in the braces.

    One that a message has no room for could not be copied: it keeps ``RUN`` and ``FILE``.
    """
    command = words.format(**{key: quoted(*of) for key, of in names.items()})
    is_whole = message_line(command, _COMMAND_MOST) == command
    return command if is_whole else words.format(**{key: key for key in names})


def _three(value: float) -> str:
    """Three significant digits without an exponent: 1.23, 12.3, 123, 1234."""
    size = abs(value)
    return f"{value:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"


@_known
def duration(time_ns: float) -> str:
    """Format nanoseconds: ``850 ns``, ``12.3 µs``, ``4.56 ms``, ``2 min 05 s``, ``12.5 days``."""
    if time_ns < 0:
        return "−" + duration(-time_ns)
    if time_ns == 0:
        return "0"
    if time_ns >= _DAYS_FROM_NS:
        days = time_ns / 86400e9
        return f"{days:,.1f} days" if days < 1e5 else f"{days / 365.25:.2g} years"
    if time_ns >= _MINUTE_NS:
        minutes, seconds = divmod(round(time_ns / 1e9), 60)
        return f"{minutes} min {seconds:02d} s"
    if time_ns < 999.5:
        return f"{time_ns:.0f} ns"
    # Thresholds lie where rounding to three digits reaches the next unit.
    for unit, scale, limit in (("µs", 1e3, 999_500), ("ms", 1e6, 999_500_000)):
        if time_ns < limit:
            return f"{_three(time_ns / scale)} {unit}"
    return f"{_three(time_ns / 1e9)} s"


def interval(bounds_ns: Sequence[float] | None) -> str:
    """Return the bounds of a time: ``1.21 ms – 1.34 ms``."""
    return UNKNOWN if bounds_ns is None else " – ".join(map(duration, bounds_ns))


@_known
def ratio(value: float) -> str:
    """A ratio as a percentage: ``23.8 %``, ``100 %``; what rounds to nothing is ``<0.1 %``."""
    if value == 0:
        return "0 %"
    if abs(value) < 0.0005:
        return "<0.1 %"
    return percent(value, ".0f" if abs(value) >= 0.9995 else ".1f")


def percent(value: float | None, digits: str = ".1f") -> str:
    """Format a ratio as a percentage with these digits and sign: ``+4.2 %``, ``−0.35 %``.

    What is beyond a million percent is shown as such: ``>1000000 %``.
    """
    if value is None:
        return UNKNOWN
    if abs(value) > _MOST_RATIO:
        return ">1000000 %" if value > 0 else "<−1000000 %"
    return f"{value * 100:{digits}} %".replace("-", "−")


@_known
def factor(value: float) -> str:
    """Format a ratio as a factor: ``4.2×``."""
    return f"{_three(value) if value >= 10 else f'{value:.1f}'}×"


def _scaled(base: int, *units: str, whole: bool = True) -> Callable[[float | None], str]:
    """Return what shows a number with the unit in which it has up to three digits.

    Numbers of the first, smallest unit are shown as whole ones.
    """

    def show(value: float) -> str:
        size = float(value)
        for unit in units[:-1]:
            # 999.5 of a unit would print as 1000 of it: the next one is meant.
            if abs(size) < min(base, 999.5):
                return f"{int(size) if whole and unit == units[0] else _three(size)} {unit}"
            size /= base
        return f"{_three(size)} {units[-1]}"

    return _known(show)


bytes_ = _scaled(1024, "B", "KiB", "MiB", "GiB", "TiB", "PiB")
"""Bytes in binary units: ``512 B``, ``1.50 GiB``."""
decimal_bytes = _scaled(1000, "B", "kB", "MB", "GB", "TB", "PB")
"""Bytes in decimal units, as limits are given: ``2.00 GB``."""
rate = _scaled(1000, "B/s", "kB/s", "MB/s", "GB/s", "TB/s")
"""Bytes per second in decimal units, as links and memories are sold: ``3.35 TB/s``."""
flops = _scaled(1000, "FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s")
_flop = _scaled(1000, "FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")
hertz = _scaled(1000, "Hz", "kHz", "MHz", "GHz", whole=False)
"""A frequency: ``99.8 Hz``, ``1.98 GHz``."""
_microjoules = _scaled(1000, "µJ", "mJ", "J", "kJ", "MJ", "GJ", whole=False)


@_known
def count(value: float) -> str:
    """A count with thin groups: ``216 092``."""
    return f"{value:,.0f}".replace(",", "\u202f")


@_known
def joules(value: float) -> str:
    """An energy: ``412 µJ``, ``38.2 J``, ``1.24 MJ``."""
    if value <= 0:
        return "−" + joules(-value) if value else "0.00 J"
    return _microjoules(value * 1e6)


# Suffix of a column's name → how its values read.
_UNITS: dict[str, Callable[[float | None], str]] = {
    "ns": duration,
    "ratio": ratio,
    "bytes": bytes_,
    "bytes_per_s": rate,
    "flop": _flop,
    "flop_per_s": flops,
    "hz": hertz,
    "count": count,
    "factor": factor,
    "w": _known(lambda v: f"{_three(v)} W"),
    "j": joules,
    "c": _known(lambda v: f"{_three(v)} °C"),
}


def unit(column: str) -> str | None:
    """The unit that a column's name ends in, None for none: ``time_ns`` → ``ns``."""
    units = sorted(_UNITS, key=len, reverse=True)
    return next((u for u in units if column == u or column.endswith(f"_{u}")), None)


_ACRONYM = re.compile(r"\b(mfu|hfu|cpu|flop|id)\b")


def heading(column: str) -> str:
    """A column's name for people, without the unit that its cells carry."""
    suffix = unit(column)
    words = (column.removesuffix(f"_{suffix}") if suffix else column).replace("_", " ")
    words = _ACRONYM.sub(lambda m: m.group().upper(), words)
    if suffix != "count" or words.endswith(("s", "out of sequence", "count")):
        return words
    return f"{words}es" if words.endswith(("ch", "sh", "x")) else f"{words}s"


def is_number_of(column: str) -> bool:
    """Return whether a column holds numbers that name things (``step``, ``stream_id``).

    Their thousands are not set apart.
    """
    return column.endswith("_id") or column in ("rank", "step", "number", "core", "row")


def cell(column: str, value: object) -> str:
    """A value of a declared table, in the unit that its column's name tells."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        suffix = unit(column)
        if suffix is not None:
            return _UNITS[suffix](value)
        if is_number_of(column):
            return str(value)
        if isinstance(value, int) or abs(value) >= 999.5:
            return count(value)
        return _three(value) if value == 0 or abs(value) >= 0.005 else f"{value:.1e}"
    if column == "kernel":
        return kernel_name(str(value))
    if column.endswith("_dims"):
        return shapes(str(value))
    return str(value)


def shapes(text: str) -> str:
    """Recorded shapes for people: ``[[8,16],[16,4],[]]`` becomes ``8×16, 16×4``."""
    try:
        dims = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(dims, list):
        return text
    parts = [_shape(d) for d in dims]
    while parts and not parts[-1]:
        parts.pop()
    return ", ".join(s or UNKNOWN for s in parts)


def _shape(dims: object) -> str:
    if not isinstance(dims, list) or not dims:
        return ""
    if isinstance(dims[0], list):
        return f"({', '.join(_shape(d) or UNKNOWN for d in dims)})"
    return "×".join(map(str, dims))


def ranges(numbers: Iterable[int]) -> str:
    """``0-3,8``: as taskset and the kernel write sets of cores."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def plural(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``, ``2 launches``."""
    several = noun + ("es" if noun.endswith("ch") else "s")
    return f"{count(number)} {noun if number == 1 else several}"


def inside(label: str) -> str:
    """A label inside a sentence; acronyms stay."""
    return label if label[:2].isupper() else label[:1].lower() + label[1:]


def ellipsize(text: str, width: int) -> str:
    """Cut the middle out of a text that is longer than ``width``: both ends tell names apart."""
    if len(text) <= width:
        return text
    if width <= 1:
        return "…"[:width]
    head = (width - 1) * 3 // 5
    tail = width - 1 - head
    return text[:head] + "…" + (text[-tail:] if tail else "")


def ellipsize_all(texts: Sequence[str], width: int) -> list[str]:
    """Shorten texts as :func:`ellipsize` does, but so that two that differ still do.

    Of those that would look alike, the part from where they begin to differ is shown, too.
    """
    labels = [ellipsize(text, width) for text in texts]
    alike: dict[str, set[str]] = {}
    for text, short in zip(texts, labels, strict=True):
        alike.setdefault(short, set()).add(text)
    head = width // 3
    for i, text in enumerate(texts):
        differing = alike[labels[i]]
        if len(differing) > 1 and width >= _TELLING_WIDTH:
            rest = differing - {text}
            same = [sum(itertools.takewhile(bool, map(str.__eq__, text, o))) for o in rest]
            start = max(max(same) - 2, head)
            labels[i] = f"{text[:head]}…{ellipsize(text[start:], width - head - 1)}"
    return labels


_TELLING_WIDTH = 12
"""Columns below which a text has no room for its begin and for what tells it apart."""

# Template arguments that say nothing about what a kernel does.
_NOISE = re.compile(
    r"^([Aa]rray|OffsetCalculator|TrivialOffsetCalculator|LoadWithoutCast|StoreWithoutCast|LoadWithCast"
    r"|StoreWithCast|TensorInfo|function_traits|integer_sequence|TensorListMetadata"
    r"|TensorListScalarListMetadata|FusedOptimizerTensorListMetadata|DepthToChunk\w*|Params?)$"
)
_LITERAL = re.compile(r"^(-?\d+[uUlL]*|true|false|\(.*\)-?\d+)$")
_CONST = re.compile(r"\b(const|volatile|unsigned|signed|struct|class|typename)\b\s*")
_POINTED = "*& \t\r\n\f\v"
_BLANKS_THEN_BRACKET = re.compile(r"\s*\(")
# Wrappers whose only interesting part is their argument.
_WRAPPERS = frozenset({"Kernel", "Kernel2", "kernel", "device_kernel", "ReduceOp"})


@lru_cache(maxsize=16384)
def kernel_name(name: str) -> str:
    """A kernel's name without what a reader skips; functors and data types stay.

    ``void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>,
    at::detail::Array<char*, 3> >(int, …)`` becomes
    ``vectorized_elementwise_kernel<CUDAFunctor_add<BFloat16>>``. Names that are not C++ are
    returned as they are.
    """
    text = name.strip()
    if text.startswith("_Z"):
        return _mangled(text)
    # Not C++, or nothing to leave out: aten::mm, a Triton kernel, module.py(12): forward.
    if ("(" not in text and "<" not in text) or "/" in text or ".py(" in text:
        return text
    if not re.match(r"^[\w:~(]", text):
        return text
    text = text.replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    text = re.sub(r"^(void|auto|static|std::enable_if<.*>::type)\s+", "", text)
    text = without_suffixes(text)
    text = re.sub(r"\{lambda\([^{}]*\)#(\d+)\}", r"lambda#\1", text)
    try:
        parsed, end = _parse(text, 0)
    except RecursionError:
        return name
    rest = text[end:].lstrip()
    # "Memcpy HtoD (Pinned -> Device)": prose, not an argument list.
    if not parsed or text[end - 1 : end] == " " or (rest and not rest.startswith(("(", "::"))):
        return name
    return parsed


def whole_kernel_name(name: str) -> str:
    """A kernel's name with all of its template arguments, without namespaces and parameters."""
    text = without_suffixes(name).replace("(anonymous namespace)::", "").removeprefix("void ")
    head, parameters, _ = text.rpartition(">(")
    words = re.split(r"([^\w:])", f"{head}>" if parameters else text)
    return "".join(word.rpartition("::")[2] for word in words)


_SIZE = re.compile(r"\d{1,9}")


def _mangled(text: str) -> str:
    """The function of an Itanium-mangled name: the last of its length-prefixed identifiers."""
    at = 3 if text.startswith("_ZN") else 2
    piece = None
    while (size := _SIZE.match(text, at)) is not None:
        at = size.end()
        piece = text[at : at + int(size.group())]
        at += int(size.group())
    return piece or text


def _parse(text: str, at: int) -> tuple[str, int]:
    """Read ``a::b::name<args>`` from ``at``; return it shortened, and where it ends."""
    start = at
    while at < len(text) and text[at] not in "<>,(":
        at += 1
    base = _CONST.sub("", text[start:at].strip()).rstrip(_POINTED).rpartition("::")[2].strip()
    if at >= len(text) or text[at] != "<":
        return base, at
    arguments: dict[str, None] = {}
    at += 1
    while at < len(text) and text[at] != ">":
        piece, at = _argument(text, at)
        if piece:
            arguments[piece] = None
        if at < len(text) and text[at] == ",":
            at += 1
    at += 1
    if text.startswith("::", at):
        # A member of a template: what it belongs to is told by its arguments.
        member, at = _parse(text, at + 2)
        if re.match(r"^(operator|lambda#|type$)", member):
            return base, at
        base = member
    if base in _WRAPPERS and len(arguments) == 1:
        return next(iter(arguments)), at
    return (f"{base}<{', '.join([*arguments][:4])}>" if arguments else base), at


def _argument(text: str, at: int) -> tuple[str, int]:
    """One template argument, shortened, or nothing when it is noise."""
    if _BLANKS_THEN_BRACKET.match(text, at):
        piece = ""  # a cast literal such as (Mode)1, or a function type
    else:
        piece, at = _parse(text, at)
    depth = 0
    while at < len(text) and not (depth == 0 and text[at] in ",>"):
        depth += {"(": 1, ")": -1, "<": 1, ">": -1}.get(text[at], 0)
        at += 1
    noise = _LITERAL.match(piece) or _NOISE.match(piece.partition("<")[0])
    return "" if noise else piece, at


# Names of kernels as different tools write them, made comparable.


def base_name(kernel: str) -> str:
    """A kernel's function without what tools write differently around it.

    Return type, template and function arguments, and the suffixes that AMD's tools add are left
    out: ``void at::f<int>(int*) [clone .kd]`` is ``at::f``.
    """
    name = plain(kernel).replace("(anonymousnamespace)", "{anonymous}")
    parts: list[str] = []
    depth = 0
    for char in name:
        depth += char in "<("
        if not depth:
            parts.append(char)
        depth = max(depth - (char in ">)"), 0)
    return "".join(parts) or name


def without_suffixes(kernel: str) -> str:
    """Strip what AMD's tools and compilers add: ``f.kd``, ``f (.kd)``, ``f [clone .kd]``."""
    end = start = len(kernel)
    while True:
        while end and kernel[end - 1].isspace():
            end -= 1
        if kernel.endswith((".kd", "(.kd)"), 0, end):
            end = kernel.rfind("(" if kernel[end - 1] == ")" else ".", 0, end)
        elif kernel.endswith("]", 0, end):
            begin = kernel.rfind("[", 0, end)
            if not kernel.startswith("[clone ", begin) or "]" in kernel[begin : end - 1]:
                return kernel[:start]
            end = begin
        else:
            return kernel[:start]
        start = end = len(kernel[:end].rstrip())


_CAST = re.compile(r"\((?:unsigned |signed )?(?:int|bool|long|char|short)\)(?=-?\w)")


def plain(kernel: str) -> str:
    """A name without blanks, casts of template arguments, return type and AMD's suffixes."""
    name = _CAST.sub("", without_suffixes(kernel).removeprefix("void "))
    return re.sub(r"\s+", "", name)
