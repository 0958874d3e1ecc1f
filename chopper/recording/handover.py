"""The end of a job without a shared disk: its ranks hand their files to rank 0, through its store.

Of ``torch.distributed`` only the store is used, which is there for every backend, with a connection
of its own: nothing can be mixed up with a collective of the program, and nobody waits for a rank
that died longer than ``_PATIENCE_S``. The store asks nobody who he is, so what arrives is held to
what was announced, and a rank that does otherwise is refused, alone.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import shutil
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import msgspec

from chopper.errors import CaptureError, ChopperError, printable, reason_of
from chopper.hardware.launchers import process_group
from chopper.storage import manifest as m
from chopper.storage.files import decode_json, inside, read_bytes
from chopper.storage.layout import MANIFEST, foreign_files, rank_dir_name
from chopper.storage.processes import part_of
from chopper.wording import bytes_, plural, some

_CHUNK_BYTES = 4 << 20
"""Torch's store takes at most 8 MiB at once, and holds one of these."""
_PATIENCE_S = 60.0
"""Of rank 0 with a rank; the others wait twice as long without any progress of rank 0."""
_LEAVING_S = 5.0
_SENDING_MOST_S = 3_600.0
_FILES_MOST = 10_000
_POLL_S = 0.02
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Of a disk; for any other reason the next rank may be written."""
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


_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
_Announced = Annotated[list[tuple[str, _Size]], msgspec.Meta(max_length=_FILES_MOST)] | None


def _wait(store: Any, key: str, patience_s: float | None = None) -> bytes:
    """Return the value of a key, which is removed; waits as long as rank 0 goes on.

    Args:
        store: of the job.
        key: what is waited for.
        patience_s: how long to wait whatever rank 0 does.

    Raises:
        _Silent: it does not come.
    """
    taken_count = store.add("taken", 0)
    limit_s = 2 * _PATIENCE_S if patience_s is None else patience_s
    while True:
        try:
            store.wait([key], timedelta(seconds=limit_s))
        except RuntimeError as exc:
            before, taken_count = taken_count, store.add("taken", 0)
            if taken_count == before or patience_s is not None:
                raise _Silent(f"no message for {limit_s:.0f} s") from exc
            continue
        value: bytes = store.get(key)
        store.delete_key(key)
        return value


class _Silent(CaptureError):
    """No message comes from a rank."""


def _files(folder: Path, part: m.RankManifest) -> list[tuple[str, int]]:
    """Return the files of a rank and their sizes, without what the program put there."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    sizes = {p.relative_to(folder).as_posix(): p.stat().st_size for p in files}
    foreign = _foreign(sizes, part)
    return [(name, size_bytes) for name, size_bytes in sizes.items() if name not in foreign]


def _foreign(names: Iterable[str], part: m.RankManifest) -> list[str]:
    """Return which names are not those of files that a rank records."""
    prefix = rank_dir_name(part.rank) + "/"
    named = {prefix + name for name in m.named_by(part)}
    return [n.removeprefix(prefix) for n in foreign_files([prefix + n for n in names], named)]


def _sent(store: Any, folder: Path, part: m.RankManifest) -> str | None:
    """Send a rank's files, unless they are where rank 0 sees them."""
    rank = part.rank
    receiver = json.loads(_wait(store, f"receiver/{rank}"))
    first = part_of(folder.parent / rank_dir_name(0))
    if first is not None and _identity(first) == receiver["identity"]:
        store.set(f"{rank}/0", "null")
        return None
    files = _files(folder, part)
    messages = itertools.chain((json.dumps(files),), _chunks(folder, files), ("end",))
    for number, message in enumerate(messages):
        store.set(f"{rank}/{number}", message)
        if refusal := _wait(store, f"{rank}/{number}/answer"):
            break
    store.add("left", 1)
    if refusal:
        raise CaptureError(refusal.decode())
    return f"rank {rank} was gathered into {receiver['path']} on {receiver['host']}"


def _chunks(folder: Path, files: list[tuple[str, int]]) -> Iterator[bytes]:
    """Yield the contents of files, of each as many bytes as were announced."""
    for name, size_bytes in files:
        with (folder / name).open("rb") as file:
            for start in range(0, size_bytes, _CHUNK_BYTES):
                yield file.read(min(_CHUNK_BYTES, size_bytes - start))


def _identity(part: m.RankManifest) -> list[object]:
    return [part.machine, part.pid, part.process_started, part.start_ns]


class _Sender:
    """A rank that sends messages, each of which is answered, as rank 0 sees it."""

    def __init__(self, store: Any, rank: int) -> None:
        self.rank = rank
        self._store = store
        self._number = 0

    def message(self, patience_s: float) -> bytes:
        """Return its next message.

        Raises:
            _Silent: none comes.
        """
        return _wait(self._store, f"{self.rank}/{self._number}", patience_s)

    def answer(self, refusal: str = "") -> None:
        """Let it go on, or tell it why nothing more is taken."""
        self._store.set(f"{self.rank}/{self._number}/answer", refusal)
        self._store.add("taken", 1)
        self._number += 1


def _announced(data: bytes) -> list[tuple[str, int]] | None:
    """Return the files of a rank and their sizes; None if they are where rank 0 sees them.

    Raises:
        CaptureError: it is no such list.
    """
    problem = "what it announces is no list of files and sizes"
    kind: Any = _Announced
    files: list[tuple[str, int]] | None = decode_json(data, kind, problem, error=CaptureError)
    if files is not None and len({name for name, _ in files}) < len(files):
        raise CaptureError("it announces a file twice")
    return files


def _received(store: Any, folder: Path, part: m.RankManifest) -> str | None:
    """Receive the files of all ranks that are on other disks than this one, one after another."""
    world_size = part.world_size or 1
    receiver = {"host": part.hostname, "path": str(folder.parent), "identity": _identity(part)}
    for rank in range(1, world_size):
        store.set(f"receiver/{rank}", json.dumps(receiver))
    full, answers_count = "", 0
    gathered, silent, refused = [], [], []
    until_s = time.monotonic() + _PATIENCE_S
    patience_s = _PATIENCE_S
    for rank in range(1, world_size):
        sender = _Sender(store, rank)
        try:
            files = _announced(sender.message(max(until_s - time.monotonic(), 0.1)))
            if files is None:
                continue
            answers_count += 1
            if full:
                sender.answer(full)
                continue
            _take(sender, folder.parent, files, part, patience_s)
            gathered.append(rank)
        except _Silent:
            silent.append(rank)
            store.add("taken", 1)
            patience_s = min(_LEAVING_S, _PATIENCE_S)  # once for all that died together
            continue
        except (OSError, ChopperError) as exc:
            reason = str(exc)
            if isinstance(exc, OSError):
                reason = (
                    f"{folder.parent / rank_dir_name(rank)} cannot be written ({reason_of(exc)})"
                )
            if getattr(exc, "errno", None) in _FULL:
                full = reason
            else:
                refused.append(f"rank {rank} was refused ({reason})")
            sender.answer(reason)
        until_s, patience_s = time.monotonic() + _PATIENCE_S, _PATIENCE_S
    until_s = time.monotonic() + _LEAVING_S  # the store may end with this process
    while store.add("left", 0) < answers_count and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    if silent:
        refused.append(f"no message from {plural(len(silent), 'rank')} ({some(silent)})")
    if problems := [full] * bool(full) + refused:
        return f"not all ranks were gathered: {some(problems)}; {_REMEDY}"
    return f"gathered {plural(len(gathered), 'rank')} of other nodes" if gathered else None


def _take(
    sender: _Sender,
    run: Path,
    files: list[tuple[str, int]],
    receiver: m.RankManifest,
    patience_s: float,
) -> None:
    """Receive the folder of a rank; it has its name when it is whole, and is what a rank records.

    Raises:
        OSError: it cannot be written.
        ChopperError: the rank stops to send, or sends anything else.
    """
    folder = run / rank_dir_name(sender.rank)
    temporary = run / f".{folder.name}.{HANDED_OVER}"
    total_bytes, free_bytes = sum(size for _, size in files), shutil.disk_usage(run).free
    if total_bytes > free_bytes:
        raise CaptureError(
            f"it announces {bytes_(total_bytes)}, where {bytes_(free_bytes)} are free"
        )
    if folder.exists():
        raise CaptureError(f"{folder} is there already")
    until_s = time.monotonic() + _SENDING_MOST_S
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for target, size_bytes in [(inside(temporary, name), size) for name, size in files]:
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as file:
                while left_bytes := size_bytes - file.tell():
                    if time.monotonic() > until_s:
                        raise CaptureError(f"it sends for more than {_SENDING_MOST_S:.0f} s")
                    sender.answer()
                    data = sender.message(patience_s)
                    if len(data) != (wanted_bytes := min(_CHUNK_BYTES, left_bytes)):
                        raise CaptureError(
                            f"it sends {len(data)} bytes where it announced {wanted_bytes}"
                        )
                    file.write(data)
                    file.flush()
        sender.answer()
        sender.message(patience_s)  # the end
        _check_rank(temporary, [name for name, _ in files], sender.rank, receiver)
        temporary.rename(folder)
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(temporary, ignore_errors=True)
    sender.answer()


def _check_rank(folder: Path, names: list[str], rank: int, receiver: m.RankManifest) -> None:
    """Require that files are those that a rank of this job records.

    Raises:
        ChopperError: they are not.
    """
    if MANIFEST not in names:
        raise CaptureError(f"it sends no {MANIFEST}")
    part = m.decode_rank(read_bytes(folder / MANIFEST, error=CaptureError), f"its {MANIFEST}")
    if (part.rank, part.world_size) != (rank, receiver.world_size):
        raise CaptureError(f"it sends rank {part.rank} of {part.world_size}")
    if foreign := _foreign(names, part):
        raise CaptureError(f"{printable(foreign[0])!r} is no file that a rank records")
