"""Spans as columns, and what the names of their operations tell.

A span is one operation of one worker: a pass of a micro-batch, a send, a collective, the optimizer.
The names are those of Megatron-LM's timers, and what others call the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from chopper.errors import InputError
from chopper.storage.manifest import Finding

Scope = Literal["next", "previous", "replicas", "ends", "all"]


class Operation(NamedTuple):
    """What the name of an operation tells.

    Attributes:
        action: pass of the pipeline.
        collective: what it communicates; None for computing.
        scope: who takes part: the next or the previous stage, all replicas of the stage, the first
            and the last stage, all workers; None for ranks that are not in the file.
    """

    action: str | None = None
    collective: str | None = None
    scope: Scope | None = None


_PASSES = {
    **dict.fromkeys(("forward", "fwd", "f"), "forward"),
    **dict.fromkeys(("backward", "bwd", "b"), "backward"),
}
_PAIR = re.compile(
    r"(?:(forward|fwd|backward|bwd)[-_ ](send|recv)|(send|recv)[-_ ](forward|backward))"
)
_COMPUTE = re.compile(
    r"(forward|fwd|backward|bwd|[fb])(?:[-_ ]?(?:compute|step|pass|micro_?step))?"
    r"|(?:backward|bwd)[-_ ]?(input|weight)|([iw])|([dw])grad"
)
_COLLECTIVE = re.compile(r"(all|reduce)[-_ ]?(gather|scatter|reduce|to[-_ ]?all)|broadcast")
_CLIP = re.compile(r"clip.{0,20}grad|grad.{0,20}(?:clip|norm)")


def operation_of(name: str) -> Operation:
    """Return what the name of an operation tells, as Megatron-LM's timers are called."""
    text = name.strip().lower()
    if pair := _PAIR.fullmatch(text):
        action = _PASSES[pair[1] or pair[4]]
        way = pair[2] or pair[3]
        # Activations go down the pipeline, gradients up.
        scope: Scope = "next" if (action == "forward") == (way == "send") else "previous"
        return Operation(action, way, scope)
    if compute := _COMPUTE.fullmatch(text):
        if compute[1]:
            return Operation(_PASSES[compute[1]])
        is_input = compute[2] == "input" or compute[3] == "i" or compute[4] == "d"
        return Operation("backward_input" if is_input else "backward_weight")
    if collective := _COLLECTIVE.search(text):
        what = re.sub(r"[-_ ]", "", collective[0])
        if re.search(r"layer-?_?norm|tensor|sequence|expert|all-?_?to", text):
            return Operation(None, what)
        return Operation(None, what, "ends" if "embedding" in text else "replicas")
    # The norm of all gradients is summed over all workers.
    return Operation(None, "allreduce", "all") if _CLIP.search(text) else Operation()


@dataclass(kw_only=True)
class Spans:
    """Spans of the workers of one job, as columns; -1 where a number is not told.

    Attributes:
        path: the file, the first of several.
        tool: what wrote them, in words.
        op: codes into ``names``.
        start_ns, end_ns: of each span, by the file's own clock.
        step: None without steps.
        stage, data_rank: the worker's place; None where no column tells.
        chunk, global_chunk: chunk of the model within its stage, and in the whole model.
        group: process group as codes into ``groups``, -1 for none.
        resolution_ns: how far the file's own rounding may be off, of each span.
        sources: ``stage`` and ``data_rank`` → what tells the worker's place, in words.
        lengths_ns: step → how long it lasted on the worker that took longest, where that is told.
        counters: (rank, step, name, value) of what was read at the end of steps.
        lacks: what is not told, in words, beyond what spans never tell.
    """

    path: Path
    tool: str
    rank: np.ndarray
    op: np.ndarray
    names: list[str]
    start_ns: np.ndarray
    end_ns: np.ndarray
    step: np.ndarray | None = None
    stage: np.ndarray | None = None
    data_rank: np.ndarray | None = None
    micro_batch: np.ndarray | None = None
    chunk: np.ndarray | None = None
    global_chunk: np.ndarray | None = None
    sequence: np.ndarray | None = None
    group: np.ndarray | None = None
    groups: list[str] = field(default_factory=list)
    resolution_ns: np.ndarray | None = None
    sources: dict[str, str] = field(default_factory=dict)
    lengths_ns: dict[int, int] = field(default_factory=dict)
    counters: list[tuple[int, int, str, float]] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @cached_property
    def workers(self) -> np.ndarray:
        """Ranks of the workers, ascending."""
        return np.unique(self.rank)

    @cached_property
    def worker(self) -> np.ndarray:
        """Index of each span's worker."""
        return np.searchsorted(self.workers, self.rank)

    @cached_property
    def operations(self) -> list[Operation]:
        """What the name of each operation tells."""
        return [operation_of(name) for name in self.names]

    @cached_property
    def communicates(self) -> np.ndarray:
        """Mask of the spans that communicate: by their name, or because they name a group."""
        communicating = [one.collective is not None for one in self.operations]
        by_name: np.ndarray = np.array(communicating)[self.op]
        return by_name if self.group is None else by_name | (self.group >= 0)

    @cached_property
    def stream(self) -> np.ndarray:
        """Stream of each span: one for computing, one for each operation that communicates."""
        return np.where(self.communicates, self.op + 1, 0)

    def place(self, name: str) -> np.ndarray | None:
        """Return the place of each worker by a column of spans; None where no column tells.

        Raises:
            InputError: a worker is in two places.
        """
        column: np.ndarray | None = getattr(self, name)
        if column is None:
            return None
        first = np.full(len(self.workers), -1, dtype=np.int64)
        first[self.worker[::-1]] = column[::-1]
        moved = np.flatnonzero(column != first[self.worker])
        if len(moved):
            at = int(moved[0])
            what = {"stage": "stage", "data_rank": "data-parallel rank"}[name]
            when = "" if self.step is None else f" from step {self.step[at]} on"
            raise InputError(
                f"{self.path}: rank {self.rank[at]} is in {what} {first[self.worker[at]]}, and"
                f"{when} in {what} {column[at]}: expected one layout; pass the spans of one layout"
            )
        return first
