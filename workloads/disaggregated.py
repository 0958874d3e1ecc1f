"""Data loading outside the trainers, as actors: MegaScale-Data's three roles, on real Ray.

    PlannerActor ──plans, loaders──▶ DataConstructor × nodes ◀──batches── `batches()` in a trainer
         │ starts, follows, ends           │ loads what its node needs of a step
         └───────────▶ SourceLoader × n ◀──┘

A *Source Loader* holds the state of its sources and does what is done per sample: read, decode,
tokenize. The *Planner* sees metadata only, decides what each step loads, which rank gets it and
which loader reads it, and how many loaders there are. A *Data Constructor* runs on each node of
trainers, asks the loaders many steps ahead for what the ranks of its node train on, and packs it.

All are asked by step, and a step's plan is a function of the seed: whoever died is started again,
by Ray, or replaced by a loader that stands by, and asked again, and no sample is lost or comes
twice. The same code runs on a cluster (``address``). No torch here: an actor is a process, and
would carry it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chopper.engines.ray_cluster import LoaderError
from chopper.errors import ChopperError
from chopper.workloads.autoscaling import Autoscaler, Limits, Load, copies_needed, place
from chopper.workloads.batch import Batch, batch_of
from chopper.workloads.checkpoint import Checkpoint
from chopper.workloads.planning import Draw, Plan, Planner, occurrence
from chopper.workloads.sources import Ints, OpenSources, Sample, SourceError, SourceSpec, Tokens

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
    width: int | None
    """Tokens of a row; None: a row for each document, as long as the longest."""
    loaders: int
    limits: Limits
    prefetch: int
    nodes: tuple[tuple[str, tuple[int, ...]], ...]
    """Ray's name of each node of trainers, and its ranks; each has a constructor of its own."""
    tensor: int = 1
    """Ranks that train on the same batch, one after the other; the first of them reads."""
    standby: int = 0
    """Loaders that wait, with nothing open, for another one's end."""
    checkpoint: Path | None = None
    """Directory that the planner finds again wherever it is restarted."""

    def node_of(self, rank: int) -> int:
        """Number of the node that a rank is on."""
        return next(at for at, (_, ranks) in enumerate(self.nodes) if rank in ranks)

    def readers(self, node: int) -> list[int]:
        """Ranks of a node that ask its constructor."""
        return [rank for rank in self.nodes[node][1] if rank % self.tensor == 0]


class SourceLoader:
    """Actor: reads and tokenizes documents of its sources, many at once."""

    def __init__(self, sources: Sequence[SourceSpec], threads: int) -> None:
        self._sources = OpenSources(sources)
        self._pool = ThreadPoolExecutor(threads)

    def open(self, samples: Sequence[Sample]) -> None:
        """Open the sources of samples ahead of their first read."""
        self._sources.open(samples)

    def close(self, numbers: Sequence[int]) -> None:
        """Give up the state of sources; one that is read from again is opened again."""
        self._sources.close(numbers)

    def load(self, samples: Sequence[Sample]) -> tuple[Tokens, list[int], NDArray[np.float64]]:
        """All tokens, the length of each document, and how long they waited and computed."""
        tokens, wait_s, cpu_s = zip(*self._sources.read_all(samples, self._pool), strict=True)
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
        self._checkpoint = None
        loaders = setup.loaders
        if setup.checkpoint is not None:
            self._checkpoint = Checkpoint(setup.checkpoint, setup.draw)
            self._planner.resume(self._checkpoint.positions)
            limits = setup.limits  # of this run: the checkpoint may be another one's
            known = self._checkpoint.loaders or loaders
            loaders = max(limits.least, min(known, limits.most))
        self._plans: dict[int, Plan] = {}
        self._scaler = Autoscaler(Load.of(setup.draw.sources), setup.limits)
        self._latest = 0
        self._reached = [0] * len(setup.nodes)
        self._next: list[_Loader] | None = None
        self._leaving: list[tuple[int, Any, list[int]]] = []
        self._replaced: dict[str, _Loader] = {}
        self._standby = deque(self._start() for _ in range(setup.standby))
        self._fleet: list[_Loader] = []
        self._fleets: list[tuple[int, int]] = []
        self._wanted = loaders

    def plan(self, step: int) -> tuple[Plan, list[tuple[Any, Ints]]]:
        """Plan a step; with the loaders that read it, and the samples of each."""
        self._latest = max(self._latest, step)
        if step not in self._plans:
            self._plans[step] = self._planner.plan(step)
            # All nodes ask for a step at about the same time.
            for old in list(self._plans)[: -4 * (self._setup.prefetch + 4)]:
                del self._plans[old]
            if self._checkpoint is not None:
                kept, positions = self._planner.kept(step)
                self._checkpoint.write(kept, positions, self._wanted)
        self._settle(step)
        plan = self._plans[step]
        # Whoever shares a source takes turns in its samples.
        turn = occurrence(plan.source) + step
        reader = np.empty(len(plan.source), dtype=np.int64)
        for source in np.unique(plan.source).tolist():
            mine = plan.source == source
            holders = np.array([n for n, one in enumerate(self._fleet) if source in one.sources])
            reader[mine] = holders[turn[mine] % len(holders)]
        return plan, [
            (one.handle, np.flatnonzero(reader == n)) for n, one in enumerate(self._fleet)
        ]

    def observe(
        self,
        node: int,
        step: int,
        elapsed_s: float,
        counts: NDArray[np.int64],
        wait_s: NDArray[np.float64],
        cpu_s: NDArray[np.float64],
        starving: bool,
    ) -> None:
        """Take in what loading for a node took since the last time, and start or end loaders.

        ``step`` is the first that is not loaded yet, ``counts`` are samples per source, and the
        seconds are sums by source; ``starving`` where less than half of the stock is there.
        """
        self._reached[node] = step
        reached = min(self._reached)
        for latest, handle, sources in self._leaving:
            if reached > latest:
                handle.close.remote(sources)
        self._leaving = [left for left in self._leaving if reached <= left[0]]
        # The other nodes load about as much in the meantime.
        elapsed_s /= len(self._setup.nodes)
        self._scaler.observe(elapsed_s, counts, wait_s, cpu_s)
        if self._next is not None:
            return
        wanted = self._scaler.decide(len(self._fleet), starving=starving)
        if wanted != len(self._fleet):
            self._wanted = wanted
            self._next = self._place(wanted, self._fleet, step)

    def lost(self, loader: str) -> Any:
        """Replace a loader that is gone; returns whoever reads in its place, None: ask for a plan.

        The one that stands by has only to read row groups; where there is none, a process starts.
        """
        if loader not in self._replaced:
            one = next((x for x in self._fleet if id_of(x.handle) == loader), None)
            if one is None:
                return None
            handle = self._standby.popleft() if self._standby else self._start()
            samples = self._planner.upcoming(max(self._reached), one.sources)
            old, one.handle, one.opened = one.handle, handle, handle.open.remote(samples)
            for then in self._next or ():
                if then.handle == old:
                    then.handle, then.opened = handle, one.opened
            self._replaced[loader] = one
            if self._setup.standby:
                self._standby.append(self._start())
        return self._replaced[loader].handle

    def fleets(self) -> list[tuple[int, int]]:
        """Return from which step on there were how many loaders."""
        return self._fleets

    def loaders(self) -> tuple[list[Any], list[Any]]:
        """Return the loaders that read, and those that stand by."""
        return [one.handle for one in self._fleet], list(self._standby)

    def _start(self) -> Any:
        """Start a loader; Ray spreads them over its nodes, and restarts those nobody stands by."""
        setup = self._setup
        actor = self._ray.remote(SourceLoader).options(
            max_restarts=0 if setup.standby else _RESTARTS,
            max_task_retries=0 if setup.standby else _RESTARTS,
            max_concurrency=setup.prefetch * len(setup.nodes) + 4,
            scheduling_strategy="SPREAD",
        )
        return actor.remote(setup.draw.sources, setup.limits.threads)

    def _place(self, count: int, running: list[_Loader], step: int) -> list[_Loader]:
        """Open sources on ``count`` loaders, those that run among them."""
        load, fleet = self._scaler.load, []
        copies = copies_needed(load, self._scaler.samples_per_s, self._setup.limits, count)
        before = [one.sources for one in running]
        for number, sources in enumerate(place(load.busy(), copies, count, before)):
            handle = running[number].handle if number < len(running) else self._start()
            opened = handle.open.remote(self._planner.upcoming(step, sources))
            fleet.append(_Loader(handle, sources, opened))
        return fleet

    def _settle(self, step: int) -> None:
        """Send what is read from now on to the next fleet, once all of it is ready."""
        if not self._fleet:
            self._fleet = self._place(self._wanted, [], step)
            self._fleets.append((step, len(self._fleet)))
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
        self._replaced.clear()
        self._fleet, self._next = self._next, None
        self._fleets.append((self._latest + 1, len(self._fleet)))


def id_of(handle: Any) -> str:
    """Ray's name of an actor."""
    return str(handle._actor_id.hex())


class DataConstructor:
    """Actor: has the documents of coming steps loaded for a node, and packs those of each rank."""

    def __init__(self, setup: Setup, node: int) -> None:
        import ray

        self._setup, self._node = setup, node
        self._readers = setup.readers(node)
        self._ranks = sorted({rank // setup.tensor for rank in setup.nodes[node][1]})
        self._planner: Any = ray.get_actor(f"planner {setup.name}")
        self._steps: dict[int, asyncio.Task[dict[int, Batch]]] = {}
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
        """Return a rank's batch of a step; steps up to ``ahead`` later begin to load."""
        for coming in range(step, step + ahead + 1):
            if coming not in self._steps:
                self._steps[coming] = asyncio.ensure_future(self._build(coming))
        batch = (await self._steps[step])[rank // self._setup.tensor]
        self._taken[step] = self._taken.get(step, 0) + 1
        if self._taken[step] >= len(self._readers):
            # Whoever asks again, after a restart say, has it loaded again.
            self._steps.pop(step, None)
            del self._taken[step]
        return batch

    async def _build(self, step: int) -> dict[int, Batch]:
        plan, documents = await self._documents(step)
        self._observe()
        total = int(plan.length.sum())
        return {
            rank: batch_of(
                plan.of(rank),
                [documents[at] for at in np.flatnonzero(plan.rank == rank).tolist()],
                width=self._setup.width,
                step=step,
                step_tokens=total,
            )
            for rank in self._ranks
        }

    async def _documents(self, step: int) -> tuple[Plan, dict[int, Tokens]]:
        """A step's plan and its documents, asked for again when the planner is gone."""
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

    async def _load(self, plan: Plan, where: list[tuple[Any, Ints]]) -> dict[int, Tokens]:
        """Documents of this node's ranks, by their place in the plan."""
        documents: dict[int, Tokens] = {}
        wanted = np.isin(plan.rank, self._ranks)

        async def ask(handle: Any, samples: Ints) -> None:
            here = samples[wanted[samples]]
            if not len(here):
                return
            drawn = plan.source[here]
            asked = list(zip(drawn.tolist(), plan.index[here].tolist(), strict=True))
            tokens, lengths, spent = await self._read(handle, asked)
            # Views of Ray's memory would keep it; a batch is small.
            parts = np.split(tokens.copy(), np.cumsum(lengths)[:-1])
            documents.update(zip(here.tolist(), parts, strict=True))
            np.add.at(self._counts, drawn, 1)
            for row, times_s in zip(self._spent, spent, strict=True):
                np.add.at(row, drawn, times_s)

        await asyncio.gather(*(ask(handle, samples) for handle, samples in where))
        return documents

    async def _read(
        self, handle: Any, samples: list[Sample]
    ) -> tuple[Tokens, list[int], NDArray[np.float64]]:
        """Ask a loader, and whoever reads in its place when it is gone."""
        from ray.exceptions import RayActorError

        for left in reversed(range(_RESTARTS + 1)):
            try:
                answer: tuple[Tokens, list[int], NDArray[np.float64]] = await handle.load.remote(
                    samples
                )
            except RayActorError:
                handle = await self._planner.lost.remote(id_of(handle)) if left else None
                if handle is None:
                    raise
            else:
                return answer
        raise AssertionError("the last attempt returns or raises")

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
            self._node, min(unfinished), elapsed_s, counts, wait_s, cpu_s, starving
        )


def start_actors(setup: Setup) -> list[Any]:
    """Start the planner, which starts the loaders, and a constructor on each node of trainers."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    again: dict[str, Any] = {"max_restarts": _RESTARTS, "max_task_retries": _RESTARTS}
    planner = ray.remote(PlannerActor).options(name=f"planner {setup.name}", **again)
    started: list[Any] = [planner.remote(setup)]
    for at, (node, _) in enumerate(setup.nodes):
        constructor = ray.remote(DataConstructor).options(
            name=f"constructor {at} {setup.name}",
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            **again,
        )
        started.append(constructor.remote(setup, at))
    return started


def stop_actors(started: Sequence[Any]) -> None:
    """End them; the loaders end with the planner, which started them."""
    import ray

    # First who asks the others, and would ask again.
    for actor in reversed(started):
        ray.kill(actor)


def this_node() -> str:
    """Ray's name of the node that this process is on."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def constructor(setup: Setup, rank: int) -> Any:
    """The constructor of a rank's node, which another process of the same cluster started."""
    import ray

    return ray.get_actor(f"constructor {setup.node_of(rank)} {setup.name}")


def batches(
    constructing: Any, *, rank: int, first: int, steps: int, prefetch: int
) -> Iterator[Batch]:
    """Yield a rank's batches of steps ``first`` to ``first + steps``, in order.

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
