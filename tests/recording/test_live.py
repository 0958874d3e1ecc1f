"""Watching a run while it is recorded: streams that grow, the panel, the endpoint."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import chopper
from chopper import pipeline
from chopper.cli.record_ import Watch
from chopper.errors import ChopperError, UsageError
from chopper.recording.live import (
    LiveDevice,
    LiveRank,
    LiveRun,
    Snapshot,
    StreamTail,
    parse_address,
    serve,
)
from chopper.reports.live import panel
from chopper.storage.parts import RunWriter
from chopper.storage.streams import StreamWriter
from tests.attributing import verdict_of
from tests.recording.make import TRACE_ONLY, Task
from tests.waiting import PATIENCE_S, until


def steps(*numbers: int) -> dict[str, Any]:
    return {
        "number": list(numbers),
        "start_ns": [n * 1000 for n in numbers],
        "end_ns": [n * 1000 + 500 + n for n in numbers],
        "source": ["mark"] * len(numbers),
        "traced": [False] * len(numbers),
        "profiled": [False] * len(numbers),
        "micro_steps": [None] * len(numbers),
    }


def test_a_tail_reads_what_is_new_and_nothing_twice(tmp_path: Path) -> None:
    file = tmp_path / "step.arrow"
    tail = StreamTail(file)
    assert tail.poll() == []
    writer = StreamWriter(file, "step")
    assert tail.poll() == []
    writer.write(steps(0, 1))
    assert [b["number"].to_pylist() for b in tail.poll()] == [[0, 1]]
    assert tail.poll() == []
    writer.write(steps(2))
    writer.write(steps(3))
    assert [b["number"].to_pylist() for b in tail.poll()] == [[2], [3]]
    tail.close()
    writer.write(steps(4))
    assert [b["number"].to_pylist() for b in tail.poll()] == [[4]]
    writer.close()
    assert tail.poll() == []
    tail.close()


def test_a_batch_that_is_half_written_comes_once_it_is_whole(tmp_path: Path) -> None:
    whole = tmp_path / "whole.arrow"
    writer = StreamWriter(whole, "step")
    writer.write(steps(0))
    first = whole.stat().st_size
    writer.write(steps(1))
    data = whole.read_bytes()
    writer.close()
    growing = tmp_path / "step.arrow"
    tail = StreamTail(growing)
    for size in range(1, len(data) + 1, 7):
        with growing.open("r+b" if growing.exists() else "wb") as file:
            file.write(data[:size])
        seen = [n for b in tail.poll() for n in b["number"].to_pylist()]
        assert seen == [] or (seen == [0] and size >= first) or seen == [1]
    growing.write_bytes(data)
    tail.poll()
    assert tail._read_count == 2
    tail.close()


def test_a_stream_that_is_written_anew_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "step.arrow"
    writer = StreamWriter(file, "step")
    writer.write(steps(0))
    tail = StreamTail(file)
    assert len(tail.poll()) == 1
    writer.close()
    other = StreamWriter(tmp_path / "new", "step")
    other.write(steps(0, 1, 2))
    other.close()
    (tmp_path / "new").replace(file)
    assert [b["number"].to_pylist() for b in tail.poll()] == [[0, 1, 2]]
    tail.close()


def test_ranks_and_devices_of_a_run_that_grows(tmp_path: Path) -> None:
    live = LiveRun(tmp_path)
    assert live.poll().ranks == []
    part = RunWriter(tmp_path, 3)
    part.manifest.hostname = "here"
    part.save()
    log = StreamWriter(part.directory / "step.arrow", "step")
    log.write(steps(0, 1, 2))
    clocks = StreamWriter(part.directory / "device_clock.arrow", "device_clock")
    rows = {
        "time_ns": [1, 2, 3],
        "span_ns": [0, 0, 0],
        "device_id": [0, 1, 0],
        "device_uuid": ["a", "b", "a"],
        "sm_clock_hz": [1_980_000_000, None, 1_200_000_000],
        "memory_clock_hz": [None] * 3,
        "power_w": [650.0] * 3,
        "event_reasons": [0, None, 4],
    }
    clocks.write(rows)
    (part.directory / "trace-0.json.gz").write_bytes(b"")
    snapshot = live.poll()
    (rank,) = snapshot.ranks
    assert (rank.rank, rank.step, rank.step_ns) == (3, 2, 501)
    first, second = snapshot.devices
    assert (first.hostname, first.sm_clock_hz, first.event_reasons) == ("here", 1_200_000_000, 4)
    assert (second.device_id, second.sm_clock_hz) == (1, None)
    assert len(snapshot.traces) == 1
    live.close()
    log.close()
    clocks.close()


def test_a_device_that_is_lost_is_not_shown_as_it_last_was(tmp_path: Path) -> None:
    live = LiveRun(tmp_path)
    part = RunWriter(tmp_path, 0)
    part.manifest.hostname = "here"
    part.save()
    clocks = StreamWriter(part.directory / "device_clock.arrow", "device_clock")

    def read(at_s: int, *devices: int) -> list[tuple[int, int | None, float | None]]:
        clocks.write(
            {
                "time_ns": [at_s * 10**9] * len(devices),
                "span_ns": [0] * len(devices),
                "device_id": list(devices),
                "device_uuid": [f"GPU-{d}" for d in devices],
                "sm_clock_hz": [1_980_000_000] * len(devices),
                "memory_clock_hz": [None] * len(devices),
                "power_w": [650.0] * len(devices),
                "event_reasons": [4] * len(devices),
            }
        )
        return [(d.device_id, d.sm_clock_hz, d.power_w) for d in live.poll().devices]

    here = [(d, 1_980_000_000, 650.0) for d in (0, 1)]
    assert read(1, 0, 1) == here
    assert read(9, 0) == here
    assert read(12, 0) == [here[0], (1, None, None)]
    assert read(13, 0, 1) == here
    live.close()
    clocks.close()


def snapshot() -> Snapshot:
    return Snapshot(
        0,
        [LiveRank(0, step=12, step_ns=250_000_000, cpu_ratio=0.5), LiveRank(1)],
        [LiveDevice("h", 0, uuid="GPU-a", sm_clock_hz=1_980_000_000, power_w=651.0, energy_j=3.0)],
        [],
    )


def test_the_panel_shows_the_unknown_as_unknown() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(panel(snapshot(), "runs/[bold]mine", "Data bounds this run."))
    text = console.export_text()
    assert "Data bounds this run." in text
    assert "runs/[bold]mine" in text
    assert re.search(r"0 +12 +250 ms +50\.0 % +– +–", text)
    assert re.search(r"1 +– +– +– +– +–", text)
    assert re.search(r"1\.98 GHz +651 W +– +– +–", text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9400", ("127.0.0.1", 9400)),
        (":9400", ("127.0.0.1", 9400)),
        ("0.0.0.0:9400", ("0.0.0.0", 9400)),
        ("[::1]:9400", ("::1", 9400)),
    ],
)
def test_addresses_are_of_the_loopback_unless_told(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize("text", ["", "x", "localhost", "1:2:x", "70000", "h:-1"])
def test_what_is_no_address_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="not an address; expected PORT or HOST:PORT"):
        parse_address(text)


def fetch(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


def test_the_endpoint_serves_what_is_known_in_base_units() -> None:
    pytest.importorskip("prometheus_client")
    port, stop = serve(("127.0.0.1", 0), snapshot)
    try:
        text = fetch(port)
        with pytest.raises(ChopperError, match="cannot serve metrics there"):
            serve(("127.0.0.1", port), snapshot)
    finally:
        stop()
    assert 'chopper_step_seconds{rank="0"} 0.25' in text
    assert 'chopper_device_energy_joules_total{device="0",host="h",uuid="GPU-a"} 3.0' in text
    assert 'rank="1"' not in text
    with pytest.raises(OSError, match="."):  # noqa: RUF043
        fetch(port)


PROGRAM = """
import sys, time, chopper
from pathlib import Path
print("begun", flush=True)
with chopper.profile(trace=False) as prof:
    while True:
        time.sleep(0.02)
        prof.step()
        if Path(sys.argv[1]).exists():
            break
print("ended", flush=True)
"""


def program(folder: Path) -> list[str]:
    file = folder / "program.py"
    file.write_text(PROGRAM)
    return [sys.executable, str(file), str(folder / "enough")]


CHOPPER = [sys.executable, "-m", "chopper"]


def test_metrics_of_a_recording_that_runs(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    process = subprocess.Popen(
        [
            *(*CHOPPER, "record", "-o", str(tmp_path / "run")),
            *("--no-trace", "--prometheus", "0"),
            *("--", *program(tmp_path)),
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    port = int(next(m[1] for line in lines if (m := re.search(r":(\d+)/metrics", line))))
    until(lambda: 'chopper_step{rank="0"}' in fetch(port), "a step")
    (tmp_path / "enough").touch()
    _, rest = process.communicate()
    assert process.returncode == 0, rest
    assert "recorded 1 rank" in rest


def test_the_live_panel_keeps_the_commands_output(tmp_path: Path) -> None:
    (tmp_path / "enough").touch()
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [
            *(*CHOPPER, "record", "-o", str(tmp_path / "run"), "--no-trace", "--live"),
            *("--", *program(tmp_path)),
        ],
        stdin=child,
        stdout=child,
        stderr=child,
        env={**os.environ, "COLUMNS": "100", "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(child)
    output = b""
    while True:
        try:
            chunk = os.read(parent, 65536)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        output += chunk
    os.close(parent)
    text = output.decode(errors="replace")
    assert process.wait() == 0, text
    assert text.index("begun") < text.index("ended")
    assert "step time" in text
    assert "recorded 1 rank" in text


def test_live_without_a_terminal_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [*CHOPPER, "record", "-o", tmp_path / "run", "--live", "--", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--live needs a terminal" in done.stderr


def test_what_is_said_while_it_runs_is_what_the_analysis_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "CHOPPER_OUTPUT", "CHOPPER_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)
    task, watch = Task(), Watch(tmp_path / "run", attribute=True)
    with chopper.profile(tmp_path / "run", collect=TRACE_ONLY, steps=(1, 4)):
        for _ in range(8):
            task.step()
        watch.poll()
        assert watch.verdict
    watch.poll()
    assert watch.verdict == verdict_of(pipeline.attribute(tmp_path / "run")).sentence
    watch._live.close()
