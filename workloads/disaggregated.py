"""Data loading outside the trainers, as actors: MegaScale-Data's three roles, on real Ray.

    PlannerActor ──plans, loaders──▶ DataConstructor × nodes ◀──batches── `batches()` in a trainer
         │ starts                          │ loads what its node needs of a step
         └───────────▶ SourceLoader × n ◀──┘

A *Source Loader* holds the state of its sources and does what is done per sample: read, decode,
tokenize. The *Planner* sees metadata only, decides what each step loads, which rank gets it and
which loader reads it; its autoscaler changes how many there are. A *Data Constructor* runs on each
node of trainers, asks the loaders many steps ahead for what the ranks of its node train on, and
packs it.

All are asked by step, and a step's plan is a function of the seed: an actor that died is started
again by Ray and asked again, and no sample is lost or comes twice. The same code runs on a cluster
(``address``). No torch here: an actor is a process, and would carry it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chopper.engines.ray_cluster import LoaderError
from chopper.errors import ChopperError
from chopper.workloads.planning import Autoscaler, Batch, Draw, Plan, Planner, balance, batch_of
from chopper.workloads.sources import Ints, OpenSources, Sample, SourceError, SourceSpec, Tokens

_RESTARTS = 3
_OBSERVED_STEPS = 16
"""Steps between two looks at what reading takes."""
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
    most_loaders: int
    threads: int
    """Reads in flight per loader."""
    prefetch: int
    nodes: tuple[tuple[str, tuple[int, ...]], ...]
    """Ray's name of each node of trainers, and its ranks; each has a constructor of its own."""
    tensor: int = 1
    """Ranks that train on the same batch, one after the other; the first of them reads."""

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

    def load(self, samples: Sequence[Sample]) -> tuple[Tokens, list[int]]:
        """Read documents: their tokens one after the other, and the length of each."""
        tokens = self._sources.read_all(samples, self._pool)
        return np.concatenate(tokens), [len(ids) for ids in tokens]

    def spent(self) -> NDArray[np.float64]:
        """Return samples, and seconds waited and computed, by source, since the last call."""
        return self._sources.spent()


class Fleet(NamedTuple):
    """Loaders that read together, each source from one of them."""

    loaders: list[Any]
    loader_of: Ints
    """Source → number of its loader."""
    opened: list[Any]
    """Tasks that open the sources."""


class PlannerActor:
    """Actor: plans steps, and starts and replaces the loaders that read them."""

    def __init__(self, setup: Setup) -> None:
        import ray

        self._ray, self._setup = ray, setup
        self._planner = Planner(setup.draw)
        self._plans: dict[int, Plan] = {}
        self._scaler = Autoscaler(
            setup.draw.sources,
            threads=setup.threads,
            least=setup.loaders,
            most=max(setup.loaders, setup.most_loaders),
        )
        self._fleet: Fleet | None = None
        self._next: Fleet | None = None
        self._asked: list[Any] = []
        self._asked_s = time.perf_counter()

    def plan(self, step: int, starving: bool) -> tuple[Plan, list[tuple[Any, Ints]]]:
        """Plan a step; with the loaders that read it, and the samples of each.

        Args:
            step: number of the step.
            starving: less than half of what trainers should have in stock is there.
        """
        if step not in self._plans:
            self._plans[step] = self._planner.plan(step)
            # All nodes ask for a step at about the same time.
            for old in list(self._plans)[: -4 * (self._setup.prefetch + 4)]:
                del self._plans[old]
            if step % _OBSERVED_STEPS == 0:
                self._observe(step, starving=starving)
        if self._fleet is None:
            self._fleet = self._start(self._setup.loaders, step)
        elif self._next is not None and self._done(self._next.opened):
            # The loaders before these end when nobody has a handle of them any more.
            self._fleet, self._next = self._next, None
        plan, fleet = self._plans[step], self._fleet
        loader_of_sample = fleet.loader_of[plan.source]
        return plan, [
            (loader, np.flatnonzero(loader_of_sample == number))
            for number, loader in enumerate(fleet.loaders)
        ]

    def loaders(self) -> list[Any]:
        """Return the loaders."""
        return [] if self._fleet is None else self._fleet.loaders

    def _start(self, count: int, step: int) -> Fleet:
        """Start loaders that wait and compute for about as long, and open their sources."""
        loader_of = balance(self._scaler.busy(), count, "greedy")
        # Ray spreads them over its nodes, and restarts those that die.
        actor: Any = self._ray.remote(SourceLoader).options(
            max_restarts=_RESTARTS,
            max_task_retries=_RESTARTS,
            max_concurrency=self._setup.prefetch * len(self._setup.nodes) + 4,
            scheduling_strategy="SPREAD",
        )
        loaders = [
            actor.remote(self._setup.draw.sources, self._setup.threads) for _ in range(count)
        ]
        opened = [
            loader.open.remote(
                self._planner.upcoming(step, np.flatnonzero(loader_of == number).tolist())
            )
            for number, loader in enumerate(loaders)
        ]
        return Fleet(loaders, loader_of, opened)

    def _done(self, tasks: list[Any]) -> bool:
        return len(self._ray.wait(tasks, num_returns=len(tasks), timeout=0)[0]) == len(tasks)

    def _observe(self, step: int, *, starving: bool) -> None:
        """Take in what reading took since the last time; start other loaders if need be."""
        if self._fleet is None or self._setup.most_loaders <= self._setup.loaders:
            return
        if self._asked and self._done(self._asked):
            now_s = time.perf_counter()
            with contextlib.suppress(self._ray.exceptions.RayError):  # one that is gone
                counts, wait_s, core_s = sum(self._ray.get(self._asked))
                self._scaler.observe(now_s - self._asked_s, counts, wait_s, core_s)
                wanted = self._scaler.loaders(len(self._fleet.loaders), starving=starving)
                if self._next is None and wanted != len(self._fleet.loaders):
                    self._next = self._start(wanted, step)
            self._asked, self._asked_s = [], now_s
        self._asked = self._asked or [loader.spent.remote() for loader in self._fleet.loaders]


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
        self._built = 0

    async def stock(self) -> int:
        """Steps that are loaded and not taken yet."""
        return sum(task.done() for task in self._steps.values())

    async def get(self, rank: int, step: int, ahead: int) -> Batch:
        """Return a rank's batch of a step; steps up to ``ahead`` later begin to load."""
        for ahead_step in range(step, step + ahead + 1):
            if ahead_step not in self._steps:
                self._steps[ahead_step] = asyncio.ensure_future(self._build(ahead_step))
        batch = (await self._steps[step])[rank // self._setup.tensor]
        self._taken[step] = self._taken.get(step, 0) + 1
        if self._taken[step] >= len(self._readers):
            # Whoever asks again, after a restart say, has it loaded again.
            self._steps.pop(step, None)
            del self._taken[step]
        return batch

    async def _build(self, step: int) -> dict[int, Batch]:
        plan, documents = await self._documents(step)
        self._built += 1
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
            plan, where = await (self._plans.pop(step, None) or self._planned(step))
            # Whoever loads nothing ahead still plans ahead: it takes no memory.
            if step + 1 not in self._steps:
                self._plans[step + 1] = self._planned(step + 1)
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

    def _planned(self, step: int) -> Any:
        """Ask for a step's plan, and say whether too little of what was asked for is loaded."""
        missing = sum(not task.done() for task in self._steps.values())
        filled = self._built > self._setup.prefetch  # the first stock is missing at first
        return self._planner.plan.remote(step, filled and 2 * missing > len(self._steps))

    async def _load(self, plan: Plan, where: list[tuple[Any, Ints]]) -> dict[int, Tokens]:
        """Documents of this node's ranks, by their place in the plan."""
        documents: dict[int, Tokens] = {}
        wanted = np.isin(plan.rank, self._ranks)

        async def ask(loader: Any, samples: Ints) -> None:
            here = samples[wanted[samples]]
            if not len(here):
                return
            wanted_samples = list(
                zip(plan.source[here].tolist(), plan.index[here].tolist(), strict=True)
            )
            tokens, lengths = await loader.load.remote(wanted_samples)
            # Views of Ray's memory would keep it; a batch is small.
            parts = np.split(tokens.copy(), np.cumsum(lengths)[:-1])
            documents.update(zip(here.tolist(), parts, strict=True))

        await asyncio.gather(*(ask(loader, samples) for loader, samples in where))
        return documents


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
    pending: list[Any] = []
    step = first
    for wanted in range(first, end):
        while step < min(end, wanted + (_UNDER_WAY if prefetch else 1)):
            pending.append(constructing.get.remote(rank, step, prefetch))
            step += 1
        try:
            batch = ray.get(pending.pop(0))
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
