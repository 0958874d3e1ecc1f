"""The mixture through torch's DataLoader: every worker of every rank opens every source."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import signal
import sys
import warnings
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.process import BaseProcess

from torch.utils.data import DataLoader, Dataset

from chopper.workloads.planning import Batch, Plan, Planner, batch_of
from chopper.workloads.sources import OpenSources, Sample, SourceError, SourceSpec, Tokens

_PR_SET_PDEATHSIG = 1

Document = tuple[Sample, Tokens]


class Documents(Dataset[Document]):
    """The mixture as a map-style dataset, addressed by samples."""

    def __init__(
        self, sources: Sequence[SourceSpec], workers: int, upcoming: Sequence[Sample]
    ) -> None:
        self.sources = OpenSources(sources)
        self._upcoming = upcoming
        self._worker = 0
        # One number for each worker, which nobody else writes, in memory that its rank sees.
        self._read = multiprocessing.RawArray(ctypes.c_int64, max(1, workers))

    def open_all(self, worker: int) -> None:
        """Open every source, as each worker does: open files and connections cross no fork."""
        _end_with_the_rank()
        self._worker = worker
        self.sources.open(self._upcoming)

    def __getitem__(self, sample: Sample) -> Document:
        tokens = self.sources.read(sample)
        self._read[self._worker] += 1
        return sample, tokens

    def documents_read(self) -> int:
        """Count what all workers read so far."""
        return sum(self._read)


class ConcurrentDocuments(Documents):
    """Reads the documents of a batch at once (arXiv 2211.04908), as torch asks ``__getitems__``."""

    def __getitems__(self, samples: list[Sample]) -> list[Document]:
        with ThreadPoolExecutor(len(samples)) as pool:
            read = self.sources.read_all(samples, pool)
        self._read[self._worker] += len(read)
        return list(zip(samples, read, strict=True))


def _end_with_the_rank() -> None:
    """In a worker: end at once and silently when told to, and when the rank is killed.

    Torch's own watch looks only between batches, not while a worker waits to hand one over.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def in_rows(width: int | None, documents: list[Document]) -> Batch:
    """Pack documents into rows in a worker, as the actors do it; its step is not known there."""
    samples, tokens = zip(*documents, strict=True)
    return batch_of(samples, tokens, width=width)


def torch_batches(
    dataset: Documents,
    planner: Planner,
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
    """
    planned: deque[Plan] = deque()

    def planned_samples() -> Iterator[list[Sample]]:
        for step in range(first, first + steps + workers * prefetch):
            planned.append(planner.plan(step))
            yield planned[-1].of(rank)

    with warnings.catch_warnings():
        # More workers than cores are meant: they wait for storage.
        warnings.filterwarnings("ignore", "This DataLoader will create")
        loader = DataLoader(
            dataset,
            batch_sampler=planned_samples(),
            collate_fn=functools.partial(in_rows, width),
            num_workers=workers,
            worker_init_fn=dataset.open_all,
            prefetch_factor=prefetch,
            timeout=timeout_s,
        )
        running = multiprocessing.active_children()
        batches = iter(loader)
        started = [child for child in multiprocessing.active_children() if child not in running]
    try:
        for step in range(first, first + steps):
            try:
                batch = next(batches)
            except SourceError as exc:
                raise SourceError(_without_traceback(str(exc))) from None
            except RuntimeError as exc:
                why = str(exc).splitlines()[0]
                if "timed out" in why:
                    why = f"no batch from a DataLoader worker for {timeout_s:.0f} s; a source hangs"
                raise SourceError(f"step {step}: {why}") from exc
            step_tokens = int(planned.popleft().length.sum())
            yield replace(batch, step=step, step_tokens=step_tokens)
    finally:
        _kill(started)


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
