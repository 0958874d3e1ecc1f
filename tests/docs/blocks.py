"""Find the commands that the documentation shows: on its pages, written and generated, and in help.

A fenced block without a language, or an indented one, holds commands, or a transcript, whose
commands begin with ``$`` and whose other lines are what they print. A span of code that begins with
a program's name is a command too, or mentions one (``chopper whatif --fix``).
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from chopper.cli import cli

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("chopper", "make", "pip", "python", "pytest", "curl", "git", "eval")
FENCE = re.compile(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", re.MULTILINE)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n)+")
SHELL = ("", "sh", "bash", "shell", "console")
SPAN = re.compile(r"`([^`]+)`")
ALTERNATIVES = re.compile(r"(?<=[ ,])[\w-]+(?:\|[\w-]+)+(?=[ ,]|$)")


@dataclass(frozen=True)
class Command:
    """A command as the documentation shows it."""

    source: str
    """File and line, or whose help."""

    text: str
    in_prose: bool = False

    printed: str | None = None
    """What stands below it in a transcript."""

    @property
    def words(self) -> list[str]:
        """Its words up to a pipe, a redirection or a comment."""
        lexer = shlex.shlex(self.text, posix=True, punctuation_chars="|<>;&")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in lexer:
            if re.fullmatch(r"[|<>;&]+", word):
                break
            words.append(word)
        return [word for word in words if word not in ("…", "...")]


def is_command(line: str) -> bool:
    first, _, rest = line.strip().partition(" ")
    return first.rpartition("/")[2] in PROGRAMS and bool(rest)


def pages() -> dict[str, str]:
    """Every page with commands by its name, those that docs/hooks.py makes included."""
    from docs import hooks

    written = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"]
    written += sorted((ROOT / "docs").rglob("*.md"))
    texts = {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in written}
    return texts | {"docs/reference/views.md": hooks.views_page()} | hooks.detector_pages()


def in_block(source: str, block: str, line: int) -> Iterator[Command]:
    lines = block.splitlines()
    transcript = any(text.startswith("$ ") for text in lines)
    at = 0
    while at < len(lines):
        first, text = at, lines[at]
        while text.endswith("\\"):
            at += 1
            text = f"{text[:-1].rstrip()} {lines[at].strip()}"
        at += 1
        if not transcript and is_command(text):
            yield Command(f"{source}:{line + first}", text)
        elif transcript and text.startswith("$ "):
            start = at
            while at < len(lines) and not lines[at].startswith("$ "):
                at += 1
            printed = "\n".join(lines[start:at])
            yield Command(f"{source}:{line + first}", text[2:], printed=printed)


def on_page(source: str, text: str) -> Iterator[Command]:
    for fence in FENCE.finditer(text):
        if fence[2] in SHELL:
            yield from in_block(source, fence[3], text[: fence.start(3)].count("\n") + 1)
    prose = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    for block in INDENTED.finditer(prose):
        number = prose[: block.start()].count("\n") + 1
        yield from in_block(source, textwrap.dedent(block[0]), number)
    for span in SPAN.finditer(prose):
        line = f"{source}:{prose[: span.start()].count(chr(10)) + 1}"
        content = " ".join(span[1].split())
        if is_command(content):
            yield from (Command(line, text, in_prose=True) for text in alternatives(content))


def alternatives(text: str) -> list[str]:
    """Write ``--to csv|parquet`` as two commands."""
    choice = ALTERNATIVES.search(text)
    if choice is None:
        return [text]
    return [
        written
        for word in choice[0].split("|")
        for written in alternatives(text[: choice.start()] + word + text[choice.end() :])
    ]


def in_help() -> Iterator[Command]:
    """The examples of every command's help."""
    root = click.Context(cli, info_name="chopper")

    def below(group: click.Group, context: click.Context) -> Iterator[tuple[str, click.Command]]:
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            path = f"{context.command_path} {name}"
            yield path, command
            if isinstance(command, click.Group):
                yield from below(command, click.Context(command, info_name=name, parent=context))

    for path, command in below(cli, root):
        examples = (command.help or "").partition("Examples:\n")[2].partition("\n\n")[0]
        for line in examples.splitlines():
            text = line.strip()
            if is_command(text):
                # A remark stands behind a wide gap.
                yield Command(f"{path} --help", text.split("   ", 1)[0])


def documented() -> list[Command]:
    """Every command, as often as it is shown."""
    of_pages = [c for source, text in pages().items() for c in on_page(source, text)]
    return [*of_pages, *in_help()]


def commands() -> list[Command]:
    """Each text once, as a transcript where there is one."""
    distinct: dict[str, Command] = {}
    for command in sorted(documented(), key=lambda c: c.printed is None):
        distinct.setdefault(re.sub(r"\s+#\s.*", "", command.text).strip(), command)
    return [*distinct.values()]
