"""Data loading outside the trainers, as actors: MegaScale-Data's three roles, on real Ray.

    PlannerActor ──plans, loaders──▶ DataConstructor ◀──batches── one `batches()` in each trainer
         │ starts, follows, ends           │ loads what a step needs
         └───────────▶ SourceLoader × n ◀──┘

A *Source Loader* holds the state of its sources and does what is done per sample: read, decode,
tokenize. The *Planner* sees metadata only, decides what each step loads and which rank gets it, and
how many loaders there are. The *Data Constructor*, one per node of trainers, asks the loaders many
steps ahead and packs each rank's documents into rows.

All are asked by step, and a step's plan is a function of the seed: whoever died is started again
and asked again, and no sample is lost or comes twice. The same code runs on a cluster
(``address``). No torch here: an actor is a process, and would carry it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chopper.engines.ray_cluster import LoaderError
from chopper.errors import ChopperError
from chopper.workloads.batch import Batch, batch_of
from chopper.workloads.mixture import Mixture, Sample, SourceError, SourceSpec, Tokens
from chopper.workloads.planning import Autoscaler, Draw, Limits, Load, Plan, Planner, place

_RESTARTS = 3
_OBSERVED_STEPS = 8
"""Between two looks at how busy the loaders are."""
_UNDER_WAY = 3
"""Batches that are on their way to a rank at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Facts that all actors are given alike."""

    name: str
    """Tells the actors of one mixture from those of another on the same cluster."""
    draw: Draw
    width: int
    loaders: int
    limits: Limits
    prefetch: int


class SourceLoader:
    """Actor: reads and tokenizes documents of its sources, many at once."""

    def __init__(self, sources: Sequence[SourceSpec], threads: int) -> None:
        self._mixture = Mixture(sources)
        self._pool = ThreadPoolExecutor(threads)

    def open(self, numbers: Sequence[int]) -> None:
        """Open sources ahead of their first read."""
        self._mixture.open(numbers)

    def close(self, numbers: Sequence[int]) -> None:
        """Give up the state of sources; one that is read from again is opened again."""
        self._mixture.close(numbers)

    def load(self, samples: Sequence[Sample]) -> tuple[Tokens, list[int], NDArray[np.float64]]:
        """All tokens, the length of each document, and how long they waited and computed."""
        tokens, wait_s, cpu_s = zip(*self._mixture.read_all(samples, self._pool), strict=True)
        return np.concatenate(tokens), [len(ids) for ids in tokens], np.array([wait_s, cpu_s])


@dataclass(slots=True)
class _Loader:
    handle: Any
    sources: list[int]
    opened: Any


class PlannerActor:
    """Actor: plans steps, and keeps as many loaders as these need."""

    def __init__(self, setup: Setup) -> None:
        import ray

        self._ray = ray
        self._setup = setup
        self._planner = Planner(setup.draw)
        self._scaler = Autoscaler(Load.of(setup.draw.sources), setup.limits)
        self._latest = 0
        self._next: list[_Loader] | None = None
        self._leaving: list[tuple[int, Any, list[int]]] = []
        self._fleet = self._place(setup.loaders, [])
        self._fleets = [(0, len(self._fleet))]

    def plan(self, step: int) -> tuple[Plan, list[tuple[Any, list[int]]]]:
        """Plan a step; with the loaders that read it, and the sources of each."""
        self._settle()
        self._latest = max(self._latest, step)
        return self._planner.plan(step), [(one.handle, one.sources) for one in self._fleet]

    def observe(
        self,
        step: int,
        elapsed_s: float,
        counts: NDArray[np.int64],
        wait_s: NDArray[np.float64],
        cpu_s: NDArray[np.float64],
        starving: bool,
    ) -> None:
        """Take in what loading took since the last time, and start or end loaders.

        ``step`` is the first that is not loaded yet, ``counts`` are samples per source, and the
        seconds are sums by source; ``starving`` where less than half of the stock is there.
        """
        for latest, handle, sources in self._leaving:
            if step > latest:
                handle.close.remote(sources)
        self._leaving = [left for left in self._leaving if step <= left[0]]
        weights = self._planner.weights_at(step)
        self._scaler.observe(elapsed_s, counts, wait_s, cpu_s, weights)
        if self._next is not None:
            return
        wanted = self._scaler.decide(len(self._fleet), starving=starving)
        if wanted != len(self._fleet):
            self._next = self._place(wanted, self._fleet)

    def fleets(self) -> list[tuple[int, int]]:
        """Return from which step on there were how many loaders."""
        return self._fleets

    def _place(self, count: int, running: list[_Loader]) -> list[_Loader]:
        """Open sources on ``count`` loaders, those that run among them."""
        setup, fleet = self._setup, []
        actor = self._ray.remote(SourceLoader).options(
            max_restarts=_RESTARTS,
            max_task_retries=_RESTARTS,
            max_concurrency=setup.prefetch + 4,
        )
        before = [one.sources for one in running]
        for number, sources in enumerate(place(self._scaler.load.busy(), count, before)):
            if number < len(running):
                handle = running[number].handle
            else:
                handle = actor.remote(setup.draw.sources, setup.limits.threads)
            fleet.append(_Loader(handle, sources, handle.open.remote(sources)))
        return fleet

    def _settle(self) -> None:
        """Send what is read from now on to the next fleet, once all of it is ready."""
        if self._next is None:
            return
        refs = [one.opened for one in self._next]
        if len(self._ray.wait(refs, num_returns=len(refs), timeout=0)[0]) < len(refs):
            return
        # What is being loaded still asks the old place.
        for now, then in zip(self._fleet, self._next, strict=False):
            gone = [s for s in now.sources if s not in then.sources]
            self._leaving.append((self._latest, now.handle, gone))
        # A loader that nobody has a handle of any more ends, once it answered what it was asked.
        self._fleet, self._next = self._next, None
        self._fleets.append((self._latest + 1, len(self._fleet)))


class DataConstructor:
    """Actor: has the documents of coming steps loaded, and packs those of each rank."""

    def __init__(self, setup: Setup) -> None:
        import ray

        self._setup = setup
        self._planner: Any = ray.get_actor(f"planner {setup.name}")
        self._steps: dict[int, asyncio.Task[list[Batch]]] = {}
        self._taken: dict[int, int] = {}
        self._plans: dict[int, Any] = {}
        sources = len(setup.draw.sources)
        self._counts = np.zeros(sources, dtype=np.int64)
        self._spent = np.zeros((2, sources))
        self._since = time.perf_counter()
        self._built = 0

    async def stock(self) -> int:
        """Steps that are loaded and not taken yet."""
        return sum(task.done() for task in self._steps.values())

    async def get(self, rank: int, step: int, ahead: int) -> Batch:
        """A rank's part of a step; steps up to ``ahead`` later begin to load."""
        for coming in range(step, step + ahead + 1):
            if coming not in self._steps:
                self._steps[coming] = asyncio.ensure_future(self._build(coming))
        batch = (await self._steps[step])[rank]
        self._taken[step] = self._taken.get(step, 0) + 1
        if self._taken[step] >= self._setup.draw.ranks:
            # Whoever asks again, after a restart say, has it loaded again.
            del self._steps[step], self._taken[step]
        return batch

    async def _build(self, step: int) -> list[Batch]:
        plan, documents = await self._documents(step)
        self._observe()
        total = sum(map(len, documents))
        batches = []
        for rank in range(self._setup.draw.ranks):
            mine = [tokens for tokens, of in zip(documents, plan.rank, strict=True) if of == rank]
            batches.append(
                batch_of(plan.of(rank), mine, width=self._setup.width, step=step, step_tokens=total)
            )
        return batches

    async def _documents(self, step: int) -> tuple[Plan, list[Tokens]]:
        """A step's plan and its documents, asked for again when a loader is gone for good."""
        from ray.exceptions import RayActorError

        attempt = 0
        while True:
            plan, where = await (self._plans.pop(step, None) or self._planner.plan.remote(step))
            # Whoever loads nothing ahead still plans ahead: it takes no memory.
            if step + 1 not in self._steps:
                self._plans[step + 1] = self._planner.plan.remote(step + 1)
            try:
                return plan, await self._load(plan, where)
            except RayActorError as exc:
                # The planner died, and its loaders with it: it is back, with others.
                self._plans.clear()
                attempt += 1
                if attempt > _RESTARTS:
                    raise LoaderError(
                        f"step {step}: a loader died {attempt} times and more; most recently: "
                        f"{str(exc).splitlines()[0]}"
                    ) from exc

    async def _load(self, plan: Plan, where: list[tuple[Any, list[int]]]) -> list[Tokens]:
        documents: list[Tokens] = [np.empty(0, dtype=np.uint16)] * len(plan.source)

        async def ask(handle: Any, sources: list[int]) -> None:
            here = np.flatnonzero(np.isin(plan.source, sources))
            if not len(here):
                return
            drawn = plan.source[here]
            samples = list(zip(drawn.tolist(), plan.index[here].tolist(), strict=True))
            tokens, lengths, spent = await handle.load.remote(samples)
            # Views of Ray's memory would keep it; a batch is small.
            parts = np.split(tokens.copy(), np.cumsum(lengths)[:-1])
            for at, part in zip(here.tolist(), parts, strict=True):
                documents[at] = part
            np.add.at(self._counts, drawn, 1)
            for row, times_s in zip(self._spent, spent, strict=True):
                np.add.at(row, drawn, times_s)

        await asyncio.gather(*(ask(handle, sources) for handle, sources in where))
        return documents

    def _observe(self) -> None:
        self._built += 1
        if self._built % _OBSERVED_STEPS:
            return
        now = time.perf_counter()
        counts, (wait_s, cpu_s) = self._counts, self._spent
        elapsed_s, self._since = now - self._since, now
        self._counts, self._spent = np.zeros_like(counts), np.zeros_like(self._spent)
        unfinished = [step for step, task in self._steps.items() if not task.done()]
        # The first stock is being filled: all that is asked for is missing.
        filled = self._built > 2 * self._setup.prefetch
        starving = filled and 2 * len(unfinished) > len(self._steps)
        self._planner.observe.options(max_task_retries=0).remote(
            min(unfinished), elapsed_s, counts, wait_s, cpu_s, starving
        )


def start_actors(setup: Setup) -> tuple[Any, Any]:
    """The planner, which starts the loaders, and the constructor, which `constructor` finds."""
    import ray

    again: dict[str, Any] = {"max_restarts": _RESTARTS, "max_task_retries": _RESTARTS}
    return tuple(
        ray.remote(role).options(name=f"{name} {setup.name}", **again).remote(setup)
        for role, name in ((PlannerActor, "planner"), (DataConstructor, "constructor"))
    )  # type: ignore[return-value]


def stop_actors(started: tuple[Any, Any]) -> None:
    """End them; the loaders end with the planner, which started them."""
    import ray

    # First who asks the others, and would ask again.
    for actor in reversed(started):
        ray.kill(actor)


def constructor(setup: Setup) -> Any:
    """The constructor that another process of the same cluster started."""
    import ray

    return ray.get_actor(f"constructor {setup.name}")


def batches(
    constructing: Any, *, rank: int, first: int, steps: int, prefetch: int
) -> Iterator[Batch]:
    """A rank's batches of steps ``first`` to ``first + steps``, in order, from the constructor.

    ``prefetch`` steps are loaded ahead, also of the last, so that loaders are as busy then as
    before; with 0 each is begun when it is asked for.
    """
    import ray

    end = first + steps
    coming: list[Any] = []
    step = first
    for wanted in range(first, end):
        while step < min(end, wanted + (_UNDER_WAY if prefetch else 1)):
            coming.append(constructing.get.remote(rank, step, prefetch))
            step += 1
        try:
            batch = ray.get(coming.pop(0))
        except ray.exceptions.RayError as exc:
            raise in_one_line(exc, wanted) from exc
        yield batch


def in_one_line(exc: Exception, step: int) -> ChopperError:
    """Name what an actor failed of, without Ray's tracebacks of each process it came through."""
    cause: BaseException | None = exc
    while cause is not None:
        if isinstance(cause, ChopperError) and type(cause) in (SourceError, LoaderError):
            return cause
        cause = getattr(cause, "cause", None) or cause.__cause__
    return LoaderError(f"step {step}: {type(exc).__name__}: {str(exc).splitlines()[0]}")
