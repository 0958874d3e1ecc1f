"""One input of the campaign: made from a seed, given to commands, and judged.

A command may answer, or refuse in one line. What it must not do is in :func:`judge`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from chopper.views import VIEWS
from tests.command import Outcome, run
from tests.fuzz import mutating, planting, servers, texts
from tests.fuzz.mutating import SECRET

EDITS_MOST = 5
LEVELS = ("cause", "step", "phase", "layer", "op", "kernel", "rank")
_NUMBER_MOST = 1e24

_ATTRIBUTED = ("host_span", "device_event", "step", "collective")
"""Tables that every attribution reads."""

Commands = list[list[str]]


@dataclass(frozen=True)
class Case:
    """Where an input comes from.

    Attributes:
        target: kind of input, one of :data:`TARGETS`.
        seed: all random numbers follow from it.
        edits: numbers of the edits that are made; None for all. Each has random numbers of its own,
            so a failing input is made smaller by leaving edits out.
    """

    target: str
    seed: int
    edits: tuple[int, ...] | None = None

    def random(self, *what: object) -> Random:
        """Random numbers of one part of this case."""
        return Random(f"{self.target}:{self.seed}:{what}")

    def numbers(self) -> list[int]:
        """Numbers of the edits to make."""
        count = self.random("count").randint(1, EDITS_MOST)
        return [i for i in range(count) if self.edits is None or i in self.edits]

    def edit(self, change: Callable[[Random], object]) -> None:
        """Make each edit."""
        for number in self.numbers():
            change(self.random("edit", number))


def build(case: Case, bases: Path, folder: Path) -> Commands:
    """Write an input below ``folder/in`` and return the commands that are given it."""
    (folder / "in").mkdir(parents=True)
    (folder / "outside").mkdir()
    (folder / "outside" / "secret.txt").write_text(SECRET)
    return TARGETS[case.target](case, bases, folder / "in")


def _copy(case: Case, source: Path, place: Path, *names: str) -> Path:
    files = sorted(p for p in source.iterdir() if not names or p.name in names)
    return Path(shutil.copy(case.random("base").choice(files), place))


def _trace(case: Case, bases: Path, place: Path) -> Commands:
    file = _copy(case, bases / "trace", place)
    case.edit(lambda random: mutating.edit_file(random, file))
    random = case.random("pack")
    if random.random() < 0.2:
        file = mutating.pack(random, file)
    return _reading(case.random("commands"), f"in/{file.name}", str(bases / "trace" / "0.json"))


def _ranks(case: Case, bases: Path, place: Path) -> Commands:
    shutil.copytree(bases / "ranks", place / "ranks")
    files = sorted((place / "ranks").iterdir())
    case.edit(lambda random: mutating.edit_file(random, random.choice(files)))
    return _reading(case.random("commands"), "in/ranks", str(bases / "ranks"))


def _database(case: Case, bases: Path, place: Path) -> Commands:
    file = _copy(case, bases / "database", place)
    case.edit(lambda random: mutating.edit_file(random, file))
    return _reading(case.random("commands"), f"in/{file.name}", str(bases / "database" / file.name))


def _table(case: Case, bases: Path, place: Path) -> Commands:
    """A CSV or a snapshot beside a trace, or alone; or the tables of rocprofv3."""
    random = case.random("commands")
    if random.random() < 0.25:
        shutil.copytree(bases / "rocprof", place / "rocprof")
        files = sorted((place / "rocprof").iterdir())
        case.edit(lambda r: mutating.edit_file(r, r.choice(files)))
        return _reading(random, "in/rocprof", str(bases / "rocprof"))
    file = _copy(case, bases / "table", place)
    case.edit(lambda r: mutating.edit_file(r, file))
    if random.random() < 0.3:
        return [["import", f"in/{file.name}", "-o", "out/run"]]
    shutil.copy(bases / "trace" / "0.json", place)
    return [["analyze", "in/0.json", f"in/{file.name}", "--json"]]


def _run(case: Case, bases: Path, place: Path) -> Commands:
    random = case.random("commands")
    name = random.choice(("imported", "recorded", "telemetry", "telemetry", "host", "experiment"))
    shutil.copytree(bases / "run" / name, place / "run")
    case.edit(lambda r: mutating.edit_directory(r, place / "run"))
    if name == "experiment":
        return [["report", "in/run", "-o", "out/page.json"]]
    if random.random() < 0.1:
        shutil.copytree(bases / "run" / "imported", place / "other")
        return [["import", "in/run", "in/other", "-o", "out/run"]]
    return _reading(random, "in/run", str(bases / "run" / name), imports=False)


def _document(case: Case, bases: Path, place: Path) -> Commands:
    file = _copy(case, bases / "document", place)
    case.edit(lambda random: mutating.edit_file(random, file))
    name = f"in/{file.name}"
    match file.stem:
        case "config":
            return [["estimate", "memory", "--config", name, "--json"]]
    store = place.parent / "home" / "chopper"
    store.mkdir(parents=True)
    shutil.copy(file, store / "calibration.json")
    shutil.copytree(bases / "run" / "host", place / "run")
    return [
        ["analyze", "in/run", "--json"],
        case.random("commands").choice((["doctor"], ["doctor", "--json"])),
    ]


def _expression(case: Case, bases: Path, place: Path) -> Commands:
    said = mutating.expression(case.random("expression"))
    a, b = (str(bases / "trace" / f"{i}.json") for i in (0, 1))
    commands = (
        ["gate", a, b, "--json", "--fail-on", said],
        ["whatif", a, "--json", "--clock", said],
        ["whatif", a, "--json", "--faster", said],
        ["whatif", a, "--json", "--without", said],
        ["whatif", str(bases / "ranks"), "--json", "--link", said],
        ["whatif", str(bases / "ranks"), "--json", "--latency", said],
        ["analyze", a, "--top", said],
        ["analyze", a, "--by", said],
        ["record", "--prometheus", said, "--", "false"],
        ["record", "--steps", said, "-o", "out/run"],
        ["estimate", "network", "--size", said, "--json"],
        ["estimate", "network", "--ranks", said, "--json"],
        ["estimate", "cost", "--device", "h100-sxm", "--tokens-per-s", said, "--json"],
        ["estimate", "memory", "llama3-8b", "--capacity", said, "--json"],
        ["import", a, "-o", "out/run", "--timezone", said],
        ["analyze", said],
    )
    return [case.random("commands").choice(commands)]


def _web(case: Case, bases: Path, place: Path) -> Commands:
    """A trace, whole or not, from a server that need not be one's friend."""
    file = _copy(case, bases / "trace", place)
    random = case.random("commands")
    if random.random() < 0.3:
        case.edit(lambda r: mutating.edit_file(r, file))
    name = servers.address(case.random("server"), f"in/{file.name}")
    return _reading(random, name, str(bases / "trace" / "0.json"))


def _store(case: Case, bases: Path, place: Path) -> Commands:
    """What lies where a run is to be written, or read from."""
    random = case.random("commands")
    kind = random.choice(("new", "old", "new", "old", "none"))
    (place / "store").mkdir()
    if kind != "none":
        shutil.copytree(bases / "store" / kind, place / "store", dirs_exist_ok=True)
        if random.random() < 0.6:
            case.edit(lambda r: mutating.edit_directory(r, place / "store"))
    for _ in range(random.choice((0, 0, 1, 2))):
        foreign = place / "store" / random.choice(servers.FOREIGN)
        with contextlib.suppress(OSError):
            foreign.parent.mkdir(parents=True, exist_ok=True)
            if not foreign.exists():
                foreign.write_text("precious")
    if random.random() < 0.3:
        return _reading(random, "STORE", str(bases / "trace" / "0.json"), imports=False)
    force = ["--force"] * (random.random() < 0.6)
    trace = str(bases / "trace" / "0.json")
    return [["import", trace, "-o", "STORE", *force], ["analyze", "STORE", "--json"]]


def _planted(case: Case, bases: Path, place: Path) -> Commands:
    """Links, pipes and files of another user at the names that a command writes to."""
    for number in (0, 1):
        shutil.copy(bases / "trace" / f"{number}.json", place)
    shutil.copytree(bases / "ranks", place / "ranks")
    shutil.copytree(bases / "run" / "imported", place / "run")
    folder = place.parent
    (folder / "outside" / "victim.txt").write_text("precious")
    (folder / "outside" / "folder").mkdir()
    (folder / "outside" / "folder" / "mine.json").write_text("{}")
    (folder / "out").mkdir()
    (folder / "home").mkdir()
    commands = case.random("commands").choice(_WRITING)
    names = planting.written(commands, place, _environment)
    planting.prepare(commands, folder)
    case.edit(lambda random: planting.plant(random, folder, planting.places(random, names)))
    return commands


_SERVED = f"http://WEB/{servers.packed({'file': 'in/0.json'})}/0.json"
_WRITING: tuple[Commands, ...] = (
    [["import", "in/0.json", "-o", "out/run"], ["analyze", "out/run", "--json"]],
    [["import", "in/ranks", "-o", "out/run", "--workers", "1"], ["analyze", "out/run", "--json"]],
    [["import", "in/1.json", "-o", "out/run", "--force"], ["analyze", "out/run", "--json"]],
    [["gather", "in/run", "-o", "out/run"], ["analyze", "out/run", "--json"]],
    *([["report", "in/0.json", "-o", f"out/page.{kind}"]] for kind in ("html", "md", "json")),
    *([["export", "in/0.json", "--to", kind, "-o", "out/x"]] for kind in ("csv", "parquet")),
    [["export", "in/0.json", "--to", "perfetto", "-o", "out/x.json"]],
    [["query", "in/run", "SELECT rank FROM step", "-o", "out/rows.parquet"]],
    [["query", "in/run", "SELECT rank FROM step", "-o", "out/rows.csv"]],
    [["analyze", _SERVED, "--json"], ["analyze", _SERVED, "--json"]],
    [["gate", "in/0.json", "--history", "out/history", "--add", "--junit", "out/junit.xml"]],
    [["record", "-o", "out/run", "--", "true"]],
)
"""Commands that write files."""


SQL = (
    "SELECT * FROM host_span, step",
    "SELECT rank, name, sum(dur_ns) FROM device_event GROUP BY ALL",
    "SELECT * FROM communication JOIN device_event USING (rank)",
    "SELECT * FROM device_clock, process, allocator_block",
)


def _manifest(case: Case, bases: Path, place: Path) -> Commands:
    """A run whose documents hold numbers that nobody measured."""
    random = case.random("commands")
    name = random.choice(("full", "full", "full", "imported", "telemetry", "experiment"))
    shutil.copytree(bases / "run" / name, place / "run")
    files = sorted((place / "run").rglob("*.json"))
    files = [f for f in files if f.name != "trace.json"]
    case.edit(lambda r: mutating.forge_file(r, r.choice(files)))
    if name == "experiment":
        return [["report", "in/run", "-o", f"out/page{random.choice(('.html', '.json', '.md'))}"]]
    if random.random() < 0.1:
        return [["gate", "in/run", "--history", str(bases / "history"), "--json"]]
    return _reading(random, "in/run", str(bases / "run" / name), imports=False)


def _history(case: Case, bases: Path, place: Path) -> Commands:
    """The runs that a run is judged by."""
    folder = place.parent / "home" / "history"
    shutil.copytree(bases / "history", folder)
    case.edit(lambda r: mutating.edit_history(r, folder))
    random = case.random("commands")
    options: tuple[list[str], ...] = (
        ["--json"],
        ["--add"],
        ["--accept"],
        ["--junit", "out/junit.xml"],
        ["--strict"],
        [],
        [],
    )
    run = str(bases / "run" / "full")
    how = [*random.choice(options), *random.choice(([], [], ["--find", "0.01"]))]
    gate = ["gate", run, "--history", "home/history"]
    return [[*gate, *how], [*gate, *random.choice((["--json"], ["-o", "out/page.html"]))]]


def _tables(case: Case, bases: Path, place: Path) -> Commands:
    """Tables that are well-formed and strange: SQL and the attribution must agree on them."""
    random = case.random("commands")
    name = random.choice(("imported", "layers"))
    shutil.copytree(bases / "run" / name, place / "run")
    file = random.choice(sorted((place / "run").rglob("*.parquet")))
    case.edit(lambda r: mutating.edit_parquet(r, file))
    sql = f"SELECT COLUMNS(*)::VARCHAR FROM {file.stem}"
    others = _reading(random, "in/run", str(bases / "run" / name), imports=False)
    return [["query", "in/run", sql, "--format", "json"], ["analyze", "in/run", "--json"], *others]


def _sql(case: Case, bases: Path, place: Path) -> Commands:
    file = place / "statement.sql"
    text = mutating.statement(case.random("statement"))
    file.write_text(text, encoding="utf-8", errors="surrogatepass", newline="")
    shown = [["--format", kind] for kind in ("table", "csv", "json")]
    written = [["-o", f"out/rows.{kind}"] for kind in ("parquet", "csv")]
    how = case.random("commands").choice((*shown, *written))
    return [["query", str(bases / "run" / "imported"), "--file", f"in/{file.name}", *how]]


_QUOTE = "'", '"'


def _hostile(case: Case, bases: Path, place: Path) -> str:
    """A recording whose texts are hostile: traces, databases, tables or whole runs."""
    kind = case.random("base").choice(("trace", "ranks", "database", "run", "run", "run"))
    if kind in ("trace", "database"):
        file = _copy(case, bases / kind, place)
        case.edit(lambda r: texts.edit(r, file))
        return f"in/{file.name}"
    if kind == "ranks":
        source = bases / "ranks"
    else:
        names = ("full", "imported", "layers", "recorded", "telemetry", "host")
        source = bases / "run" / case.random("run").choice(names)
    shutil.copytree(source, place / kind)
    files = sorted(p for p in (place / kind).rglob("*") if p.is_file())
    case.edit(lambda r: texts.edit(r, r.choice(files)))
    return f"in/{kind}"


def _text(case: Case, bases: Path, place: Path) -> Commands:
    """Hostile texts to every output."""
    source, random = _hostile(case, bases, place), case.random("commands")
    trace = str(bases / "trace" / "0.json")
    view, level = random.choice(sorted(VIEWS)), random.choice(LEVELS)
    form = random.choice(([], ["--json"], ["--csv"]))
    page = f"out/page{random.choice(('.html', '.html', '.md', '.md', '.txt', '.json'))}"
    said = texts.argument(random)
    sql = random.choice((
        "SELECT * FROM host_span", "SELECT * FROM device_event", "SELECT * FROM ranks",
        f"SELECT name AS {_sql_text(said, 1)} FROM host_span",
        f"SELECT {_sql_text(said, 0)} AS a, [name, {_sql_text(said, 0)}] AS b FROM device_event",
        f"SELECT * FROM step WHERE {said}", f"SELECT error({_sql_text(said, 0)})",
    ))  # fmt: skip
    commands: list[Commands] = [
        [["analyze", source, *form]],
        [["analyze", source, "--by", level, *form]],
        [["analyze", source, "--view", view, *form]],
        [["report", source, "-o", page]],
        [["compare", source, trace, "--allow-different", "-o", page]],
        [["compare", trace, source, "--allow-different", *random.choice(([], ["--json"]))]],
        [["gate", source, "--history", "home/history", "--add", "--junit", "out/junit.xml"]],
        [["whatif", source, *random.choice(([], ["--json"]))]],
        [["query", source, sql, "--format", random.choice(("table", "csv", "json"))]],
        [["query", source, sql, "-o", f"out/rows.{random.choice(('csv', 'json', 'parquet'))}"]],
        [["import", source, "-o", "out/run"], ["report", "out/run", "-o", page]],
        [["analyze", said], ["report", source, "-o", f"out/{said}"]],
    ]
    return random.choices(commands, [2, 3, 4, 6, 2, 1, 1, 1, 2, 2, 1, 1])[0]


def _sql_text(said: str, quote: int) -> str:
    mark = _QUOTE[quote]
    return f"{mark}{said.encode('utf-8', 'replace').decode().replace(mark, mark * 2)}{mark}"


def _exports(case: Case, bases: Path, place: Path) -> Commands:
    """Every exported form of a hostile recording, by hostile names."""
    source, random = _hostile(case, bases, place), case.random("commands")
    out = f"out/{texts.file_name(random)}"
    kind = random.choice(("csv", "parquet", "perfetto", "perfetto"))
    commands: list[Commands] = [
        [["export", source, "--to", kind, "-o", out]],
        [["report", source, "-o", f"{out}{random.choice(('.html', '.md', '.txt', '.json'))}"]],
        [["query", source, "SELECT * FROM host_span", "-o", f"{out}.{random.choice(_ROWS)}"]],
        [["import", source, "-o", out], ["analyze", out, "--json"]],
    ]
    if kind == "perfetto":
        commands[0].append(["analyze", f"{out}/trace.json.gz", "--json"])
    return random.choices(commands, [6, 2, 1, 2])[0]


_ROWS = ("csv", "json", "parquet")


def _reading(random: Random, source: str, other: str, *, imports: bool = True) -> Commands:
    """Commands that read a source: mostly its attribution, whose numbers are checked."""
    view = random.choice(sorted(VIEWS))
    choices: list[Commands] = [
        [["analyze", source, "--json"]],
        [["analyze", source]],
        [["analyze", source, "--by", random.choice(LEVELS), "--json"]],
        [["analyze", source, "--view", view, "--json"]],
        [["analyze", source, "--view", view, "--csv"]],
        [["report", source, "-o", f"out/page{random.choice(('.html', '.md', '.txt', '.json'))}"]],
        [["compare", source, other, "--json", "--allow-different"]],
        [["gate", source, other, "--fail-on", "step>+5%"]],
        [["whatif", source, "--json"]],
        [["export", source, "--to", random.choice(("csv", "parquet", "perfetto")), "-o", "out/x"]],
        [["import", source, "-o", "out/run"], ["analyze", "out/run", "--json"]],
        [["query", source, random.choice(SQL), "-o", "out/rows.parquet"]],
    ]
    weights = [12, 2, 2, 2, 1, 3, 2, 1, 2, 1, 3 if imports else 0, 2]
    return random.choices(choices, weights)[0]


TARGETS: dict[str, Callable[[Case, Path, Path], Commands]] = {
    "trace": _trace,
    "ranks": _ranks,
    "database": _database,
    "table": _table,
    "run": _run,
    "document": _document,
    "expression": _expression,
    "sql": _sql,
    "tables": _tables,
    "web": _web,
    "store": _store,
    "manifest": _manifest,
    "history": _history,
    "planted": _planted,
    "text": _text,
    "exports": _exports,
}
WEIGHTS = {"trace": 8, "ranks": 3, "database": 4, "table": 3, "run": 8, "document": 2,
           "expression": 2, "sql": 2, "tables": 3,
           "web": 4, "store": 3, "manifest": 4, "history": 2,
           "planted": 3, "text": 5, "exports": 4}  # fmt: skip


# ---------------------------------------------------------------- judging


def judge(commands: Commands, folder: Path) -> str | None:
    """Run commands in ``folder``; return what one of them did wrong, in lines, or None.

    Wrong is: an exception, a warning, more than one line of refusal, times that do not add up, JSON
    that is none, control characters, a file outside ``out``, or words of a file that is not the
    input's.
    """
    (folder / "out").mkdir(exist_ok=True)
    (folder / "home").mkdir(exist_ok=True)
    before = _state(folder)
    problem, outcomes = None, list[Outcome]()
    with contextlib.chdir(folder), _environment(folder), warnings.catch_warnings():
        warnings.simplefilter("error")
        objects = servers.Objects(folder / "in" / "store")
        for command in commands:
            if outcomes and outcomes[-1].code and planting.is_planted(commands, folder):
                break  # what stands there is no answer of ours
            problem = (
                _judge_command(command, outcomes)
                or _disagreement(commands, outcomes)
                or objects.problem(command, outcomes)
                or planting.otherwise(commands, outcomes, folder)
            )
            if problem is not None:
                problem = f"chopper {' '.join(command)}\n{problem}"
                break
    if problem is None and (changed := _changed(before, _state(folder))):
        problem = f"chopper {' '.join(commands[-1])}\nchanged files outside: {changed}"
    if problem is None and (file := _telling(folder / "out")) is not None:
        problem = f"chopper {' '.join(commands[-1])}\na foreign file's words in {file}"
    if problem is None and (wrong := _unreadable(commands, folder / "out")) is not None:
        problem = f"chopper {' '.join(commands[-1])}\n{wrong}"
    if problem is None:
        told = [p for p in (folder / "home").rglob("*") if SECRET in p.name]
        if told or _telling(folder / "home") is not None:
            problem = f"chopper {' '.join(commands[-1])}\na secret in a cache"
    return problem


@contextlib.contextmanager
def _environment(folder: Path) -> Any:
    kept = dict(os.environ)
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        os.environ[name] = str(folder / "home")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def _judge_command(command: list[str], outcomes: list[Outcome]) -> str | None:
    try:
        outcome = run(*map(servers.placed, command))
    except MemoryError as exc:
        return f"memory: {_where(exc)}"
    except Exception as exc:  # noqa: BLE001 - that is what is looked for
        return _where(exc)
    outcomes.append(outcome)
    return _judge_outcome(command, outcome)


def _disagreement(commands: Commands, outcomes: list[Outcome]) -> str | None:
    """What SQL and the attribution say otherwise of the same table, or two commands of a run."""
    if commands[0][0] == "import" and len(outcomes) > 1 and not outcomes[0].code:
        damaged = next((o.err for o in outcomes[1:] if "damaged" in o.err), None)
        return None if damaged is None else f"what import wrote is damaged\n{damaged}"
    if [command[0] for command in commands[:2]] != ["query", "analyze"] or len(outcomes) < 2:
        return None
    table = commands[0][2].split()[-1]
    of_sql, of_attribution = (f"/{table}.parquet: " in outcome.err for outcome in outcomes[:2])
    agree = of_sql == of_attribution or (of_sql and table not in _ATTRIBUTED)
    return None if agree else f"SQL refuses {table}: {of_sql}, analyze: {of_attribution}"


def _where(exc: BaseException) -> str:
    """Type and place of an exception, then its traceback."""
    frames = traceback.extract_tb(exc.__traceback__)
    own = [f for f in frames if "/chopper/" in f.filename and "/tests/" not in f.filename]
    place = (own or list(frames))[-1]
    name = Path(place.filename)
    text = "".join(traceback.format_exception(exc))[-2500:]
    return f"{type(exc).__name__} in {name.parent.name}/{name.name}:{place.name}\n{text}"


_SAID_AT_THE_START = ("chopper: recording to ", "chopper: metrics at ")


def _judge_outcome(command: list[str], outcome: Outcome) -> str | None:
    for text in (outcome.out, outcome.err):
        if SECRET in text:
            return f"a foreign file's words in the output\n{text[:500]}"
        if "Traceback" in text:
            return f"a traceback is printed\n{text[-1500:]}"
    told = texts.of_messages(outcome.err) or texts.of_stdout(command, outcome.out)
    if told is not None:
        return f"{told}\n{outcome.err[:1500]}\n{outcome.out[:500]}"
    if outcome.code == 0:
        return _judge_answer(command, outcome.out)
    gated = command[0] == "gate"
    if outcome.code == 1 and gated and outcome.out:
        return None
    if outcome.code == 2:
        return None if outcome.lines else "exit code 2 without a word"
    if outcome.code != 1 and command[0] != "record":
        return f"exit code {outcome.code}\n{outcome.err[:500]}"
    if command[0] == "doctor" and outcome.out:
        return None
    # Where it records to, and where it serves numbers, is said before the command is started.
    lines = [line for line in outcome.lines if not line.startswith(_SAID_AT_THE_START)]
    if len(lines) != 1 or not lines[0].startswith("chopper: "):
        return f"refused in {len(lines)} lines\n{outcome.err[:1500]}"
    return None


def _judge_answer(command: list[str], out: str) -> str | None:
    if "--json" not in command:
        return None
    try:
        answer = json.loads(out, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as exc:
        return f"JSON that is none: {exc}"
    if (number := _absurd(answer)) is not None:
        return f"a number beyond reason: {number!r}"
    if command[0] != "analyze" or "--view" in command:
        return None
    parents = {c["parent"] for c in answer["causes"]}
    leaves = [c["time_ns"] for c in answer["causes"] if c["id"] not in parents]
    if sum(leaves) != answer["observed_ns"]:
        return f"causes sum to {sum(leaves)}, observed {answer['observed_ns']}"
    if min(leaves, default=0) < 0:
        return "a cause below zero"
    groups = answer.get("groups")
    if groups is not None and sum(g["time_ns"] for g in groups) != answer["observed_ns"]:
        return "groups do not sum to the observed time"
    if sum(r["observed_ns"] for r in answer["ranks"]) != answer["observed_ns"]:
        return "ranks do not sum to the observed time"
    return None


def _absurd(answer: Any) -> float | None:
    """A number of an answer that no machine measures."""
    if isinstance(answer, dict | list):
        members = answer.values() if isinstance(answer, dict) else answer
        return next((n for n in map(_absurd, members) if n is not None), None)
    beyond = isinstance(answer, int | float) and abs(answer) > _NUMBER_MOST
    return answer if beyond else None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _state(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Size, time and mode of all files that a command must leave alone."""
    state = {}
    for place, folders, files in os.walk(folder):
        if Path(place) == folder:
            folders[:] = [f for f in folders if f not in ("out", "home")]
        for name in files:
            status = os.lstat(Path(place, name))
            facts = status.st_size, status.st_mtime_ns, status.st_mode
            state[os.path.relpath(Path(place, name), folder)] = facts
    return state


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    names = before.keys() | after.keys()
    return sorted(n for n in names if before.get(n) != after.get(n))


def _unreadable(commands: Commands, place: Path) -> str | None:
    """What is wrong with an output, to a parser of its format; traces are kept as they were."""
    if planting.is_planted(commands, place.parent):
        return None  # files of others lie there, too
    for file in sorted(place.rglob("*")):
        kept = file.parent.name.startswith("rank-") and file.name.startswith("trace")
        if not kept and file.is_file() and (problem := texts.of_file(file)) is not None:
            return f"{file.suffix}: {problem}"
    return None


def _telling(place: Path) -> Path | None:
    """A file that holds the secret."""
    for file in place.rglob("*"):
        if file.is_file() and not file.is_symlink() and SECRET.encode() in file.read_bytes():
            return file
    return None
