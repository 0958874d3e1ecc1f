"""A small part of the campaign (``make fuzz``), and every input that ever failed in it."""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from chopper import pipeline
from chopper.reports.to_html import deflate_text
from chopper.storage import files
from tests.fuzz import bases, campaign, kills, mutating, texts
from tests.fuzz.cases import TARGETS, Case, build, judge
from tests.fuzz.pool import run_all

SEED = 20_261_122
COUNT = 30


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    bases.make(folder)
    return folder


def test_hostile_inputs_get_an_answer_or_one_line(inputs: Path) -> None:
    work = functools.partial(campaign.run_case, inputs)
    jobs = [
        *sorted(campaign.CORPUS.glob("*.json")),
        *itertools.islice(campaign.cases(SEED, ()), COUNT),
    ]
    problems = [
        f"{job}: {problem}"
        for job, problem in run_all(work, jobs, workers_count=1)
        if problem is not None
    ]
    assert problems == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    [
        "record-force",
        "import-force",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("profile-force", "report")),
    ],
)
def test_a_killed_command_leaves_what_is_whole(target: str, inputs: Path, tmp_path: Path) -> None:
    for number, moment in enumerate((0.4, 0.9)):
        kill = kills.Kill(target, "SIGKILL", moment, by_time=False)
        assert kills.judge(kill, inputs, tmp_path / str(number)) is None


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_a_seed_makes_the_same_input_again(target: str, inputs: Path, tmp_path: Path) -> None:
    made = []
    for name in ("a", "b"):
        commands = build(Case(target, 3), inputs, tmp_path / name)
        files = sorted(p for p in (tmp_path / name).rglob("*") if p.is_file())
        # SQLite writes a counter of its own changes.
        contents = [p.read_bytes() for p in files if p.suffix not in (".db", ".rpd", ".sqlite")]
        made.append((commands, [p.relative_to(tmp_path / name) for p in files], contents))
    assert made[0] == made[1]


def misbehave(how: str, folder: Path) -> str | None:
    """A job of the pool that does what inputs must not make a command do."""
    if how == "crash":
        os.abort()
    if how == "memory":
        assert b"x" * (800 << 20)
    if how == "raise":
        raise RuntimeError(how)
    if how == "hang":
        while True:
            time.process_time()
    return f"said {how} in {folder.name}" if how == "word" else None


@pytest.mark.long
def test_crashes_hangs_and_memory_of_a_worker_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.pool.CPU_MOST_S", 2.0)
    jobs = ["well", "crash", "memory", "raise", "hang", "word", "well"]
    problems = dict(run_all(misbehave, jobs, workers_count=2))
    assert problems["well"] is None
    assert "said word" in str(problems["word"])
    for how, words in (
        ("crash", "crash: exit code -6"),
        ("memory", "memory: "),
        ("raise", "RuntimeError: raise"),
        ("hang", "hang: more than 2 s of CPU time"),
    ):
        assert words in str(problems[how])


def test_what_the_judge_finds(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of failure, made by a command that is broken on purpose."""
    attribute = pipeline.attribute
    case = Case("trace", 1, ())

    def judged(change: object) -> str:
        monkeypatch.setattr("chopper.pipeline.attribute", change)
        commands = build(case, inputs, folder := tmp_path / f"case{len(list(tmp_path.iterdir()))}")
        return str(judge([["analyze", commands[0][1], "--json"]], folder))

    def raising(*_: object, **__: object) -> None:
        raise KeyError("gone")

    def telling(*_: object, **__: object) -> None:
        from chopper.errors import InputError

        raise InputError(f"found {mutating.SECRET}")

    def writing(*sources: object, **options: object) -> object:
        Path("outside/secret.txt").write_text("overwritten")
        return attribute(*sources, **options)  # type: ignore[arg-type]

    assert judged(attribute) == "None"
    assert "KeyError in " in judged(raising)
    assert "foreign file's words" in judged(telling)
    assert "changed files outside: ['outside/secret.txt']" in judged(writing)


def test_what_is_written_through_a_link_is_found(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judged(name: str) -> str:
        folder = tmp_path / name
        build(Case("planted", 1, ()), inputs, folder)
        place = folder / "out" / f".page.md.{os.getpid()}.tmp"
        place.symlink_to(folder / "outside" / "victim.txt")
        return str(judge([["report", "in/0.json", "-o", "out/page.md"]], folder))

    assert judged("whole") == "None"
    monkeypatch.setattr(files, "create", lambda path: path.open("wb"))
    assert "changed files outside: ['outside/victim.txt']" in judged("broken")


@pytest.mark.parametrize(
    ("find", "harmless", "found"),
    [
        (texts.of_terminal, "ü 漢\n", ["a\x1b[2J", "\u202e", "\r", "\ud800"]),
        (texts.of_messages, "x" * 500, ["x" * 501, "a\u2066"]),
        (texts.of_json, '{"a": "\\u001b"}', ['{"a": "\u202e"}', '["\x7f"]']),
        (texts.of_csv, "a,b\n'=1,-2.5\n", ["a,b\n=x,2\n", "a,b\n1\n", "a\n@x\n", "a\n\x1b\n"]),
        (
            texts.of_markdown,
            "# a\n\n| a |\n|---|\n| `@x` \\| |\n\n- @&#8203;x\n",
            [
                "1. a",
                "<b>",
                "@x",
                "www.x.org",
                "[a](b)",
                "a\n===\n",
                "> a",
                "```a\n```",
                "**qzxqzx**",
            ],
        ),
        (
            texts.of_html,
            '<p title="a">&lt;qzxqzx&gt;</p><script type="application/json">["qzxqzx"]</script>',
            [
                "<qzxqzx>",
                '<p onclick="qzxqzx()">',
                "<p>\u202e</p>",
                '<p title="\x1b">',
                "<script>qzxqzx()</script>",
                '<script type="application/json">["\u202e"]</script>',
                "<script>" + deflate_text('["\u202e"]'.encode()) + "</script>",
                "<!--qzxqzx-->",
            ],
        ),
    ],
)
def test_what_parsers_of_outputs_find(
    find: Callable[[str], str | None], harmless: str, found: list[str]
) -> None:
    assert find(harmless) is None
    assert [text for text in found if find(text) is None] == []
