"""Clocks for each instruction of a pipeline that take least energy within a time (Perseus).

A pipeline of S stages runs M microbatches one forward, one backward (1F1B). Stages wait for each
other, so most instructions have time to spare: at a lower clock they take less energy and the step
takes no longer (Chung et al., "Perseus", SOSP 2024). Least energy within a time is a linear program
over mixtures of measured clocks: a bound that no schedule beats. Each instruction then gets the
slowest measured clock that is at least as fast as its mixture, and what time is left is filled, the
most energy per time first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from chopper.analyzers.replay.solve import solve
from chopper.errors import UsageError
from chopper.hardware.clock_tables import INSTRUCTIONS, ClockTable

MOST_INSTRUCTIONS = 8192
"""Of one step: the linear program of more takes minutes."""


@dataclass(frozen=True)
class Order:
    """Moments and edges, as the longest-path pass reads them."""

    time_ns: np.ndarray
    first: np.ndarray
    source: np.ndarray


@dataclass(frozen=True)
class Pipeline:
    """Instructions of one step in an order of time, and what each waits for.

    Attributes:
        stages_count, microbatches_count: S and M.
        stage, instruction, microbatch: of each instruction; 0 is a forward, 1 a backward.
        edges: (edges, 2) numbers of an instruction and of one that waits for it.
    """

    stages_count: int
    microbatches_count: int
    stage: np.ndarray
    instruction: np.ndarray
    microbatch: np.ndarray
    edges: np.ndarray

    @property
    def kind(self) -> np.ndarray:
        """(instructions,) number of each one's table: two for each stage."""
        return self.stage * len(INSTRUCTIONS) + self.instruction

    def finish_ns(self, time_ns: np.ndarray) -> np.ndarray:
        """(instructions,) when each ends, where they take so long."""
        return _finish_ns(self.edges, time_ns)

    def spare_ns(self, time_ns: np.ndarray, limit_ns: int) -> np.ndarray:
        """(instructions,) how much longer each could take alone with the step within a limit."""
        last = len(time_ns) - 1
        behind_ns = _finish_ns(last - self.edges[::-1, ::-1], time_ns[::-1])[::-1]
        return limit_ns - (self.finish_ns(time_ns) + behind_ns - time_ns)


def _finish_ns(edges: np.ndarray, time_ns: np.ndarray) -> np.ndarray:
    by_target = edges[np.argsort(edges[:, 1], kind="stable")]
    count = np.bincount(by_target[:, 1], minlength=len(time_ns))
    first = np.concatenate([[0], np.cumsum(count)]).astype(np.int64)
    time_ns = np.ascontiguousarray(time_ns, dtype=np.int64)
    order = Order(time_ns, first, np.ascontiguousarray(by_target[:, 0], dtype=np.int32))
    return solve(order, np.zeros(len(edges), dtype=np.int64), time_ns)[0]


def one_forward_one_backward(stages_count: int, microbatches_count: int) -> Pipeline:
    """Return a step of the 1F1B schedule (PipeDream-Flush); transfers take no time."""
    programs = [_program(stages_count - s, microbatches_count) for s in range(stages_count)]
    number: dict[tuple[int, int, int], int] = {}
    edges: list[tuple[int, int]] = []
    done = [0] * stages_count
    total = 2 * stages_count * microbatches_count
    while len(number) < total:
        for stage, program in enumerate(programs):
            while done[stage] < len(program):
                instruction, microbatch = program[done[stage]]
                if instruction == 0:
                    needs = [(stage - 1, 0, microbatch)] if stage else []
                elif stage < stages_count - 1:
                    needs = [(stage + 1, 1, microbatch)]
                else:
                    needs = [(stage, 0, microbatch)]
                if any(need not in number for need in needs):
                    break
                here = number[stage, instruction, microbatch] = len(number)
                if done[stage]:
                    needs.append((stage, *program[done[stage] - 1]))
                edges += [(number[need], here) for need in dict.fromkeys(needs)]
                done[stage] += 1
    stage, instruction, microbatch = np.array([*number], dtype=np.int64).T
    pairs = np.array(edges, dtype=np.int64).reshape(-1, 2)
    return Pipeline(stages_count, microbatches_count, stage, instruction, microbatch, pairs)


def _program(stages_left: int, microbatches_count: int) -> list[tuple[int, int]]:
    """(instruction, microbatch) of a stage in its order; the last stage has one stage left."""
    ahead = min(stages_left - 1, microbatches_count)
    program = [(0, m) for m in range(ahead)]
    for m in range(microbatches_count):
        if m + ahead < microbatches_count:
            program.append((0, m + ahead))
        program.append((1, m))
    return program


@dataclass(frozen=True)
class Choices:
    """Clocks of an instruction that are worth choosing, the fastest first, each of less cost.

    Attributes:
        clock_hz, time_ns, energy_j: of each choice.
        cost_j: energy less what a device that waits would draw in the same time.
    """

    clock_hz: np.ndarray
    time_ns: np.ndarray
    energy_j: np.ndarray
    cost_j: np.ndarray

    @classmethod
    def of(cls, table: ClockTable, waiting_w: float) -> Choices:
        """Choose the measured clocks that no faster one undercuts."""
        cost = table.energy_j - waiting_w * table.time_ns / 1e9
        order = np.lexsort((cost, table.time_ns))
        least = np.minimum.accumulate(cost[order])
        kept = order[np.concatenate([[True], cost[order][1:] < least[:-1]])]
        return cls(table.clock_hz[kept], table.time_ns[kept], table.energy_j[kept], cost[kept])

    @cached_property
    def hull(self) -> np.ndarray:
        """Numbers of the choices on the lower convex hull of cost over time."""
        kept: list[int] = []
        t, c = self.time_ns.tolist(), self.cost_j.tolist()
        for i in range(len(t)):
            while len(kept) > 1:
                a, b = kept[-2:]
                if (c[b] - c[a]) * (t[i] - t[a]) < (c[i] - c[a]) * (t[b] - t[a]):
                    break
                kept.pop()
            kept.append(i)
        return np.array(kept)


@dataclass(frozen=True)
class Schedule:
    """A clock for each instruction of a step.

    Attributes:
        clock_hz: (instructions,).
        time_ns: of the step.
        energy_j: of the step over all stages, with what devices draw while they wait.
        bound_j: no schedule of measured clocks, mixed or not, takes less within the limit.
    """

    clock_hz: np.ndarray
    time_ns: int
    energy_j: float
    bound_j: float


@dataclass(frozen=True)
class Planner:
    """Energy of the steps of a pipeline by its instructions' clocks.

    Attributes:
        pipeline: the instructions.
        tables: what each takes, two for each stage.
        waiting_w: power of a device that waits.
    """

    pipeline: Pipeline
    tables: Sequence[ClockTable]
    waiting_w: float

    @cached_property
    def choices(self) -> list[Choices]:
        """The choices of each kind of instruction."""
        return [Choices.of(table, self.waiting_w) for table in self.tables]

    def at_clock(self, clock_hz: int) -> Schedule:
        """Return the step with one clock, measured for every kind, for all instructions."""
        at = [int(np.flatnonzero(table.clock_hz == clock_hz)[0]) for table in self.tables]
        time_ns = np.array([t.time_ns[i] for t, i in zip(self.tables, at, strict=True)])
        energy_j = np.array([t.energy_j[i] for t, i in zip(self.tables, at, strict=True)])
        kind = self.pipeline.kind
        clocks = np.full(len(kind), clock_hz)
        return self._schedule(clocks, time_ns[kind], energy_j[kind], None)

    def slowest_ns(self) -> int:
        """Return the time of the step in which every instruction costs least."""
        longest = np.array([choices.time_ns[-1] for choices in self.choices])
        return int(self.pipeline.finish_ns(longest[self.pipeline.kind]).max())

    def within(self, limit_ns: int, *, fixed: bool = False) -> Schedule:
        """Return the schedule of least energy that takes no longer than a limit.

        Args:
            limit_ns: at least what the fastest clocks take.
            fixed: one clock for all microbatches of a stage's instruction.
        """
        kind = self.pipeline.kind
        group = kind if fixed else np.arange(len(kind))
        mixed_ns, bound_j = _relaxed(self, group, limit_ns)
        chosen = np.array(
            [
                np.searchsorted(self.choices[k].time_ns, t + 0.5, side="right") - 1
                for k, t in zip(kind.tolist(), mixed_ns.tolist(), strict=True)
            ]
        )
        chosen = np.maximum(chosen, 0)
        if not fixed:
            self._fill(chosen, limit_ns)
        clock_hz, time_ns, energy_j = (
            np.array([getattr(self.choices[k], n)[c] for k, c in zip(kind, chosen, strict=True)])
            for n in ("clock_hz", "time_ns", "energy_j")
        )
        return self._schedule(clock_hz, time_ns, energy_j, bound_j)

    def _schedule(
        self,
        clock_hz: np.ndarray,
        time_ns: np.ndarray,
        energy_j: np.ndarray,
        bound_j: float | None,
    ) -> Schedule:
        step_ns = int(self.pipeline.finish_ns(time_ns).max())
        waiting_ns = self.pipeline.stages_count * step_ns - int(time_ns.sum())
        total_j = float(energy_j.sum()) + self.waiting_w * waiting_ns / 1e9
        return Schedule(clock_hz, step_ns, total_j, total_j if bound_j is None else bound_j)

    def _fill(self, chosen: np.ndarray, limit_ns: int) -> None:
        """Slow instructions down while there is time, the most energy per time first."""
        kind = self.pipeline.kind
        most = max(len(c.time_ns) for c in self.choices)
        times, costs = np.full((2, len(self.choices), most + 1), np.inf)
        for row, choices in enumerate(self.choices):
            times[row, : len(choices.time_ns)] = choices.time_ns
            costs[row, : len(choices.time_ns)] = choices.cost_j
        while True:
            now_ns = times[kind, chosen].astype(np.int64)
            longer_ns = times[kind, chosen + 1] - now_ns
            fits = longer_ns <= self.pipeline.spare_ns(now_ns, limit_ns)
            if not fits.any():
                return
            with np.errstate(invalid="ignore"):
                rate = (costs[kind, chosen] - costs[kind, chosen + 1]) / longer_ns
            chosen[int(np.argmax(np.where(fits, rate, -np.inf)))] += 1


def _relaxed(planner: Planner, group: np.ndarray, limit_ns: int) -> tuple[np.ndarray, float]:
    """(instructions,) ns of each in the mixture of clocks of least energy, and that energy in J.

    Variables: when each instruction begins and, last of the moments, when the step ends, in units
    of the limit; and each group's share of each clock on the hull. An instruction ends before those
    that wait for it begin, and before the step does; the shares of a group sum to 1.
    """
    try:
        from scipy.optimize import linprog
        from scipy.sparse import csr_array
    except ImportError as exc:
        raise UsageError(
            "schedules of clocks need SciPy's solver, which is not installed: "
            "pip install 'chopper-profiler[schedule]'"
        ) from exc

    kind, edges = planner.pipeline.kind, planner.pipeline.edges
    count = len(kind)
    _, leader, group = np.unique(group, return_index=True, return_inverse=True)
    hulls = [planner.choices[k].hull for k in kind[leader]]
    size = np.array([len(hull) for hull in hulls])
    moments = count + 1
    begin = np.concatenate([[0], np.cumsum(size)]) + moments
    share_ns = np.concatenate(
        [planner.choices[k].time_ns[h] for k, h in zip(kind[leader], hulls, strict=True)]
    )
    share_j = np.concatenate(
        [planner.choices[k].cost_j[h] for k, h in zip(kind[leader], hulls, strict=True)]
    )
    # A row for each edge; the end of the step waits for instructions that nothing else waits for.
    lasts = np.setdiff1d(np.arange(count), edges[:, 0])
    before = np.concatenate([edges[:, 0], lasts])
    after = np.concatenate([edges[:, 1], np.full(len(lasts), count)])
    row = np.arange(len(before))
    of_row = np.repeat(row, size[group[before]])
    columns = np.concatenate([np.arange(begin[g], begin[g + 1]) for g in group[before]])
    matrix = csr_array(
        (
            np.concatenate(
                [np.ones(len(row)), -np.ones(len(row)), share_ns[columns - moments] / limit_ns]
            ),
            (np.concatenate([row, row, of_row]), np.concatenate([before, after, columns])),
        ),
        shape=(len(row), moments + len(share_ns)),
    )
    of_group = np.repeat(np.arange(len(size)), size)
    sums = csr_array(
        (np.ones(len(of_group)), (of_group, moments + np.arange(len(of_group)))),
        shape=(len(size), moments + len(share_ns)),
    )
    members = np.bincount(group)
    waiting_j = planner.waiting_w * planner.pipeline.stages_count * limit_ns / 1e9
    found = linprog(
        np.concatenate([np.zeros(count), [waiting_j], share_j * members[of_group]]),
        A_ub=matrix,
        b_ub=np.zeros(len(row)),
        A_eq=sums,
        b_eq=np.ones(len(size)),
        bounds=[*[(0, 1)] * moments, *[(0, None)] * len(share_ns)],
        method="highs-ipm",
    )
    if found.status != 0:
        raise ArithmeticError(f"the linear program was not solved: {found.message}")
    mixed_ns = np.add.reduceat(found.x[moments:] * share_ns, begin[:-1] - moments)
    return mixed_ns[group], float(found.fun)
