"""Reading the largest real traces: chopper beside HTA and beside a bare typed decode.

    python -m benchmarks.ingest [--repeats 5] [TRACE ...]

Each reader runs in an interpreter of its own, imports done before the clock starts, in turns. The
least wall time, the least CPU time and the median peak memory of the process and its children are
shown; where other programs run too, CPU time is what to compare. HTA is
measured when it is installed here (pip install HolisticTraceAnalysis) or in the interpreter that
CHOPPER_PEERS names. Traces: arguments, else the largest of $CHOPPER_TRACES.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks._peers import Sample, best, measure, peer_python

_BARE_SETUP = """
import gzip, msgspec
from chopper.collectors.formats.kineto._events import Event
class Trace(msgspec.Struct):
    traceEvents: list[Event]
decode = msgspec.json.Decoder(Trace).decode
"""
_CHOPPER_SETUP = """
from pathlib import Path
from chopper.collectors.formats.kineto import read_trace
"""
_HTA_SETUP = """
import logging; logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    traces = [trace.resolve() for trace in options.traces or largest()]
    hta = peer_python("hta")
    if hta is None:
        print("HTA is not installed: pip install HolisticTraceAnalysis", file=sys.stderr)
    columns = (
        "trace",
        "MB",
        "bare",
        "chopper",
        "× bare",
        "HTA",
        "faster",
        "chopper",
        "HTA",
        "ratio",
    )
    print(f"{'':44} {'':5} {'wall and CPU seconds':^41} {'peak MB':^24}")
    print("{:44} {:>5} {:>11} {:>11} {:>7} {:>11} {:>11} {:>8} {:>7} {:>5}".format(*columns))
    for trace in traces:
        show(trace, hta, options.repeats)


def show(trace: Path, hta: str | None, repeats: int) -> None:
    bare: list[Sample] = []
    ours: list[Sample] = []
    theirs: list[Sample] = []
    for _ in range(repeats):
        bare.append(measure(_BARE_SETUP, f"decode(gzip.open({str(trace)!r}).read())"))
        ours.append(measure(_CHOPPER_SETUP, f"read_trace(Path({str(trace)!r}))"))
        if hta is not None:
            theirs.append(
                measure(_HTA_SETUP, f"TraceAnalysis(trace_files={{0: {str(trace)!r}}})", hta)
            )
    b, c = best(bare), best(ours)
    line = (
        f"{trace.name[:44]:44} {trace.stat().st_size / 1e6:5.1f} {_seconds(b)} {_seconds(c)} "
        f"{c.wall_s / b.wall_s:3.1f} {c.cpu_s / b.cpu_s:3.1f}"
    )
    if theirs:
        h = best(theirs)
        line += (
            f" {_seconds(h)} {h.wall_s / c.wall_s:4.1f}× {h.cpu_s / c.cpu_s:4.1f}×"
            f" {c.peak_bytes / 1e6:8.0f} {h.peak_bytes / 1e6:7.0f}"
            f" {c.peak_bytes / h.peak_bytes:5.2f}"
        )
    else:
        line += f" {'–':>11} {'–':>11} {c.peak_bytes / 1e6:8.0f}"
    print(line, flush=True)


def _seconds(sample: Sample) -> str:
    return f"{sample.wall_s:5.2f} {sample.cpu_s:5.2f}"


def largest(count: int = 3) -> list[Path]:
    """The largest Kineto traces with events in an object, which all three readers take."""
    named = os.environ.get("CHOPPER_TRACES")
    root = Path(named) if named else None
    if root is None or not root.is_dir():
        sys.exit("no traces: name some, or set CHOPPER_TRACES to a directory that holds them")
    found = [p for p in root.rglob("*.json.gz") if "toplevel-list" not in p.name]
    return sorted(found, key=lambda p: -p.stat().st_size)[:count]


if __name__ == "__main__":
    main()
