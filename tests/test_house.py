"""The structure of the code: no circles, small functions, private names that stay private."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("analyzers", "collectors", "reports", "workloads")
LONGEST_FUNCTION = 80
MODULES_DIRECTLY_IN_CHOPPER = 20


@cache
def modules() -> dict[str, tuple[Path, ast.Module]]:
    """Name, file and syntax tree of each module of the product; the links are left out."""
    found = {}
    for folder in ("chopper", *FOLDERS):
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.relative_to(ROOT).with_suffix("").parts
            if folder == "chopper" and parts[1] in FOLDERS:
                continue
            name = ".".join(parts if folder == "chopper" else ("chopper", *parts))
            found[name.removesuffix(".__init__")] = (file, ast.parse(file.read_text()))
    return found


def imports(name: str) -> set[tuple[str, str | None]]:
    """Modules of the product that a module imports anywhere, with the name taken from each."""
    known = modules()
    taken: set[tuple[str, str | None]] = set()
    for node in ast.walk(known[name][1]):
        if isinstance(node, ast.Import):
            taken |= {(alias.name, None) for alias in node.names if alias.name in known}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in known:
                    taken.add((whole, None))
                elif node.module in known:
                    taken.add((node.module, alias.name))
    return taken - {(name, None)}


def test_no_circle_of_imports_not_even_in_functions_or_for_types() -> None:
    # The facade names lazily what stands above everything else.
    graph = {
        name: {target for target, _ in imports(name)} - {"chopper", name}
        for name in modules()
        if name != "chopper"
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as exc:
        raise AssertionError(f"a circle: {' -> '.join(reversed(exc.args[1]))}") from None


def owner_of(target: str, name: str | None) -> str | None:
    """Package that a private module, or module that a private name, belongs to; None: public."""
    parts = target.split(".")
    for i, part in enumerate(parts):
        if part.startswith("_") and part != "__main__":
            return ".".join(parts[:i])
    if name is None or not name.startswith("_") or name.startswith("__"):
        return None
    compiled = modules()[target][0].with_name(f"{name}.pyi").exists()
    return target if compiled else f"{target}.{name}"


def test_private_names_stay_in_their_package() -> None:
    leaks = []
    for name in modules():
        user = "chopper.cli" if name == "chopper.__main__" else name
        for target, what in imports(name):
            owner = owner_of(target, what)
            if owner is not None and not f"{user}.".startswith(f"{owner}."):
                leaks.append(f"{name} imports {what or 'it'} of {target}")
    assert not leaks


def test_functions_are_short() -> None:
    long = []
    for name, (_, tree) in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > LONGEST_FUNCTION:
                    long.append(f"{name}:{node.name} has {lines} lines")
    assert not long


def test_folders_explain_the_product() -> None:
    directly = [file for file in (ROOT / "chopper").glob("*.py") if file.name != "__init__.py"]
    assert len(directly) <= MODULES_DIRECTLY_IN_CHOPPER


STDERR = {
    "chopper.errors:tell": "every message",
    "chopper.cli.output:show_status": "a line that a terminal overwrites",
    "chopper.cli:main": "usage, which click lays out",
    "chopper.cli.record_:_panel": "the panel of --live",
    "chopper.recording.signals:interrupts_end_at_once": "a constant, within a handler of signals",
    "chopper.cli.sweep_:_to_stderr": "what the measured command writes",
}
"""Functions that write to stderr: what each writes."""


def writes_stderr(node: ast.AST) -> bool:
    """Whether an expression writes to stderr, or names it to what does."""
    if isinstance(node, ast.Attribute):
        stream = ast.unparse(node.value) in ("sys.stderr", "sys.__stderr__")
        return stream and node.attr in ("write", "writelines", "buffer")
    if not isinstance(node, ast.Call):
        return False
    named = {k.arg: ast.unparse(k.value) for k in node.keywords}
    if named.get("err", "False") != "False" or "True" in named.get("stderr", ""):
        return True
    called, first = ast.unparse(node.func), "".join(map(ast.unparse, node.args[:1]))
    shows = called.endswith(".show") and not called.startswith("self.")
    to_it = named.get("file") == "sys.stderr" or first in ("2", "sys.stderr.fileno()")
    return shows or (to_it and called in ("print", "os.write"))


def functions_with(found: Callable[[ast.AST], bool]) -> dict[str, set[str]]:
    """Functions of the product with such a node → the calls that they make."""
    out: dict[str, set[str]] = {}
    for name, (_, tree) in modules().items():
        for node in tree.body:
            of = getattr(node, "name", "")
            inside = [*ast.walk(node)]
            if any(map(found, inside)):
                calls = {ast.unparse(n.func) for n in inside if isinstance(n, ast.Call)}
                out[f"{name}:{of}"] = calls
    return out


def test_messages_go_to_stderr_through_one_function() -> None:
    assert functions_with(writes_stderr).keys() == STDERR.keys()


def encodes_json(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in (
        "json.dumps", "dumps", "msgspec.json.encode", "encoder.encode", "_encoder().encode",
    )  # fmt: skip


def test_json_for_others_escapes_what_a_terminal_obeys() -> None:
    for function, calls in functions_with(encodes_json).items():
        module = function.partition(":")[0]
        if module.startswith(("chopper.cli", "chopper.reports")):
            assert {"json_text", "printable_members"} & calls, function
