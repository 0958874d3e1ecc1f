"""List every text of the product that a user can see.

    python -m tests.words            # write tests/words.txt anew; commit it with the change
    python -m tests.words --where    # print each text with its file and line

Texts are taken from the source, so that a new one cannot be forgotten: strings of more than one
word, messages with ``{}`` for their values, docstrings that are help, labels and sentences in data
files, texts of templates and scripts. Names of kernels and patterns that data are compared with
are left out where the code shows that they are.
"""

from __future__ import annotations

import ast
import html
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_name("words.txt")
FOLDERS = ("analyzers", "chopper", "collectors", "reports", "workloads")
Text = tuple[str, Path, int]
"""The text, its file and its line (0 where it is not known)."""

# What these take is compared with data, matched, or run.
_NOT_SHOWN = re.compile(
    r"compile|match|fullmatch|search|sub|finditer|findall|r?split|r?partition|replace|l?r?strip"
    r"|startswith|endswith|removeprefix|removesuffix|execute|executescript|encode|index|find"
    r"|getattr|literal|field|import_module|str[fp]time|Struct|NewType|TypeVar|namedtuple"
)
# Keys of data files whose values are texts.
_SHOWN_KEYS = frozenset(
    re.findall(
        r"\w+",
        "label doc advice basis title message effect summary condition remedy note reason why "
        "description when assumptions",
    )
)
_WORDS = re.compile(r"[A-Za-zα-ω0-9}][,.;:)’'\"`%]* [({`'\"<“–-]*[A-Za-z{]")
_CODE = re.compile(
    r"^\s*(SELECT|PRAGMA|INSERT|CREATE|import |from \S+ import|def |#|<\?|<svg|\(\?)"
    r"|\\[bdsw]|\[\^|^[\w./:-]+ \(|^aten::|\w+::\w+|=>|;\s*}"
)


def texts() -> list[Text]:
    """Return every text, with where it is, sorted."""
    found: set[Text] = set()
    for file in files(".py"):
        found |= set(_python(file))
    for file in files(".toml"):
        found |= {(text, file, 0) for text in _values(tomllib.loads(file.read_text("utf-8")), True)}
    for file in files(".json"):
        found |= {
            (text, file, 0) for text in _values(msgspec.json.decode(file.read_bytes()), False)
        }
    for file in (*files(".j2"), *files(".js")):
        found |= set(_template(file) if file.suffix == ".j2" else _script(file))
    return sorted((" ".join(text.split()), file, line) for text, file, line in found)


@cache
def lines() -> list[str]:
    """Return the texts alone, each once."""
    return sorted({text for text, _, _ in texts() if text})


def files(suffix: str) -> list[Path]:
    """Return the product's files of a kind; the links below ``chopper/`` are left out."""
    return sorted(
        file
        for folder in FOLDERS
        for file in (ROOT / folder).rglob(f"*{suffix}")
        if not (folder == "chopper" and file.relative_to(ROOT).parts[1] in FOLDERS)
    )


def _python(file: Path) -> Iterator[Text]:
    tree = ast.parse(file.read_text("utf-8"))
    help_ = _docstrings(tree, file)
    skipped = {id(n) for n in ast.walk(tree) if _is_statement(n)} - {id(n) for n in help_}
    yield from ((paragraph, file, node.lineno) for node in help_ for paragraph in _paragraphs(node))

    def visit(node: ast.AST) -> Iterator[Text]:
        if id(node) in skipped or isinstance(node, ast.Compare) or _is_matching(node):
            return
        if isinstance(node, ast.JoinedStr):
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
            )
            if _is_text(text, file):
                yield text, file, node.lineno
            inner: list[ast.AST] = [
                part for part in node.values if not isinstance(part, ast.Constant)
            ]
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str) and _is_text(node.value, file):
                yield node.value, file, node.lineno
            return
        else:
            inner = list(ast.iter_child_nodes(node))
        for child in inner:
            if not any(child is n for n in help_):
                yield from visit(child)

    yield from visit(tree)


def _is_statement(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _is_matching(node: ast.AST) -> bool:
    """Return whether a node is a call whose texts are matched with data, or an annotation."""
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return bool(_NOT_SHOWN.fullmatch(name)) and not node.keywords


def _docstrings(tree: ast.Module, file: Path) -> list[ast.Constant]:
    """Return the docstrings that are printed: of commands, options, estimates and views."""
    nodes: list[Any] = []
    if file.parent.name in ("views", "estimates") and not file.name.startswith("_"):
        nodes.append(tree)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.FunctionDef)
            and any(
                "command" in ast.unparse(d) or "group" in ast.unparse(d)
                for d in node.decorator_list
            )
        ) or (isinstance(node, ast.ClassDef) and node.name == "Options"):
            nodes.append(node)
    return [node.body[0].value for node in nodes if node.body and _is_statement(node.body[0])]


def _paragraphs(node: ast.Constant) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", str(node.value).replace("\b", "")):
        yield from paragraph.splitlines() if "Examples:" in paragraph else [paragraph]


def _is_text(text: str, file: Path) -> bool:
    """Return whether a string is a text for people, not a name, a pattern or code."""
    text = text.strip()
    if "reports" in file.parts and re.fullmatch(r"[A-Z][a-z]+", text):
        return True
    return bool(_WORDS.search(text)) and not _CODE.search(text) and "\n    " not in text


def _values(value: object, every: bool) -> Iterator[str]:
    """Return the texts of a data file; of JSON only those of keys that hold texts."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if every and _WORDS.search(key):
                yield key
            yield from _values(inner, key in _SHOWN_KEYS or (every and key != "colors"))
    elif isinstance(value, list):
        for inner in value:
            yield from _values(inner, every)
    elif isinstance(value, str) and every and (_WORDS.search(value) or value[:1].isupper()):
        yield value


def _template(file: Path) -> Iterator[Text]:
    source = re.sub(r"\{#.*?#\}", "", file.read_text("utf-8"), flags=re.S)
    source = re.sub(r"<(script|style).*?</\1>", "", source, flags=re.S)
    source = re.sub(
        r"\{%.*?%\}", "\x00", re.sub(r"\{\{.*?\}\}", "{}", source, flags=re.S), flags=re.S
    )
    shown = re.findall(r"(?:title|aria-label|placeholder)=\"([^\"]+)\"", source)
    shown += re.split(r"<[^>]*>|\x00", source)
    for text in shown:
        if re.search(r"[A-Za-z]{3}", text.replace("{}", "")):
            yield html.unescape(text).replace("\x00", "").strip(), file, 0


def _script(file: Path) -> Iterator[Text]:
    source = re.sub(r"/\*.*?\*/|^\s*//.*$", "", file.read_text("utf-8"), flags=re.S | re.M)
    for _, text in re.findall(r"([\"'`])((?:(?!\1)[^\\\n]|\\.)*)\1", source):
        text = re.sub(r"\$\{[^{}]*\}", "{}", text)
        if _WORDS.search(text) and not re.search(
            r"[<>=\[#]|^\.|px|rgba|^[a-z-]+( [a-z-]+)?$", text
        ):
            yield text, file, 0


def main() -> None:
    """Write the list, or print the texts with where they are."""
    if "--where" in sys.argv:
        for text, file, line in texts():
            print(f"{text}\t{file.relative_to(ROOT)}:{line}")
        return
    LIST.write_text("".join(f"{line}\n" for line in lines()), "utf-8")


if __name__ == "__main__":
    main()
