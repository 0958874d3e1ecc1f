"""Every regular expression over data takes linear time, by construction of its automaton."""

from __future__ import annotations

import ast
import importlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chopper import wording
from chopper.analyzers.trace import names
from chopper.analyzers.work import kernels
from chopper.analyzers.work.kernels import NameSearch
from chopper.collectors.formats import telemetry_csv
from chopper.hardware.devices import known_devices
from tests.regexes import shared_text

ROOT = Path(__file__).parent.parent
FOLDERS = ("chopper", "collectors", "analyzers", "reports", "workloads")
METHODS = {"match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer"}


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(part.is_symlink() for part in path.parents):
                yield path, ast.parse(path.read_text(encoding="utf-8"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "chopper" else ("chopper", *parts)
    return ".".join(parts).removesuffix(".__init__")


def calls_of_re(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """(function, call) of each call of a function of ``re``."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=name)):
                if name in METHODS | {"compile"}:
                    yield name, node


def uses(tree: ast.Module) -> dict[str, set[str]]:
    """How a module's patterns are used, by the variable's name."""
    used: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=method) if method in METHODS:
                used.setdefault(name, set()).add(method)
    return used


def weakest(methods: set[str]) -> str:
    """Which of the methods asks most of a pattern."""
    if not methods or not methods <= {"match", "fullmatch"}:
        return "search"
    return "match" if "match" in methods else "fullmatch"


def compiled(value: Any) -> Iterator[re.Pattern[Any]]:
    """Patterns in a module's variable, however deep in tuples and dictionaries."""
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, NameSearch):
        yield from compiled((value.pattern, value.excluded))
    elif isinstance(value, dict):
        yield from compiled((*value, *value.values()))
    elif isinstance(value, tuple | list | set | frozenset):
        for item in value:
            yield from compiled(item)


MADE_OF_DATA = {
    "chopper/addresses.py": "the forms of a slash and a colon, above it",
    "collectors/formats/exported.py": "the key that the run of a timeline stands under",
    "collectors/formats/kineto/_decoder.py": "other patterns of the file",
    "collectors/formats/steps.py": "word parts, listed in the file",
    "reports/to_markdown.py": "the ids of causes, escaped",
    "chopper/storage/remote.py": "names of folders of copies: sixteen digits of a hash",
    "chopper/storage/destination.py": (
        "the names of the run's own directory and of this host, escaped"
    ),
    "chopper/hardware/devices.py": "names in the table of devices, checked below",
    "analyzers/replay/changes.py": "an expression that the user asks for",
    "analyzers/compare/gate.py": "the table of a condition's parts, matched where the part begins",
    "collectors/formats/telemetry_csv.py": "the table above it, whose patterns are compiled there",
    "analyzers/work/kernels.py": "what its makers say, found in their variables, and the table",
}
"""Where patterns are no literals, and what they are made of."""


def patterns() -> dict[str, tuple[str, int, str]]:
    """(pattern, flags, how it is used) of each in the source, by where it stands."""
    found: dict[str, tuple[str, int, str]] = {}
    for path, tree in sources():
        where = str(path.relative_to(ROOT))
        calls = list(calls_of_re(tree))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        if not calls and "NameSearch" not in names:
            continue
        used = uses(tree)
        compiled_texts = set()
        for variable, value in vars(importlib.import_module(module_of(path))).items():
            for pattern in compiled(value):
                text = text_of(pattern.pattern)
                how = weakest(used.get(variable, set()) if pattern is value else set())
                compiled_texts.add(text)
                found[f"{where}: {text}"] = text, pattern.flags & ~re.UNICODE, how
        for name, call in calls:
            if not isinstance(call.args[0], ast.Constant):
                assert where in MADE_OF_DATA, f"{where}: a pattern made of what?"
                continue
            literal = call.args[0].value
            assert isinstance(literal, str | bytes)
            text = text_of(literal)
            if name == "compile" and text in compiled_texts:
                continue
            how = name if name in ("match", "fullmatch") else "search"
            found[f"{where}: {text}"] = text, flags_of(call), how
    return found


def text_of(pattern: str | bytes) -> str:
    return pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern


def flags_of(call: ast.Call) -> int:
    named = [
        node.attr
        for argument in (*call.args[1:], *(k.value for k in call.keywords))
        for node in ast.walk(argument)
        if isinstance(node, ast.Attribute) and node.attr.isupper()
    ]
    return int(sum(getattr(re, name) for name in named))


def test_every_pattern_takes_linear_time() -> None:
    # One test: as parameters, every worker would read the whole source to collect them.
    found = patterns()
    assert len(found) > 100
    assert any("flash_fwd" in where for where in found)
    shared = {where: shared_text(*how) for where, how in found.items()}
    slow = {where: text for where, text in shared.items() if text is not None}
    assert not slow, "two loops share repetitions of the texts named"


def test_names_of_devices_are_matched_in_linear_time() -> None:
    for device in known_devices():
        for pattern in device.names:
            assert shared_text(pattern, re.IGNORECASE, "fullmatch") is None, pattern


@pytest.mark.parametrize(
    ("pattern", "how", "linear"),
    [
        (r"\s+$", "search", False),
        (r"^\s+$", "search", True),
        (r"\s+$", "match", True),
        (r"\s+", "search", True),
        (r"[\[(]\s*([^\])]+?)\s*[\])]\s*$", "search", False),
        (r"(?:a*)*b", "match", False),
        (r"(?:ab|a|b)*c", "match", False),
        (r"(?:ab)*c", "match", True),
        (r"(?:ab)*c", "search", False),
        (r"a*b*c", "match", True),
        (r"\s*x\s*y", "match", True),
        (r"\s*x?\s*y", "match", False),
        (r"\d[\d_]*\.?\d*", "fullmatch", False),
        (r".*x.*y", "match", False),
        (r"flash\w*_fwd", "search", False),
        (r"flash\w{0,80}_fwd", "search", True),
        (r"cutlass(?!\w*wise)", "search", False),
        (r"\bword\b", "search", True),
    ],
)
def test_the_proof_knows_what_is_linear(pattern: str, how: str, linear: bool) -> None:
    assert (shared_text(pattern, 0, how) is None) == linear


def test_attacks_take_no_time() -> None:
    """The texts that stopped an import before, at a length that took minutes."""
    blanks = " " * 100_000
    begin = time.process_time()
    assert not telemetry_csv.sniff(f"timestamp,gpu,power [{blanks}x".encode())
    for name in (
        f"void f<{blanks}x>{blanks}x",
        f"f[clone {blanks}",
        f"f{'.kd' * 30_000}x",
        f"f{blanks}x",
    ):
        wording.plain(name)
        wording.base_name(name)
        wording.kernel_name(name)
        names.is_communication(name)
        kernels.kernel_families([name])
        kernels.matmul_dtype(None, name)
    assert time.process_time() - begin < 20
