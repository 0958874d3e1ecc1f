"""Discrete-event simulation: programs on hosts, streams on devices, collectives between them.

Times are integer nanoseconds of one true clock. What a device computes advances at a rate that
depends on its clock and on who runs beside it, so a kernel may see several rates. Everything that
happens is recorded: when and why tasks began, and what the program was doing at each moment.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

Lane = Literal["compute", "communication", "copy"]
Held = Literal["host", "stream", "event"]
"""The last thing that a task waited for: its launch, its stream, or an event of another stream."""
Program = Generator["int | Event", None, None]


class Event:
    """Something that happens once."""

    __slots__ = ("_waiters", "time_ns")

    def __init__(self) -> None:
        self.time_ns: int | None = None
        self._waiters: list[Callable[[], None]] = []

    def fire(self, now_ns: int) -> None:
        """It happens now: everybody who waits goes on."""
        self.time_ns = now_ns
        waiters, self._waiters = self._waiters, []
        for go_on in waiters:
            go_on()

    def on(self, go_on: Callable[[], None]) -> None:
        """Call when it happens."""
        self._waiters.append(go_on)


class Simulation:
    """Time, and what is to happen in it."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time_ns: int, what: Callable[[], None]) -> None:
        """Do something at a time, which is not before now."""
        self._count += 1
        heapq.heappush(self._heap, (max(time_ns, self.now_ns), self._count, what))

    def spawn(self, program: Program) -> None:
        """Run a program: it yields how long it is busy, or an event that it waits for."""

        def go_on() -> None:
            try:
                waited_for = next(program)
            except StopIteration:
                return
            if isinstance(waited_for, int):
                self.at(self.now_ns + waited_for, go_on)
            elif waited_for.time_ns is not None:
                self.at(self.now_ns, go_on)
            else:
                waited_for.on(go_on)

        self.at(self.now_ns, go_on)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._heap:
            self.now_ns, _, what = heapq.heappop(self._heap)
            what()


@dataclass(eq=False, slots=True)
class Task:
    """One kernel or copy.

    Attributes:
        account: booked under math, vector, or a cause's id when it computes.
        alone_ns: how long it takes alone at the reference clock.
        ideal_ns, roofline_ns: of its FLOP at peak; of its bytes too.
        wave_ratio: by how much rounds that are not full lengthen it; part of alone_ns.
        sensitivity: s in t ∝ clock^(-s).
        shape: grid, block, bytes …: what a trace shows of it.
    """

    name: str
    lane: Lane
    stream: int
    account: str
    alone_ns: float
    ideal_ns: float = 0.0
    roofline_ns: float = 0.0
    wave_ratio: float = 1.0
    sensitivity: float = 0.0
    contended: bool = True
    shape: dict[str, Any] = field(default_factory=dict)
    collective: Collective | None = None
    call: str = ""
    correlation: int = 0
    external: int = 0
    graph: tuple[int, int] | None = None
    launch_ns: int = -1
    returned_ns: int = -1
    available_ns: int = 0
    start_ns: int = -1
    end_ns: int = -1
    held: Held = "host"
    clock_ratio: float = 1.0
    contention_ratio: float = 1.0
    device: Device | None = None
    done: Event = field(default_factory=Event)
    progress_ns: float = 0.0
    uncontended_ns: float = 0.0
    mark_ns: int = 0
    version: int = 0


@dataclass(eq=False, slots=True)
class Collective:
    """One collective: all leave together, once the last has come and the bytes have moved."""

    name: str
    group: str
    members: tuple[int, ...]
    sequence: int
    in_elements: int
    out_elements: int
    bus_ns: float
    transfer_ns: int
    tasks: dict[int, Task] = field(default_factory=dict)
    ready_ns: int = -1


@dataclass(eq=False, kw_only=True, slots=True)
class Device:
    """Streams, a clock, and who runs at the moment."""

    simulation: Simulation
    rank: int
    reference_hz: float
    clock_hz: float
    contention_ratio: float
    stream_gap_ns: int
    event_gap_ns: int
    leave_ns: Callable[[Collective], int]
    tasks: list[Task] = field(default_factory=list)
    _streams: dict[int, _Stream] = field(default_factory=dict)
    _running: dict[Task, None] = field(default_factory=dict)
    _collectives_count: int = 0

    def set_clock(self, time_ns: int, hz: float) -> None:
        """From a time on, the device runs at another clock."""

        def change() -> None:
            self._advance()
            self.clock_hz = hz
            self._schedule()

        self.simulation.at(time_ns, change)

    def stream(self, number: int) -> _Stream:
        """A stream, made when first named."""
        if number not in self._streams:
            self._streams[number] = _Stream(self)
        return self._streams[number]

    def _ratios(self, task: Task) -> tuple[float, float]:
        clock = (self.reference_hz / self.clock_hz) ** task.sensitivity
        return clock, self.contention_ratio if self._collectives_count and task.contended else 1.0

    def _advance(self) -> None:
        now = self.simulation.now_ns
        for task in self._running:
            clock, contention = self._ratios(task)
            passed = now - task.mark_ns
            task.uncontended_ns += passed / contention
            task.progress_ns += passed / (contention * clock)
            task.mark_ns = now

    def _schedule(self) -> None:
        now = self.simulation.now_ns
        for task in self._running:
            clock, contention = self._ratios(task)
            left = (task.alone_ns - task.progress_ns) * clock * contention
            task.version += 1
            finish = partial(self._finish, task, task.version)
            self.simulation.at(now + max(math.ceil(left), 0), finish)

    def _finish(self, task: Task, version: int) -> None:
        if task.version == version and task in self._running:
            self._advance()
            del self._running[task]
            lasted = self.simulation.now_ns - task.start_ns
            task.contention_ratio = lasted / task.uncontended_ns
            task.clock_ratio = task.uncontended_ns / task.alone_ns
            self.end(task)

    def begin(self, task: Task) -> None:
        """A task reaches the device."""
        task.start_ns = task.mark_ns = self.simulation.now_ns
        task.device = self
        self.tasks.append(task)
        if task.lane == "compute":
            self._advance()
            self._running[task] = None
            self._schedule()
        elif task.collective is not None:
            self._advance()
            self._collectives_count += 1
            self._schedule()
            self._arrive(task, task.collective)
        else:
            self.simulation.at(task.start_ns + round(task.alone_ns), partial(self.end, task))

    def _arrive(self, task: Task, collective: Collective) -> None:
        collective.tasks[self.rank] = task
        if len(collective.tasks) < len(collective.members):
            return
        now = self.simulation.now_ns
        collective.ready_ns = now
        for member in collective.tasks.values():
            device = member.device
            assert device is not None
            leaves_ns = now + collective.transfer_ns + device.leave_ns(collective)
            self.simulation.at(leaves_ns, partial(device.leave, member))

    def leave(self, task: Task) -> None:
        """A collective ends here."""
        self._advance()
        self._collectives_count -= 1
        self._schedule()
        self.end(task)

    def end(self, task: Task) -> None:
        """A task is done: its stream goes on."""
        task.end_ns = self.simulation.now_ns
        self._streams[task.stream].ended(task)
        task.done.fire(self.simulation.now_ns)


class _Stream:
    """First in, first out; tasks and events to wait for."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._queue: deque[Task | Event] = deque()
        self._running: Task | None = None
        self._free_ns = -(1 << 62)
        self._event_ns = -(1 << 62)

    def push(self, item: Task | Event) -> None:
        self._queue.append(item)
        if isinstance(item, Task):
            self._device.simulation.at(item.available_ns, self._go_on)
        elif item.time_ns is None:
            item.on(self._go_on)
        else:
            self._device.simulation.at(item.time_ns, self._go_on)

    def _go_on(self) -> None:
        now = self._device.simulation.now_ns
        while self._queue and self._running is None:
            head = self._queue[0]
            if isinstance(head, Event):
                if head.time_ns is None:
                    return
                self._event_ns = max(self._event_ns, head.time_ns + self._device.event_gap_ns)
                self._queue.popleft()
                continue
            times: dict[Held, int] = {
                "host": head.available_ns,
                "stream": self._free_ns,
                "event": self._event_ns,
            }
            head.held = max(times, key=times.__getitem__)
            if times[head.held] > now:
                self._device.simulation.at(times[head.held], self._go_on)
                return
            self._queue.popleft()
            self._running = head
            self._device.begin(head)

    def ended(self, task: Task) -> None:
        assert self._running is task
        self._running = None
        self._free_ns = self._device.simulation.now_ns + self._device.stream_gap_ns
        self._go_on()
