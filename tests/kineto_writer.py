"""Writes Kineto traces, in every dialect that PyTorch has written, from events in nanoseconds.

The events are ours; the layout of the text, the categories and the argument names follow what
PyTorch 1.8 to 2.13 wrote (layouts read from recorded traces of each kind; nothing is copied).

    trace = Trace(dialect=TODAY, rank=1, world=2)
    op = trace.op("aten::mm", 1_000, 500, shapes=[[4, 8], [8, 2]])
    trace.launch("gemm", 1_200, 50, kernel_at=1_400, kernel_for=800, op=op)
    path.write_bytes(trace.encode())
"""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

BASE_NS = 1_751_410_836_000_000_000
"""Our traces begin here (July 2025); Kineto's own bases are of this form."""

Clock = Literal["relative", "absolute"]
Digits = Literal["fraction", "whole", "nanoseconds", "string"]


@dataclass(frozen=True)
class Dialect:
    """How a version of PyTorch writes.

    Attributes:
        clock: times count from baseTimeNanoseconds, or are Unix times.
        digits: microseconds with three decimals, whole microseconds, nanoseconds, or text.
        layout: Kineto's own lines, one line without blanks, or json's indentation.
        top: an object, or a bare list of events.
        categories: event kind → category.
        lower_case_ids: "external id" on device events, and 2021's stream names.
        properties: name of the header's device list; None for no list.
    """

    name: str
    clock: Clock = "relative"
    digits: Digits = "fraction"
    layout: Literal["kineto", "compact", "indent1", "indent2"] = "kineto"
    top: Literal["object", "list"] = "object"
    categories: tuple[tuple[str, str], ...] = ()
    lower_case_ids: bool = False
    properties: str | None = "deviceProperties"


_NOW = (
    ("op", "cpu_op"),
    ("annotation", "user_annotation"),
    ("step", "user_annotation"),
    ("runtime", "cuda_runtime"),
    ("kernel", "kernel"),
    ("memcpy", "gpu_memcpy"),
    ("memset", "gpu_memset"),
    ("python", "python_function"),
)
_THEN = (
    ("op", "Operator"),
    ("annotation", "Operator"),
    ("step", "Operator"),
    ("runtime", "Runtime"),
    ("kernel", "Kernel"),
    ("memcpy", "Memcpy"),
    ("memset", "Memset"),
    ("python", "python_function"),
)
TODAY = Dialect("today", categories=_NOW)
EPOCH_FRACTION = Dialect("epoch-fraction", clock="absolute", categories=_NOW)
EPOCH_WHOLE = Dialect("epoch-whole", clock="absolute", digits="whole", categories=_NOW)
NANOSECONDS = Dialect("nanoseconds", clock="absolute", digits="nanoseconds", categories=_NOW)
STRINGS = Dialect("strings", clock="absolute", digits="string", layout="compact", categories=_NOW)
Y2021 = Dialect(
    "2021",
    clock="absolute",
    digits="whole",
    categories=_THEN,
    lower_case_ids=True,
    properties="computeProperties",
)
LIST_2021 = Dialect(
    "2021-list",
    clock="absolute",
    digits="whole",
    layout="indent2",
    top="list",
    categories=_THEN,
    lower_case_ids=True,
    properties=None,
)
DIALECTS = (TODAY, EPOCH_FRACTION, EPOCH_WHOLE, NANOSECONDS, STRINGS, Y2021, LIST_2021)


class Number:
    """A number with the digits it shall have in the file."""

    def __init__(self, text: str) -> None:
        self.text = text


def microseconds(ns: int) -> str:
    """Nanoseconds as Kineto prints them: microseconds with three decimals."""
    sign = "-" if ns < 0 else ""
    return f"{sign}{abs(ns) // 1000}.{abs(ns) % 1000:03d}"


@dataclass
class Trace:
    """One rank's trace under construction. All times are ns after ``base_ns``."""

    dialect: Dialect = TODAY
    platform: Literal["cuda", "rocm", "cpu"] = "cuda"
    rank: int | None = None
    world: int | None = None
    pid: int = 4711
    tid: int = 4711
    device: int = 0
    stream: int = 7
    base_ns: int = BASE_NS
    device_name: str = "NVIDIA A100-SXM4-40GB"
    events: list[dict[str, Any]] = field(default_factory=list)
    header: dict[str, Any] = field(default_factory=dict)
    next_correlation: int = 1
    next_external: int = 1

    def _add(
        self, kind: str, name: str, at: int, dur: int, pid: Any, tid: Any, args: dict[str, Any]
    ) -> None:
        category = dict(self.dialect.categories)[kind]
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": pid,
                "tid": tid,
                "ts": at,
                "dur": dur,
                "args": args,
            }
        )

    def op(
        self,
        name: str,
        at: int,
        dur: int,
        *,
        shapes: list[Any] | None = None,
        types: list[str] | None = None,
        tid: int | None = None,
        sequence: int | None = None,
        forward_tid: int | None = None,
        collective: dict[str, Any] | None = None,
    ) -> int:
        """An operator; returns its external id."""
        external = self.next_external
        self.next_external += 1
        args: dict[str, Any] = {"External id": external}
        if shapes is not None:
            args["Input dims" if self.dialect.lower_case_ids else "Input Dims"] = shapes
            args["Input type"] = types or ["float"] * len(shapes)
        if sequence is not None:
            args["Sequence number"] = sequence
        if forward_tid is not None:
            args["Fwd thread id"] = forward_tid
        args |= collective or {}
        self._add("op", name, at, dur, self.pid, tid or self.tid, args)
        return external

    def annotation(self, name: str, at: int, dur: int) -> None:
        """A user annotation."""
        self._add("annotation", name, at, dur, self.pid, self.tid, {})

    def step(self, number: int, at: int, dur: int) -> None:
        """``ProfilerStep#N``."""
        self._add("step", f"ProfilerStep#{number}", at, dur, self.pid, self.tid, {})

    def python(self, name: str, at: int, dur: int) -> None:
        """A Python function."""
        self._add("python", name, at, dur, self.pid, self.tid, {})

    def call(self, name: str, at: int, dur: int, correlation: int | None = None) -> int:
        """A runtime call; returns its correlation id."""
        if correlation is None:
            correlation = self.next_correlation
            self.next_correlation += 1
        tid: Any = str(self.tid) if self.dialect.lower_case_ids else self.tid
        args = {"cbid": 211, "correlation": correlation}
        self._add("runtime", name, at, dur, self.pid, tid, args)
        return correlation

    def work(
        self,
        kind: Literal["kernel", "memcpy", "memset"],
        name: str,
        at: int,
        dur: int,
        correlation: int,
        *,
        external: int | None = None,
        device: int | None = None,
        stream: int | None = None,
        args: dict[str, Any] | None = None,
    ) -> None:
        """A kernel, copy or memset."""
        device = self.device if device is None else device
        stream = self.stream if stream is None else stream
        found: dict[str, Any] = {"device": device, "stream": stream, "correlation": correlation}
        if external is not None:
            found["external id" if self.dialect.lower_case_ids else "External id"] = external
        if kind == "kernel":
            found |= (
                {"kind": "Dispatch Kernel", "grid": [8, 1, 1], "block": [256, 1, 1]}
                if self.platform == "rocm"
                else {
                    "registers per thread": 32,
                    "shared memory": 1024,
                    "grid": [8, 1, 1],
                    "block": [128, 1, 1],
                    "est. achieved occupancy %": 25,
                }
            )
        tid: Any = f"stream {stream}" if self.dialect.lower_case_ids else stream
        self._add(kind, name, at, dur, device, tid, found | (args or {}))

    def launch(
        self,
        name: str,
        at: int,
        dur: int,
        *,
        kernel_at: int,
        kernel_for: int,
        op: int | None = None,
        kind: Literal["kernel", "memcpy", "memset"] = "kernel",
        device: int | None = None,
        stream: int | None = None,
        args: dict[str, Any] | None = None,
    ) -> int:
        """A launching call and its work; returns the correlation id."""
        prefix = "hip" if self.platform == "rocm" else "cuda"
        call = {"kernel": "LaunchKernel", "memcpy": "MemcpyAsync", "memset": "MemsetAsync"}[kind]
        correlation = self.call(prefix + call, at, dur)
        self.work(
            kind,
            name,
            kernel_at,
            kernel_for,
            correlation,
            external=op,
            device=device,
            stream=stream,
            args=args,
        )
        return correlation

    def memory(self, at: int, size: int, total: int, reserved: int) -> None:
        """An allocator instant."""
        self.events.append(
            {
                "ph": "i",
                "cat": "cpu_instant_event",
                "s": "t",
                "name": "[memory]",
                "pid": self.pid,
                "tid": self.tid,
                "ts": at,
                "args": {
                    "Total Reserved": reserved,
                    "Total Allocated": total,
                    "Bytes": size,
                    "Addr": 140_000_000_000,
                    "Device Id": self.device,
                    "Device Type": 1,
                },
            }
        )

    def synchronization(self, name: str, at: int, dur: int, stream: int, **args: int) -> None:
        """A synchronization record."""
        self.events.append(
            {
                "ph": "X",
                "cat": "cuda_sync",
                "name": name,
                "pid": self.device,
                "tid": stream,
                "ts": at,
                "dur": dur,
                "args": {"cuda_sync_kind": name, "stream": stream, "device": self.device, **args},
            }
        )

    def counter(self, name: str, at: int, **values: float) -> None:
        """A counter sample."""
        self.events.append(
            {"ph": "C", "name": name, "pid": self.device, "ts": at, "args": dict(values)}
        )

    def named(self, process: str | None = None, thread: str | None = None) -> None:
        """Metadata: names of the process and of its main thread."""
        for key, text in (("process_name", process), ("thread_name", thread)):
            if text is not None:
                self.events.append(
                    {
                        "ph": "M",
                        "name": key,
                        "ts": 0,
                        "pid": self.pid,
                        "tid": self.tid,
                        "args": {"name": text},
                    }
                )

    def document(self) -> dict[str, Any]:
        """The trace as Python values, times as :class:`Number`."""
        found: dict[str, Any] = {"schemaVersion": 1}
        if self.dialect.properties is not None and self.platform != "cpu":
            found[self.dialect.properties] = [
                {
                    "id": i,
                    "name": self.device_name,
                    "totalGlobalMem": 42_505_273_344,
                    "numSms": 108,
                }
                for i in range(self.device + 1)
            ]
        if self.rank is not None:
            found["distributedInfo"] = {"backend": "nccl", "rank": self.rank}
            if self.world is not None:
                found["distributedInfo"]["world_size"] = self.world
        if self.dialect.clock == "relative":
            found["baseTimeNanoseconds"] = self.base_ns
        return found | self.header | {"traceEvents": list(map(self._timed, self.events))}

    def _timed(self, event: dict[str, Any]) -> dict[str, Any]:
        timed = dict(event)
        if isinstance(event.get("ts"), int):
            offset = self.base_ns if self.dialect.clock == "absolute" else 0
            timed["ts"] = self._number(event["ts"] + offset)
        if isinstance(event.get("dur"), int):
            timed["dur"] = self._number(event["dur"])
        return timed

    def _number(self, ns: int) -> Number:
        match self.dialect.digits:
            case "fraction":
                return Number(microseconds(ns))
            case "whole":
                return Number(str(ns // 1000))
            case "nanoseconds":
                return Number(str(ns))
            case "string":
                return Number(json.dumps(microseconds(ns)))

    def encode(self) -> bytes:
        """The file's bytes."""
        return encode(self.document(), self.dialect)

    def encode_gzip(self) -> bytes:
        """The file's bytes, compressed as torch does for ``.gz``."""
        return gzip.compress(self.encode(), mtime=0)


def encode(document: dict[str, Any], dialect: Dialect = TODAY) -> bytes:
    """Text of a document in a dialect's layout."""
    value: Any = document["traceEvents"] if dialect.top == "list" else document
    match dialect.layout:
        case "compact":
            return _text(value, None).encode()
        case "indent1":
            return _text(value, 1).encode()
        case "indent2":
            return _text(value, 2).encode()
        case "kineto":
            return _kineto(document).encode()


def merged(*documents: dict[str, Any], interleave: bool = False) -> dict[str, Any]:
    """One document from several, as merge tools make it: the first header, all events.

    Args:
        documents: ranks' documents.
        interleave: the tool has sorted all events by time.
    """
    events = [e for d in documents for e in d["traceEvents"]]
    if interleave:
        events.sort(key=lambda e: float(e["ts"].text.strip('"')))
    return documents[0] | {"traceEvents": events}


def _text(value: Any, indent: int | None) -> str:
    """JSON in which numbers have the digits that were asked for."""
    marks: list[str] = []

    def mark(v: Any) -> Any:
        if isinstance(v, Number):
            marks.append(v.text)
            return f"\x00{len(marks) - 1}\x00"
        if isinstance(v, dict):
            return {k: mark(x) for k, x in v.items()}
        if isinstance(v, list):
            return [mark(x) for x in v]
        return v

    separators = (",", ":") if indent is None else None
    text = json.dumps(mark(value), indent=indent, separators=separators, ensure_ascii=False)
    return re.sub(r'"\\u0000(\d+)\\u0000"', lambda m: marks[int(m.group(1))], text)


def _kineto(document: dict[str, Any]) -> str:
    """Kineto's own layout: one event per block of lines, header members around it."""
    head = "".join(
        f'\n  "{key}": {_text(value, None)},'
        for key, value in document.items()
        if key not in ("traceEvents", "baseTimeNanoseconds")
    )
    blocks = []
    for event in document["traceEvents"]:
        if not isinstance(event, dict):
            blocks.append("  " + _text(event, None))
            continue
        first = ", ".join(
            f'"{k}": {_text(v, None)}' for k, v in event.items() if k not in ("ts", "dur", "args")
        )
        lines = [f"    {first}"] if first else []
        times = ", ".join(f'"{k}": {_text(event[k], None)}' for k in ("ts", "dur") if k in event)
        if times:
            lines.append(f"    {times}")
        if "args" in event:
            args = ", ".join(f'"{k}": {_text(v, None)}' for k, v in event["args"].items())
            lines.append('    "args": {\n      ' + args + "\n    }")
        blocks.append("  {\n" + ",\n".join(lines) + "\n  }")
    tail = '\n  "traceName": "trace.json",\n  "displayTimeUnit": "ms"'
    if "baseTimeNanoseconds" in document:
        tail += f',\n  "baseTimeNanoseconds": {_text(document["baseTimeNanoseconds"], None)}'
    events = ",\n".join(blocks)
    return "\n{" + head + '\n  "traceEvents": [\n' + events + "\n  ]," + tail + "\n}"


def small_trace(dialect: Dialect = TODAY, **how: Any) -> Trace:
    """Two steps of 10 µs: a copy, two kernels each, host operators around them.

    Worked by hand (ns after the base, step s at 10 000·s): op 1 000-4 000 launches at 2 000 the
    kernel 3 000-5 000; op 5 000-6 000 launches at 5 500 the kernel 6 000-9 000; the copy
    1 000-2 000 was launched at 500.
    """
    trace = Trace(dialect=dialect, **how)
    cuda = trace.platform != "cpu"
    for s in range(2):
        t = 10_000 * s
        trace.step(s + 10, t, 10_000)
        if cuda:
            trace.launch(
                "Memcpy HtoD (Pageable -> Device)",
                t + 500,
                100,
                kernel_at=t + 1_000,
                kernel_for=1_000,
                kind="memcpy",
                args={"bytes": 4096},
            )
        first = trace.op("aten::mm", t + 1_000, 3_000, shapes=[[64, 32], [32, 16]], sequence=s)
        if cuda:
            trace.launch("gemm", t + 2_000, 1_000, kernel_at=t + 3_000, kernel_for=2_000, op=first)
        second = trace.op("aten::add", t + 5_000, 1_000, shapes=[[64, 16], [64, 16]])
        if cuda:
            trace.launch("add", t + 5_500, 500, kernel_at=t + 6_000, kernel_for=3_000, op=second)
    trace.named("python", "thread 4711 (python)")
    return trace
