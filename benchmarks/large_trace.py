"""A trace that is larger than memory should be, of one rank with Python stacks.

    python -m benchmarks.large_trace --text 10GB [--run]

`chopper analyze` of the trace; with `--run` also `chopper import`, and commands on the imported
run. The text of eight steps is written again and again, with other times and numbers.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isal import igzip

from benchmarks._synthetic import _BASE_NS, DEVICE, _json_events, tables
from benchmarks.many_ranks import CHOPPER, load, shown, watched
from chopper.quantities import size_bytes

_STEPS = 8
"""Of different work, before it repeats."""
_FRAMES = ("train.py(88): train", "model.py(40): forward", "nn.Module: Block_{layer}", "{op}")
"""Python's stack around an operator."""
_SLOT = re.compile(r'"@([ti])(-?\d+)"|@(n)(\d+)')


def write(path: Path, text_bytes: int) -> int:
    """Write about so many bytes of JSON, packed where the name ends in .gz; return its events."""
    blocks = _blocks()
    open_ = igzip.open if path.suffix == ".gz" else open
    header = {
        "schemaVersion": 1,
        "deviceProperties": [
            {"id": 0, "name": DEVICE, "totalGlobalMem": 85_028_765_696, "numSms": 132}
        ],
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1},
        "baseTimeNanoseconds": _BASE_NS,
    }
    with open_(path, "wb") as file:
        file.write(f'{json.dumps(header)[:-1]}, "traceEvents": [\n'.encode())
        written = events = number = 0
        shift_ns = shift_ids = 0
        while written < text_bytes:
            text, slots, count, period_ns, ids = blocks
            values: list[Any] = []
            for kind, value in slots:
                if kind == "t":
                    values += divmod(value + shift_ns, 1000)
                else:
                    values.append(value + (shift_ids if kind == "i" else number))
            piece = text % tuple(values)
            written += file.write(piece if written == 0 else b",\n" + piece)
            events += count
            shift_ns, shift_ids, number = shift_ns + period_ns, shift_ids + ids, number + _STEPS
        file.write(b"\n]}\n")
    return events


def _blocks() -> tuple[bytes, list[tuple[str, int]], int, int, int]:
    """Return the text of some steps with slots, what is in these, its events, period and ids."""
    made = tables(700 * _STEPS)
    step = made["step"]
    begin, end = step["start_ns"][0].as_py(), step["end_ns"][-1].as_py()
    device_end = max(
        row["start_ns"] + row["dur_ns"] for row in made["device_event"].to_pylist()[-100:]
    )
    lines = [json.dumps(event) for event in _with_slots([*_json_events(made), *_frames(made)])]
    text = ",\n".join(lines)
    slots = [(m[1] or m[3], int(m[2] or m[4])) for m in _SLOT.finditer(text)]
    formats = {"t": "%d.%03d", "i": "%d", "n": "%d"}
    text = _SLOT.sub(lambda m: formats[m[1] or m[3]], text.replace("%", "%%"))
    ids = 1 + max(value for kind, value in slots if kind == "i")
    return text.encode(), slots, len(lines), max(end, device_end) - begin + 100_000, ids


def _with_slots(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for event in events:
        event["ts"] = f"@t{round(event['ts'] * 1000)}"
        args = event.get("args", {})
        for key in ("correlation", "External id", "Sequence number"):
            if isinstance(args.get(key), int) and args[key] >= 0:
                args[key] = f"@i{args[key]}"
        if "id" in event:
            event["id"] = f"@i{event['id']}"
        if event["name"].startswith("ProfilerStep#"):
            event["name"] = "ProfilerStep#@n" + event["name"].removeprefix("ProfilerStep#")
        yield event


def _frames(made: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield Python's stack around each outer operator of the main thread."""
    number = 0
    rows = made["host_span"].select(["category", "name", "pid", "tid", "start_ns", "dur_ns"])
    for row in rows.to_pylist():
        if row["category"] != "cpu_op" or row["dur_ns"] < 12_000:
            continue
        for depth, frame in enumerate(_FRAMES):
            number += 1
            inset = 100 * (len(_FRAMES) - depth)
            yield {
                "ph": "X",
                "cat": "python_function",
                "name": frame.format(layer=number % 48, op=f"functional.py({number % 997}): op"),
                "pid": row["pid"],
                "tid": row["tid"],
                "ts": (row["start_ns"] - _BASE_NS - inset) / 1000,
                "dur": (row["dur_ns"] + 2 * inset) / 1000,
                "args": {"Python id": number, "Python parent id": number - 1, "Ev Idx": number},
            }


def main() -> None:
    """Write a trace, unless it is there, and attribute it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", default="1GB", help="size of the JSON")
    parser.add_argument("--file", type=Path, help="where it is, or is written and stays")
    parser.add_argument("--run", action="store_true", help="import it, and read the run")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = told.file or Path(folder) / "trace.json"
        if not file.exists():
            print(f"{write(file, size_bytes(told.text, '--text'))} events", flush=True)
        print(f"{file.stat().st_size / 1e9:.1f} GB of JSON; {load()}", flush=True)
        commands = [["analyze", str(file), "--json"]]
        if told.run:
            run = f"{folder}/run"
            commands += [
                ["import", str(file), "-o", run],
                ["analyze", run, "--json"],
                ["query", run, "SELECT name, sum(dur_ns) FROM device_event GROUP BY 1"],
            ]
        print(
            f"{'':>6} {'chopper':>12} {'wall s':>8} {'CPU s':>8} {'own CPU s':>10} {'peak MB':>8}"
        )
        for command in commands:
            shown(1, command[0], watched([*CHOPPER, *command]))
        print(load())


if __name__ == "__main__":
    main()
