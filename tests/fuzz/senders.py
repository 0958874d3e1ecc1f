"""Ranks that send what they should not, through the real store of a job, to a rank 0 that gathers.

The command ``GATHER FOLDER`` closes the recordings of rank 0, a good rank on another disk, and
one that does what a script in the folder says.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from chopper.errors import message_line
from chopper.recording import handover
from chopper.recording.finish import finalize
from chopper.storage import manifest as m
from chopper.storage.layout import MANIFEST, rank_dir_name
from tests.command import Outcome
from tests.fuzz import mutating

GATHER = "GATHER"
WORLD = 3
_CHUNK_BYTES = 3_000
_PATIENCES_S, _LEAVING_S = (3.0, 20.0), 0.2

_NAMES = (
    "../rank-00002/x", "..", "/etc/x", "", ".", "a/../../x", "./manifest.json", "manifest.json/x",
    "rank-00002/manifest.json", "a\0b", "x" * 300, "step.arrow", ".claim", "trace-1.json",
    "\x1b[31m", "\u202e.json", "\udcff", "a\nb", "C:\\x", "~/x", "-rf", "trace.json.gz/",
)  # fmt: skip
_OTHERS = (
    "taken", "left", "receiver/1", "receiver/2", "2/files", "2/go", "2/0", "2/0/taken", "2/end",
    "0/files", "-1/files", "1/end", "1/go", "1/0/taken", "1/files",
)  # fmt: skip


def rank_of(base: Path, folder: Path, rank: int, host: str) -> m.RankManifest:
    """Copy a rank that was recorded, as one of a job; returns its manifest."""
    shutil.copytree(base, folder)
    part = m.decode_rank((folder / MANIFEST).read_bytes(), "")
    part.rank, part.local_rank, part.world_size = rank, 0, WORLD
    part.hostname, part.machine, part.process_started = host, host, 1
    (folder / MANIFEST).write_bytes(m.encode(part))
    return part


def script(folder: Path) -> list[list[Any]]:
    """What the rank does that sends these files: steps of the protocol, in order."""
    files = [(p.name, p.read_bytes()) for p in sorted(folder.iterdir())]
    announced = json.dumps([[name, len(data)] for name, data in files]).encode()
    steps: list[list[Any]] = [_set("1/files", announced), ["wait", "1/go"]]
    number = 0
    for _, data in files:
        for start in range(0, len(data), _CHUNK_BYTES):
            chunk = data[start : start + _CHUNK_BYTES]
            steps += [_set(f"1/{number}", chunk), ["wait", f"1/{number}/taken"]]
            number += 1
    return [*steps, ["wait", "1/end"], ["add", "left", 1]]


def _set(key: str, data: bytes) -> list[Any]:
    return ["set", key, base64.b64encode(data).decode()]


def edit(random: Random, steps: list[list[Any]]) -> None:
    """Change what is announced, what is sent, or the order of it."""
    sets = [n for n, step in enumerate(steps) if step[0] == "set"]
    match random.choice(("announce",) * 6 + ("chunk",) * 4 + ("order", "other", "other", "drop")):
        case "announce" if sets:
            step = steps[sets[0]]
            step[2] = base64.b64encode(_announced(random, base64.b64decode(step[2]))).decode()
        case "chunk" if sets:
            step = steps[random.choice(sets)]
            data = base64.b64decode(step[2])
            changed = random.choice(
                (
                    lambda: data + b"more" * random.choice((1, 1_000, 2_000_000)),
                    lambda: data[: random.randrange(len(data) + 1)],
                    lambda: b"",
                    lambda: mutating.edit_bytes(random, data),
                    lambda: bytes(len(data)),
                )
            )()
            step[2] = base64.b64encode(changed[: 8 << 20]).decode()
        case "order":
            a, b = random.randrange(len(steps)), random.randrange(len(steps))
            steps[a], steps[b] = steps[b], steps[a]
        case "other":
            key = random.choice(_OTHERS)
            what = random.choice(
                (
                    _set(key, random.choice((b"", b"x", b"null", b"[]", b"\xff", b"9" * 30))),
                    ["add", key, random.choice((1, -1, 1 << 40))],
                    ["delete", key],
                )
            )
            steps.insert(random.randrange(len(steps)), what)
        case _:
            del steps[random.randrange(len(steps)) :]
    if not steps:
        steps.append(["add", "left", 1])


def _announced(random: Random, data: bytes) -> bytes:
    try:
        files = json.loads(data)
        assert isinstance(files, list)
        entry = random.choice(files)
        name, size = entry
    except (ValueError, AssertionError, IndexError, TypeError):
        return mutating.edit_bytes(random, data)
    match random.choice(("name", "name", "size", "size", "more", "json", "bytes", "null", "many")):
        case "name":
            entry[0] = random.choice((*_NAMES, name.upper() if isinstance(name, str) else 0))
        case "size":
            some = size if isinstance(size, int) else 1
            entry[1] = random.choice((*mutating.FORGED, some + 1, max(some - 1, 0), 2 * some))
        case "more":
            files.insert(random.randrange(len(files) + 1), [random.choice(_NAMES), 0])
        case "json":
            files = mutating.edit_json(random, files)
        case "null":
            files = None
        case "many":
            files += [[f"trace-{n}.json", 0] for n in range(random.choice((9, 2_000, 20_000)))]
        case _:
            return mutating.edit_bytes(random, data)
    return mutating.to_text(random, files)


def meddles(steps: list[list[Any]]) -> bool:
    """Whether a rank writes what only others may, for which no answer can be told from theirs."""
    own = {"1/files", *(f"1/{n}" for n in range(1_000))}
    return any(
        key not in own if what == "set" else what in ("add", "delete") and key != "left"
        for what, key, *_ in steps
    )


def _play(store: Any, steps: list[list[Any]], over: threading.Event) -> None:
    with contextlib.suppress(RuntimeError, ValueError):
        for what, key, *value in steps:
            if what == "set":
                store.set(key, base64.b64decode(value[0]))
            elif what == "add":
                store.add(key, value[0])
            elif what == "delete":
                store.delete_key(key)
            else:
                while not store.check([key]):
                    if over.wait(0.01):
                        return
                store.delete_key(key)


@contextlib.contextmanager
def _impatient(patience_s: float) -> Iterator[None]:
    names = ("_CHUNK_BYTES", "_PATIENCE_S", "_LEAVING_S")
    before = [getattr(handover, name) for name in names]
    for name, value in zip(names, (_CHUNK_BYTES, patience_s, _LEAVING_S), strict=True):
        setattr(handover, name, value)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(handover, name, value)


def gathered(place: Path, out: Path) -> Outcome:
    """Close the recordings of a job, one of whose ranks does what ``place/script.json`` says.

    Raises:
        AssertionError: another rank is lost, or rank 0 has what nobody may send.
    """
    steps = json.loads((place / "script.json").read_text())
    here, there = out / "a" / "run", out / "b" / "run"
    for patience_s in _PATIENCES_S:
        shutil.rmtree(out / "a", ignore_errors=True)
        shutil.rmtree(out / "b", ignore_errors=True)
        lines = _handed_over(place, here, there, steps, patience_s)
        # On a busy machine a rank may get no core for as long as it is waited for.
        if meddles(steps) or "no message" not in str(lines[2]):
            break
    _check(here, there, steps, lines)
    finalize(here)
    line = lines[0]
    if line is None or line.startswith("gathered "):
        return Outcome(0, "", "")
    return Outcome(1, "", message_line(f"chopper: {line}") + "\n")


def _handed_over(
    place: Path, here: Path, there: Path, steps: list[list[Any]], patience_s: float
) -> dict[int, str | None]:
    """Return what ranks 0 and 2 say, while rank 1 goes through the steps."""
    import torch.distributed

    dist: Any = torch.distributed
    ranks = [
        (folder / rank_dir_name(rank), rank_of(place / name, folder / rank_dir_name(rank), rank, n))
        for folder, rank, name, n in ((here, 0, "zero", "a"), (there, 2, "good", "b"))
    ]
    server: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    lines: dict[int, str | None] = {}

    def close(folder: Path, part: m.RankManifest) -> None:
        store = dist.PrefixStore("chopper", server.clone())
        lines[part.rank] = handover.hand_over(store, folder, part)

    threads = [threading.Thread(target=close, args=one) for one in ranks]
    hostile = dist.PrefixStore("chopper", server.clone())
    over = threading.Event()
    sending = threading.Thread(target=_play, args=(hostile, steps, over))
    with _impatient(patience_s):
        for thread in (*threads, sending):
            thread.start()
        for thread in threads:
            thread.join()
        over.set()
        sending.join()
    return lines


def _check(here: Path, there: Path, steps: list[list[Any]], lines: dict[int, str | None]) -> None:
    names = sorted(p.name for p in here.iterdir())
    assert not [n for n in names if not n.startswith("rank-0000")], f"left or written: {names}"
    assert "rank-00000" in names, "rank 0 lost its own"
    assert meddles(steps) or "rank-00002" in names, f"the good rank is lost: {lines}"
    if "rank-00002" in names and not meddles(steps):
        for file in (there / "rank-00002").iterdir():
            assert file.read_bytes() == (here / "rank-00002" / file.name).read_bytes(), file.name
    if "rank-00001" in names:
        sent = sum(len(base64.b64decode(step[2])) for step in steps if step[0] == "set")
        files = [p for p in (here / "rank-00001").rglob("*") if p.is_file()]
        has = sum(p.stat().st_size for p in files)
        assert has <= sent, f"rank 1 has {has} bytes of {sent} sent"
        assert len(files) <= 60 or has, "files that nobody recorded"
        part = m.decode_rank((here / "rank-00001" / MANIFEST).read_bytes(), "rank 1")
        assert (part.rank, part.world_size) == (1, WORLD), "another rank's"
