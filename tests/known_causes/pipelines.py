"""Pipeline jobs of which every nanosecond is known: their spans, and the truth of each wait.

A worker runs forward and backward passes in the order of 1F1B or GPipe. A pass begins once the one
before it has ended and the neighbour's message is there; a transfer takes a fixed time after both
ends are ready. A step ends with an optimizer, which all workers begin together. One worker, one
stage, or single micro-batches can be made longer; the truth of that is what each worker waits more
than in the same job without it.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

US = 1_000
MS = 1_000_000
Pass = tuple[str, int]
"""``forward`` or ``backward``, and the micro-batch."""
CLIP = "optimizer-clip-main-grad"
"""The norm of all gradients, for which all workers wait."""
COLUMNS = (
    *("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration"),
    *("seq_id", "mc", "gmc", "mb_id"),
)


@dataclass(frozen=True)
class Job:
    """A job of ``replicas`` × ``stages`` workers.

    Attributes:
        forward_ns, backward_ns: of one micro-batch on one stage.
        counts: micro-batches of each step, where they differ.
        numbered: whether the file tells the micro-batches apart.
        longer: (replica, stage, step, micro-batch) → how many times as long; None stands for all.
    """

    stages: int = 4
    replicas: int = 2
    micro_batches: int = 8
    steps: int = 3
    schedule: str = "1f1b"
    forward_ns: int = 10 * MS
    backward_ns: int = 20 * MS
    transfer_ns: int = 10 * US
    optimizer_ns: int = 5 * MS
    counts: tuple[int, ...] = ()
    numbered: bool = True
    longer: Mapping[tuple[int | None, int | None, int | None, int | None], float] = field(
        default_factory=dict
    )

    def with_longer(
        self,
        factor: float,
        *,
        replica: int | None = None,
        stage: int | None = None,
        step: int | None = None,
        batch: int | None = None,
    ) -> Job:
        """Return the job with some of its passes longer."""
        return replace(self, longer={**self.longer, (replica, stage, step, batch): factor})

    def pass_ns(self, replica: int, stage: int, step: int, batch: int, kind: str) -> int:
        """Return how long a pass takes."""
        time_ns = self.forward_ns if kind == "forward" else self.backward_ns
        place = replica, stage, step, batch
        for wanted, factor in self.longer.items():
            if all(w in (None, p) for w, p in zip(wanted, place, strict=True)):
                time_ns = round(time_ns * factor)
        return time_ns

    def order(self, stage: int, step: int) -> list[Pass]:
        """Return the passes of a stage in a step, in order."""
        count = self.counts[step] if self.counts else self.micro_batches
        if self.schedule == "gpipe":
            return [(kind, i) for kind in ("forward", "backward") for i in range(count)]
        ahead = min(self.stages - 1 - stage, count)
        order = [("forward", i) for i in range(ahead)]
        for i in range(count):
            if i + ahead < count:
                order.append(("forward", i + ahead))
            order.append(("backward", i))
        return order


@dataclass(frozen=True)
class Span:
    """One operation, in ns since its step began."""

    replica: int
    stage: int
    step: int
    kind: str
    sequence: int
    batch: int
    start_ns: int
    end_ns: int


def spans(job: Job) -> Iterator[Span]:
    """Yield all operations of a job."""
    for step in range(job.steps):
        ends: dict[tuple[int, int], int] = {}
        for replica in range(job.replicas):
            for stage, of in _passed(job, replica, step).items():
                yield from of
                ends[replica, stage] = max(span.end_ns for span in of)
        begin = max(ends.values())
        for (replica, stage), end in ends.items():
            yield Span(replica, stage, step, CLIP, 0, -1, end, begin + job.transfer_ns)
            start = begin + job.transfer_ns
            yield Span(replica, stage, step, "optimizer", 0, -1, start, start + job.optimizer_ns)


def _passed(job: Job, replica: int, step: int) -> dict[int, list[Span]]:
    """Run the passes of one replica: every stage goes on as soon as its next message is there."""
    ended: dict[tuple[int, str, int], int] = {}
    free = dict.fromkeys(range(job.stages), 0)
    waiting = {stage: job.order(stage, step) for stage in range(job.stages)}
    made: dict[int, list[Span]] = defaultdict(list)
    while any(waiting.values()):
        before = sum(map(len, waiting.values()))
        for stage, order in waiting.items():
            while order:
                kind, batch = order[0]
                source = stage + (-1 if kind == "forward" else 1)
                has_source = 0 <= source < job.stages
                if has_source and (source, kind, batch) not in ended:
                    break
                start = free[stage]
                if has_source:
                    sent = ended[source, kind, batch]
                    start = max(start, sent) + job.transfer_ns
                    recv = Span(replica, stage, step, f"{kind}-recv", batch, -1, free[stage], start)
                    made[stage].append(recv)
                    send = Span(replica, source, step, f"{kind}-send", batch, -1, sent, start)
                    made[source].append(send)
                end = start + job.pass_ns(replica, stage, step, batch, kind)
                made[stage].append(
                    Span(replica, stage, step, f"{kind}-compute", batch, batch, start, end)
                )
                ended[stage, kind, batch] = free[stage] = end
                order.pop(0)
        assert sum(map(len, waiting.values())) < before, "the schedule waits for itself"
    return made


def waits(job: Job) -> dict[int, int]:
    """Return by rank how long it waits for others in all steps: for messages, and for the end."""
    waited: dict[int, int] = defaultdict(int)
    for span in spans(job):
        if span.kind.endswith("recv") or span.kind == CLIP:
            waited[rank_of(job, span)] += span.end_ns - span.start_ns - job.transfer_ns
    return dict(waited)


def rank_of(job: Job, span: Span) -> int:
    """Return the global rank of a worker."""
    return span.stage * job.replicas + span.replica


def write(job: Job, path: Path) -> Path:
    """Write the spans as a CSV of seconds, as timers of training programs do."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for span in spans(job):
            compute = span.kind.endswith("compute")
            writer.writerow(
                (
                    *(span.replica, span.stage, rank_of(job, span), span.step, span.kind),
                    *(f"{t / 1e9:.9f}" for t in (span.start_ns, span.end_ns - span.start_ns)),
                    *(span.sequence, 0 if compute else -1, span.stage if compute else -1),
                    span.batch if job.numbered else -1,
                )
            )
    return path
