"""The mixture through torch's DataLoader: every worker of every rank opens every source."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from chopper.workloads.batch import Batch
from chopper.workloads.mixture import READ_TIMEOUT_S, Mixture, SourceError, SourceSpec
from chopper.workloads.planning import Planner, pack

Tokens = NDArray[np.uint16]
_PR_SET_PDEATHSIG = 1


class Documents(Dataset[Tokens]):
    """The mixture as a map-style dataset, addressed by (source, index)."""

    def __init__(self, sources: list[SourceSpec], workers: int) -> None:
        self.mixture = Mixture(sources)
        self._worker = 0
        # One number for each worker, which nobody else writes, in memory that its rank sees.
        self._read = multiprocessing.RawArray(ctypes.c_int64, max(1, workers))

    def open_all(self, worker: int) -> None:
        """Open every source, as each worker does: open files and connections cross no fork."""
        _end_with_the_rank()
        self._worker = worker
        self.mixture.open(range(len(self.mixture.specs)))

    def __getitem__(self, item: tuple[int, int]) -> Tokens:
        """One document: (source, index)."""
        ids, _ = self.mixture.read(item)
        self.count(1)
        return ids

    def count(self, documents: int) -> None:
        """So many more were read by this worker."""
        self._read[self._worker] += documents

    def documents_read(self) -> int:
        """By all workers so far."""
        return sum(self._read)


def _end_with_the_rank() -> None:
    """In a worker: end at once and silently when told to, and when the rank is killed.

    Torch's own watch looks only between batches, and a worker that waits to hand one over never
    comes to it.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class ConcurrentDocuments(Documents):
    """Reads the documents of a batch at once (arXiv 2211.04908): torch asks for them together
    where a dataset has ``__getitems__``.
    """

    def __getitems__(self, items: list[tuple[int, int]]) -> list[Tokens]:
        """All documents of a batch."""
        with ThreadPoolExecutor(len(items)) as pool:
            read = [ids for ids, _ in self.mixture.read_all(items, pool, READ_TIMEOUT_S)]
        self.count(len(read))
        return read


@dataclass(frozen=True, slots=True)
class Rows:
    """Put the documents of a batch into rows, as a worker does."""

    tokens: Tokens
    """[rows, width], 0 where nothing is."""
    documents: list[list[int]]
    """Per row, which documents of the batch it holds."""
    lengths: list[list[int]]
    """And how long they are."""


def in_rows(width: int | None, documents: list[Tokens]) -> Rows:
    """Documents packed into rows of ``width``, as the actors do it; None: a row for each, all as
    long as the longest.
    """
    lengths = np.array([len(ids) for ids in documents])
    rows = [[d] for d in range(len(documents))] if width is None else pack(lengths, width)
    tokens = np.zeros((len(rows), width or lengths.max()), dtype=np.uint16)
    for row, held in zip(tokens, rows, strict=True):
        text = np.concatenate([documents[d] for d in held])
        row[: len(text)] = text
    return Rows(tokens, rows, [lengths[held].tolist() for held in rows])


def torch_batches(
    dataset: Documents,
    planners: tuple[Planner, Planner],
    *,
    rank: int,
    first: int,
    steps: int,
    workers: int,
    prefetch: int,
    width: int | None,
    timeout_s: float,
) -> Generator[Batch, None, None]:
    """A rank's batches of steps ``first`` to ``first + steps``, in order. Workers read on past the
    last one, so that they are as busy then as before, and are ended with the batches.

    Args:
        dataset: where from.
        planners: two of the same: one runs ahead with the loader, one goes with what is taken.
        rank: whose.
        first: step to begin with.
        steps: how many.
        workers: processes.
        prefetch: batches per worker that are asked for ahead.
        width: of a row that documents are packed into; None: a row for each.
        timeout_s: for a batch.

    Raises:
        SourceError: a source failed, or a worker did not answer in time or died.
    """
    wanted = range(first, first + steps)
    ahead, taken = planners
    with warnings.catch_warnings():
        # More workers than cores are meant: they wait for storage.
        warnings.filterwarnings("ignore", "This DataLoader will create")
        loader = DataLoader(
            dataset,
            batch_sampler=_Batches(ahead, range(first, wanted.stop + workers * prefetch), rank),
            collate_fn=functools.partial(in_rows, width),
            num_workers=workers,
            worker_init_fn=dataset.open_all,
            prefetch_factor=prefetch,
            timeout=timeout_s,
        )
        others = multiprocessing.active_children()
        batches = iter(loader)
        started = [child for child in multiprocessing.active_children() if child not in others]
    try:
        for step in wanted:
            try:
                rows = next(batches)
            except SourceError as exc:
                raise SourceError(_without_traceback(str(exc))) from None
            except RuntimeError as exc:
                why = str(exc).splitlines()[0]
                if "timed out" in why:
                    why = f"no batch from a DataLoader worker for {timeout_s:.0f} s; a source hangs"
                raise SourceError(f"step {step}: {why}") from exc
            plan = taken.plan(step)
            mine = plan.of(rank)
            samples = [mine[d] for held in rows.documents for d in held]
            yield Batch(step, rows.tokens, rows.lengths, samples, int(plan.length.sum()))
    finally:
        _kill(started)


class _Batches:
    """Batch sampler: a rank's samples of each step, planned when the loader asks for them."""

    def __init__(self, planner: Planner, steps: range, rank: int) -> None:
        self._planner, self._steps, self._rank = planner, steps, rank

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in self._steps:
            yield self._planner.plan(step).of(self._rank)


def _kill(workers: Sequence[BaseProcess]) -> None:
    """End workers that read or hang: torch would wait for each, up to 5 s."""
    # Torch's handler takes a worker that is killed for one that failed.
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join()
    signal.signal(signal.SIGCHLD, before)


def _without_traceback(text: str) -> str:
    """The message of an error to which torch added the worker's traceback."""
    lines = [line for line in text.splitlines() if ".SourceError: " in line]
    return lines[-1].split(".SourceError: ", 1)[1] if lines else text.splitlines()[0]
