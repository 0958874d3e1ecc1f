"""Run a client alone and under ``chopper record``, and compare what the two say.

The probe (``probe/site-packages/sitecustomize.py``) watches both runs from inside of the program.
Steps, phases and the wait for data are compared with the probe of the very run that was recorded;
losses, checksums, exit code, memory and time with the run alone.
"""

from __future__ import annotations

import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from chopper import wording as fmt
from tests.clients.expected import PROGRAMS, Client

ROOT = Path(__file__).resolve().parents[2]
PROBE = PROGRAMS.parent / "probe" / "site-packages"
"""Where what is imported is a library's: its functions are no places in the program."""
# What the two may differ by. In parentheses: the most that was measured, on a busy machine.
TYPICAL_END_NS = 300_000
"""Of half of a program's ends of steps (0.12 ms): the clocks are read one after the other."""
STEP_END_TOLERANCE_NS = 1_000_000
MOST_ENDS_OFF = 0.1
"""Share of the ends that may be further off: those between whose readings a core was lost."""
PHASE_TOLERANCE = 0.1
"""Of the traced steps' time: what a phase may differ from the probe's."""
MOST_MISSED, MOST_EXCEEDED = 0.1, 0.02
"""Of the traced steps' time: how much less (3.6 %, steps of 24 ms) or more (0 %) the windows may
hold. The last one ends with the last operator of its step, and the step with the mark after it."""
NAMED_TOLERANCE = 0.05
"""Of the time that the probe measured: what a named phase may differ (3 %, by rounding)."""
CALL_NS = 200_000
"""Of each call: what its begin and its end lie apart from the probe's, as the ends of steps do."""
LEAST_SHARE = 0.005
"""Of the traced steps' time: what counts as having a phase."""
MOST_MEMORY_MB = 512
"""Most that recording may add to the peak of a process (392 MB): a trace of five steps."""
MOST_MEMORY_AT_LIMIT_MB = 1024
"""The same of a program whose trace ends at the default limit (885 MB), which is as large."""
MOST_CPU_S = 10.0
"""CPU time that recording may add for each process that trains (4 s; 9 s at a trace's limit)."""
CPU_NOISE = 0.25
"""Of the program's own CPU time: what it varies between two runs on a busy machine."""
TIMEOUT_S = 600.0

_LOSS = re.compile(r"(?i)loss\S*\s*'?(-?\d+\.\d+(?:e[+-]?\d+)?)")
_PLANTED = re.compile(r'"planted_ratio": (\d\.\d+)')


@dataclass(frozen=True, slots=True)
class Process:
    """One process as the probe saw it."""

    pid: int
    begin: dict[str, Any]
    events: list[dict[str, Any]]

    def step_ends(self, client: Client) -> list[dict[str, Any]]:
        """Return the events that end a step."""
        if client.ends == "backward":
            return [event for event in self.events if event["event"] == "backward"]
        steps = [event for event in self.events if event["event"] == "step"]
        if client.ends == "timed call":
            # The engine gathers the parameters after it stepped the optimizer.
            return [
                event
                for event in self.events
                if event["event"] == "call"
                and any(event["began_ns"] < step["t_ns"] <= event["t_ns"] for step in steps)
            ]
        if client.ends == "round of optimizers":
            following = [event["optimizer"] for event in steps[1:]] + [0]
            return [event for event, after in zip(steps, following, strict=True) if after == 0]
        return steps


@dataclass(frozen=True, slots=True)
class Execution:
    """One run of a program, alone or recorded."""

    exit_code: int
    out: str
    err: str
    wall_s: float
    cpu_s: float
    processes: list[Process]

    @property
    def losses(self) -> list[str]:
        return _LOSS.findall(self.out)

    @property
    def checksums(self) -> Counter[int]:
        """Checksums of the parameters after each step, whichever process took it."""
        return Counter(e["crc"] for p in self.processes for e in p.events if "crc" in e)

    @property
    def planted(self) -> list[float]:
        """Shares of the loop that the processes measured for the cause planted in them."""
        return [float(share) for share in _PLANTED.findall(self.out)]

    @property
    def peak_mb(self) -> float:
        peaks = [e.get("peak_kb", 0) for process in self.processes for e in process.events]
        return max(peaks, default=0) / 1024


@dataclass(frozen=True, slots=True)
class Recorded:
    """One process as chopper recorded it."""

    run: Path
    rank: int
    pid: int | None
    steps: list[dict[str, Any]]
    program_phases: list[dict[str, Any]]


@dataclass(slots=True)
class Verdict:
    """What is shown of a client, column by column, and what is wrong with it.

    Two of the failures' columns have no cell of their own, since a busy machine can cause them:
    ``ends`` (of ``steps``) and ``shares`` (of ``phases``).
    """

    client: Client
    cells: dict[str, str] = field(default_factory=dict)
    failures: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0

    def fail(self, column: str, message: str) -> None:
        self.failures.setdefault(column, []).append(message)

    def expect(self, holds: object, column: str, message: str) -> None:
        if not holds:
            self.fail(column, message)


def judge(client: Client, directory: Path) -> Verdict:
    """Run a client twice below a directory and compare."""
    began_s = time.monotonic()
    verdict = Verdict(client)
    alone = _execute(client, directory / "alone", prefix=())
    run = directory / "run"
    recorded = _execute(
        client,
        directory / "recorded",
        prefix=(sys.executable, "-m", "chopper", "record", "-o", str(run), "--"),
    )
    try:
        _compare_outcomes(verdict, alone, recorded)
        _compare_recording(verdict, recorded, run)
    finally:
        for name, execution in (("alone", alone), ("recorded", recorded)):
            (directory / f"{name}.out").write_text(execution.out, encoding="utf-8")
            (directory / f"{name}.err").write_text(execution.err, encoding="utf-8")
    verdict.seconds = time.monotonic() - began_s
    return verdict


def _execute(client: Client, directory: Path, *, prefix: tuple[str, ...]) -> Execution:
    """Run a program in a directory of its own, watched by the probe."""
    work, seen = directory / "work", directory / "probe"
    work.mkdir(parents=True)
    seen.mkdir()
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("CHOPPER_", "COV"))}
    environment = inherited | {
        "PYTHONPATH": os.pathsep.join((str(PROBE), str(ROOT))),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))),
        "CLIENTS_PROBE": str(seen),
        "CLIENTS_TIMED": ",".join(client.timed),
        "CLIENTS_NO_FORWARD": "" if client.watch_forward else "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        # What DeepSpeed compiles is kept with the environment that it was compiled for.
        "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "torch_extensions"),
    }
    began_s, before_s = time.monotonic(), _children_s()
    done = subprocess.run(
        [*prefix, *client.launcher, str(PROGRAMS / client.program)],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
    )
    wall_s, cpu_s = time.monotonic() - began_s, _children_s() - before_s
    processes = []
    for file in sorted(seen.glob("*.jsonl")):
        begin, *events = [json.loads(line) for line in file.read_text().splitlines()]
        processes.append(Process(int(file.stem), begin, events))
    return Execution(done.returncode, done.stdout, done.stderr, wall_s, cpu_s, processes)


def _children_s() -> float:
    """Return the CPU time of all processes that ended below this one, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _compare_outcomes(verdict: Verdict, alone: Execution, recorded: Execution) -> None:
    """Compare what the program itself did: exit code, losses, memory, time."""
    client = verdict.client
    verdict.cells["exit"] = str(recorded.exit_code)
    verdict.expect(alone.exit_code == 0, "exit", f"alone it exits with {alone.exit_code}")
    verdict.expect(
        recorded.exit_code == alone.exit_code,
        "exit",
        f"recorded it exits with {recorded.exit_code}, alone with {alone.exit_code}",
    )
    if client.same_losses:
        same = sorted(alone.losses) == sorted(recorded.losses)
        same &= alone.checksums == recorded.checksums
        counts = f"{len(recorded.losses)} and {recorded.checksums.total()} checksums"
        verdict.cells["losses"] = f"{counts} equal" if same else f"{counts} differ"
        verdict.expect(same, "losses", "losses or parameters differ from those of the run alone")
    else:
        verdict.cells["losses"] = "not repeatable"
    if client.planted is not None:
        least, most = client.planted
        verdict.cells["planted"] = ", ".join(fmt.percent(p, ".0f") for p in alone.planted) or "none"
        verdict.expect(
            alone.planted and all(least <= share <= most for share in alone.planted),
            "planted",
            f"alone it measures {verdict.cells['planted']}, expected {least} to {most}",
        )
    verdict.cells["memory"] = f"{alone.peak_mb:.0f} → {recorded.peak_mb:.0f} MB"
    most_mb = MOST_MEMORY_AT_LIMIT_MB if client.reaches_limit else MOST_MEMORY_MB
    verdict.expect(recorded.peak_mb - alone.peak_mb <= most_mb, "memory", verdict.cells["memory"])
    verdict.cells["time"] = f"{alone.wall_s:.1f} → {recorded.wall_s:.1f} s"
    # CPU time, since what else runs on the machine weighs on the other.
    most_s = alone.cpu_s * (1 + CPU_NOISE) + MOST_CPU_S * len(client.steps)
    cpu = f"{alone.cpu_s:.1f} → {recorded.cpu_s:.1f} s of CPU time"
    verdict.expect(recorded.cpu_s <= most_s, "time", cpu)


def _compare_recording(verdict: Verdict, execution: Execution, path: Path) -> None:
    """Compare the run directory with the probe."""
    recorded = _read(verdict, path)
    trained = [p for p in execution.processes if p.step_ends(verdict.client)]
    _compare_steps(verdict, trained, recorded)
    _compare_named(verdict, trained, recorded)
    analyses = {}
    for run in sorted({part.run for part in recorded}):
        analyses[run] = _analyze(verdict, run)
    _compare_phases(verdict, trained, recorded, analyses)
    _compare_causes(verdict, analyses)
    _compare_first_sentence(verdict, analyses)


def _read(verdict: Verdict, path: Path) -> list[Recorded]:
    """Read the processes that were recorded, from the files and not through chopper."""
    parts = []
    for file in sorted(path.rglob("step.arrow")):
        if not file.with_name("manifest.json").is_file():
            verdict.fail("steps", f"{file.parent.relative_to(path)} has no manifest")
            continue
        manifest = json.loads((file.parent / "manifest.json").read_text(encoding="utf-8"))
        steps = _rows(file)
        if steps:
            parts.append(
                Recorded(
                    run=file.parent.parent,
                    rank=manifest["rank"],
                    pid=manifest.get("pid"),
                    steps=steps,
                    program_phases=_rows(file.with_name("program_phase.arrow")),
                )
            )
    return parts


def _rows(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    with pa.ipc.open_stream(file.read_bytes()) as reader:
        rows: list[dict[str, Any]] = reader.read_all().to_pylist()
    return rows


def _compare_steps(verdict: Verdict, trained: list[Process], recorded: list[Recorded]) -> None:
    client = verdict.client
    counts = sorted(len(process.step_ends(client)) for process in trained)
    verdict.expect(
        sum(counts) == sum(client.steps) if client.pooled else counts == sorted(client.steps),
        "steps",
        f"the probe saw {counts} steps, expected {sorted(client.steps)}",
    )
    by_pid = {part.pid: part for part in recorded}
    stray = set(by_pid) - {process.pid for process in trained}
    verdict.expect(not stray, "steps", f"recorded steps of {len(stray)} processes without any")
    errors_ns = []
    for process in trained:
        part = by_pid.get(process.pid)
        if part is None:
            verdict.fail("steps", f"a process of {len(process.step_ends(client))} steps is missing")
            continue
        wanted = [event["t_ns"] for event in process.step_ends(client)]
        ends = [step["end_ns"] for step in part.steps]
        if len(ends) != len(wanted):
            verdict.fail("steps", f"recorded {len(ends)} steps, the probe saw {len(wanted)}")
            continue
        errors_ns += [abs(end - want) for end, want in zip(ends, wanted, strict=True)]
    verdict.cells["steps"] = " + ".join(str(len(part.steps)) for part in recorded) or "none"
    if errors_ns:
        # The two clocks are read one after the other: a process may lose its core in between.
        median_ns, worst_ns = statistics.median(errors_ns), max(errors_ns)
        verdict.cells["steps"] += f" (± {median_ns / 1e6:.2f} ms, {worst_ns / 1e6:.1f} at most)"
        off = sum(error > STEP_END_TOLERANCE_NS for error in errors_ns)
        verdict.expect(
            off <= MOST_ENDS_OFF * len(errors_ns), "ends", f"{off} ends are off by over 1 ms"
        )
        verdict.expect(median_ns <= TYPICAL_END_NS, "ends", f"{median_ns / 1e6:.2f} ms off by half")


def _compare_named(verdict: Verdict, trained: list[Process], recorded: list[Recorded]) -> None:
    """Compare the phases that the program names, over the whole run."""
    shown = []
    by_pid = {part.pid: part for part in recorded}
    for name, kind in verdict.client.named.items():
        recorded_ns = probe_ns = calls_count = 0
        for process in trained:
            part = by_pid.get(process.pid)
            if part is None:
                continue
            window = (part.steps[0]["start_ns"], part.steps[-1]["end_ns"])
            recorded_ns += _within(
                window,
                [(r["start_ns"], r["end_ns"]) for r in part.program_phases if r["name"] == name],
            )
            calls = [(e["began_ns"], e["t_ns"]) for e in process.events if e.get("name") == kind]
            probe_ns += _within(window, calls)
            calls_count += len(calls)
        shown.append(f"{name} {recorded_ns / 1e9:.2f} s ({probe_ns / 1e9:.2f})")
        verdict.expect(
            abs(recorded_ns - probe_ns) <= NAMED_TOLERANCE * probe_ns + CALL_NS * calls_count,
            "named",
            f"{name}: {recorded_ns / 1e9:.3f} s, the probe {probe_ns / 1e9:.3f} s",
        )
    if shown:
        verdict.cells["named"] = ", ".join(shown)


def _within(window: tuple[int, int], spans: list[tuple[int, int]]) -> int:
    """Return how much of a window some spans take, which do not overlap."""
    first_ns, last_ns = window
    return sum(max(0, min(end, last_ns) - max(start, first_ns)) for start, end in spans)


def _analyze(verdict: Verdict, run: Path) -> dict[str, Any] | None:
    done = subprocess.run(
        [sys.executable, "-m", "chopper", "analyze", str(run), "--by", "phase", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode != 0 or not done.stdout:
        verdict.fail("phases", f"analyze: {done.stderr.strip() or done.returncode}")
        return None
    analysis: dict[str, Any] = json.loads(done.stdout)
    return analysis


def _traced_sums(
    client: Client, process: Process, part: Recorded
) -> tuple[dict[str, int], int] | None:
    """Sum what the probe saw in the traced steps; also their duration."""
    events = process.step_ends(client)
    if len(events) != len(part.steps):
        return None
    sums: Counter[str] = Counter()
    duration_ns = 0
    for index, step in enumerate(part.steps):
        if step["traced"] and index:
            duration_ns += step["end_ns"] - step["start_ns"]
            after, before = events[index]["sums_ns"], events[index - 1]["sums_ns"]
            sums.update({kind: ns - before.get(kind, 0) for kind, ns in after.items()})
    return dict(sums), duration_ns


def _compare_phases(
    verdict: Verdict,
    trained: list[Process],
    recorded: list[Recorded],
    analyses: dict[Path, dict[str, Any] | None],
) -> None:
    """Compare the time of each phase in traced steps; time outside of all spans may go anywhere."""
    client = verdict.client
    by_pid = {process.pid: process for process in trained}
    phases: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    observed_ns = traced_ns = 0
    comparable = bool(analyses)
    for analysis in analyses.values():
        of_all = (analysis or {}).get("all_kinds", {})
        for group in of_all.get("groups", ()):
            phases[group["phase"]] += group["time_ns"]
        observed_ns += of_all.get("observed_ns", 0)
    for part in recorded:
        process = by_pid.get(part.pid) if part.pid else None
        seen = _traced_sums(client, process, part) if process else None
        comparable &= seen is not None
        if seen is not None:
            sums.update(seen[0])
            traced_ns += seen[1]
    if not observed_ns:
        verdict.fail("phases", "no traced step was attributed")
        return
    shares = {str(name): ns / observed_ns for name, ns in phases.most_common()}
    verdict.cells["phases"] = ", ".join(
        f"{name} {fmt.percent(share, '.0f')}"
        for name, share in shares.items()
        if share >= LEAST_SHARE
    )
    missing = client.phases - set(shares)
    verdict.expect(not missing, "phases", f"missing: {', '.join(sorted(missing))}")
    if not (comparable and traced_ns):
        return
    if sums.get("data", 0) > LEAST_SHARE * traced_ns:
        verdict.expect("data" in shares, "phases", "missing: data")
    if not 1 - MOST_MISSED <= observed_ns / traced_ns <= 1 + MOST_EXCEEDED:
        verdict.fail("shares", f"{observed_ns / 1e6:.0f} ms attributed of {traced_ns / 1e6:.0f}")
    _compare_shares(verdict, shares, {kind: ns / traced_ns for kind, ns in sums.items()})


def _compare_shares(verdict: Verdict, shares: dict[str, float], probe: dict[str, float]) -> None:
    data = probe.get("data", 0.0)
    verdict.cells["data"] = f"{fmt.ratio(shares.get('data', 0.0))} ({fmt.ratio(data)})"
    verdict.expect(
        verdict.client.data_elsewhere or abs(shares.get("data", 0.0) - data) <= PHASE_TOLERANCE / 2,
        "data",
        f"phase data has {fmt.ratio(shares.get('data', 0.0))}, the probe {fmt.ratio(data)}",
    )
    if not verdict.client.spans_apart:
        return
    kinds = ("forward", "backward", "optimizer")
    rest = max(0.0, 1 - sum(probe.get(kind, 0.0) for kind in (*kinds, "data", "inference")))
    for kind in kinds:
        # What a checkpoint recomputes runs within the backward pass.
        names = (kind, "recompute") if kind == "backward" else (kind,)
        share, seen = sum(shares.get(name, 0.0) for name in names), probe.get(kind, 0.0)
        verdict.expect(
            seen - PHASE_TOLERANCE <= share <= seen + rest + PHASE_TOLERANCE,
            "shares",
            f"{kind} has {fmt.ratio(share)}, the probe {fmt.ratio(seen)} "
            f"and {fmt.ratio(rest)} outside of its spans",
        )


def _compare_causes(verdict: Verdict, analyses: dict[Path, dict[str, Any] | None]) -> None:
    """Compare the largest cause; waiting for a core is the busy machine's and does not count."""
    leaves: Counter[str] = Counter()
    labels: dict[str, str] = {}
    for analysis in analyses.values():
        causes = (analysis or {}).get("causes", ())
        parents = {cause["parent"] for cause in causes}
        for cause in causes:
            labels[cause["id"]] = cause["label"]
            if cause["id"] not in parents and not cause["id"].endswith("core_wait"):
                leaves[cause["id"]] += cause["time_ns"]
    if not leaves:
        return
    (largest, largest_ns), *_ = leaves.most_common(1)
    share = largest_ns / sum(leaves.values())
    verdict.cells["cause"] = f"{labels[largest]} {fmt.percent(share, '.0f')}"
    allowed = verdict.client.causes
    verdict.expect(
        not allowed or any(f"{largest}.".startswith(f"{cause}.") for cause in allowed),
        "cause",
        f"{largest} ({fmt.percent(share, '.0f')}), expected {', '.join(sorted(allowed))}",
    )


def _compare_first_sentence(verdict: Verdict, analyses: dict[Path, dict[str, Any] | None]) -> None:
    """Compare what each recording says first: what bounds it, and at which place."""
    client = verdict.client
    for run, analysis in analyses.items():
        first = (analysis or {}).get("verdict") or {}
        sentence = str(first.get("sentence", "none"))
        verdict.cells["verdict"] = sentence
        verdict.expect(
            not client.verdict or first.get("class") in client.verdict,
            "verdict",
            f"{run.name}: {first.get('class')}, expected {', '.join(sorted(client.verdict))}",
        )
        said = json.dumps([first, (analysis or {}).get("actions")], ensure_ascii=False)
        verdict.expect(
            not client.place or any(word in said for word in client.place),
            "verdict",
            f"{run.name}: names none of {', '.join(client.place)}",
        )
