"""The end of a job without a shared disk: its ranks hand their files to rank 0, through its store.

Of ``torch.distributed`` only the store is used, which is there for every backend, with a connection
of its own: nothing can be mixed up with a collective of the program, and nobody waits for a rank
that died longer than ``_PATIENCE_S``.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from chopper.errors import CaptureError, reason_of
from chopper.hardware.launchers import process_group
from chopper.storage import manifest as m
from chopper.storage.files import inside
from chopper.storage.layout import rank_dir_name
from chopper.storage.processes import part_of
from chopper.wording import plural, some

_CHUNK_BYTES = 4 << 20
"""Torch's store takes at most 8 MiB at once, and holds one of these."""
_PATIENCE_S = 60.0
"""Time without any progress of rank 0, or of the rank that it waits for."""
_LEAVING_S = 5.0
_POLL_S = 0.02
HANDED_OVER = "handed-over.new"
"""End of the name of a rank's folder that is not whole yet."""
_REMEDY = "bring the nodes' directories together, and make one run of them with chopper gather"


def job_store() -> Any:
    """Return a new connection to the store of the job; None without a process group."""
    dist = process_group()
    if dist is None:
        return None
    store = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore("chopper", store.clone() if hasattr(store, "clone") else store)


def hand_over(store: Any, folder: Path, part: m.RankManifest) -> str | None:
    """Send the files of a rank to rank 0, or receive those of all others there.

    Args:
        store: of the job, from :func:`job_store`.
        folder: of this rank, in its run directory.
        part: its manifest.

    Returns:
        What became of it, in a line; None where there is nothing to say.
    """
    try:
        if store is None:
            raise CaptureError("the process group had ended")
        if part.rank == 0:
            return _received(store, folder, part)
        return _sent(store, folder, part)
    except KeyboardInterrupt:
        reason = "interrupted"
    except OSError as exc:
        reason = reason_of(exc)
    except Exception as exc:  # noqa: BLE001 - the profiler never changes the program
        reason = str(exc).partition("\n")[0] or type(exc).__name__
    return f"rank {part.rank} was not gathered: {reason}; {_REMEDY}"


def _wait(store: Any, key: str, patience_s: float | None = None) -> bytes:
    """Return the value of a key, which is removed; waits as long as rank 0 goes on.

    Raises:
        CaptureError: it does not.
    """
    taken_count = -1
    while True:
        try:
            store.wait([key], timedelta(seconds=patience_s or _PATIENCE_S))
        except RuntimeError as exc:
            before, taken_count = taken_count, store.add("taken", 0)
            if taken_count == before or patience_s is not None:
                raise CaptureError(f"no message for {_PATIENCE_S:.0f} s") from exc
            continue
        value: bytes = store.get(key)
        store.delete_key(key)
        return value


def _files(folder: Path) -> list[tuple[str, int]]:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    return [(p.relative_to(folder).as_posix(), p.stat().st_size) for p in files]


def _sent(store: Any, folder: Path, part: m.RankManifest) -> str | None:
    """Send a rank's files, unless they are where rank 0 sees them."""
    rank = part.rank
    receiver = json.loads(_wait(store, f"receiver/{rank}"))
    first = part_of(folder.parent / rank_dir_name(0))
    if first is not None and _identity(first) == receiver["identity"]:
        store.set(f"{rank}/files", "null")
        return None
    files = _files(folder)
    store.set(f"{rank}/files", json.dumps(files))
    _answer(store, f"{rank}/go")
    for number, chunk in enumerate(_chunks(folder, files)):
        store.set(f"{rank}/{number}", chunk)
        _answer(store, f"{rank}/{number}/taken")
    _answer(store, f"{rank}/end")
    store.add("left", 1)
    return f"rank {rank} was gathered into {receiver['path']} on {receiver['host']}"


def _answer(store: Any, key: str) -> None:
    """Wait for an answer of rank 0, which is empty or says why it takes no more."""
    if refusal := _wait(store, key):
        store.add("left", 1)
        raise CaptureError(refusal.decode())


def _chunks(folder: Path, files: list[tuple[str, int]]) -> Iterator[bytes]:
    """Yield the contents of files, of each as many bytes as were announced."""
    for name, size_bytes in files:
        with (folder / name).open("rb") as file:
            for start in range(0, size_bytes, _CHUNK_BYTES):
                yield file.read(min(_CHUNK_BYTES, size_bytes - start))


def _identity(part: m.RankManifest) -> list[object]:
    return [part.machine, part.pid, part.process_started, part.start_ns]


def _received(store: Any, folder: Path, part: m.RankManifest) -> str | None:
    """Receive the files of all ranks that are on other disks than this one, one after another."""
    world_size = part.world_size or 1
    receiver = {"host": part.hostname, "path": str(folder.parent), "identity": _identity(part)}
    for rank in range(1, world_size):
        store.set(f"receiver/{rank}", json.dumps(receiver))
    refusal, answers_count = "", 0
    gathered, silent = [], []
    until_s = time.monotonic() + _PATIENCE_S
    for rank in range(1, world_size):
        try:
            files = json.loads(_wait(store, f"{rank}/files", max(until_s - time.monotonic(), 0.1)))
            if files is None:
                continue
            answers_count += 1
            store.set(f"{rank}/go", refusal)
            if not refusal:
                refusal = _take(store, folder.parent, rank, files)
                gathered += [] if refusal else [rank]
        except CaptureError:
            silent.append(rank)
        else:
            until_s = time.monotonic() + _PATIENCE_S
    until_s = time.monotonic() + _LEAVING_S  # the store may end with this process
    while store.add("left", 0) < answers_count and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    if refusal:
        return f"not all ranks were gathered: {refusal}; {_REMEDY}"
    if silent:
        missing = f"no message from {plural(len(silent), 'rank')} ({some(silent)})"
        return f"not all ranks were gathered: {missing}; {_REMEDY}"
    return f"gathered {plural(len(gathered), 'rank')} of other nodes" if gathered else None


def _take(store: Any, run: Path, rank: int, files: list[tuple[str, int]]) -> str:
    """Receive the folder of a rank; it has its name when it is whole.

    Returns:
        Why it cannot be written; empty where it was.

    Raises:
        CaptureError: the rank stopped to send.
    """
    folder = run / rank_dir_name(rank)
    temporary = run / f".{folder.name}.{HANDED_OVER}"
    answer = f"{rank}/0/taken"
    number = 0
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for name, size_bytes in files:
            target = inside(temporary, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as file:
                while file.tell() < size_bytes:
                    answer = f"{rank}/{number}/taken"
                    file.write(_wait(store, f"{rank}/{number}"))
                    file.flush()
                    store.set(answer, "")
                    store.add("taken", 1)
                    number += 1
        answer = f"{rank}/end"
        temporary.rename(folder)
    except OSError as exc:
        refusal = f"{folder} cannot be written ({reason_of(exc)})"
        store.set(answer, refusal)
        return refusal
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(temporary, ignore_errors=True)
    store.set(answer, "")
    return ""
