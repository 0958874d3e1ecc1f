"""One check of each path to a device, on the machine at hand: what ``chopper selftest`` runs.

``chopper/data/device_paths.toml`` declares the paths; a function of each path's name holds what was
recorded against what must hold. Recordings are made by chopper's own commands, each in a process
of its own with an end; paths share them. A check returns what it found, or raises Missed or
NotPossible.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import pyarrow.compute as pc

from chopper import wording as fmt
from chopper.errors import ChopperError
from chopper.fresh_python import own_python

if TYPE_CHECKING:
    import pyarrow as pa

    from chopper.analyzers.attributed import Attributed
    from chopper.storage.manifest import CollectorReport
    from chopper.storage.run import Run

SCHEMA = "chopper.experiments.selftest/1"
Needs = Literal["nvidia", "amd", "telemetry", "gpu", "gpus"]


class DevicePath(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way in which chopper reaches a device."""

    title: str
    expects: str
    """What must hold on a device."""
    today: str
    """What proves it without a device."""
    proofs: tuple[str, ...]
    """Tests that do."""
    needs: tuple[Needs, ...] = ()


PATHS = msgspec.toml.decode(
    files("chopper").joinpath("data", "device_paths.toml").read_bytes(), type=dict[str, DevicePath]
)


class Result(msgspec.Struct, frozen=True):
    """Outcome of one path's check."""

    path: str
    title: str
    status: Literal["passed", "failed", "not possible"]
    expected: str
    found: str | None
    reason: str | None
    """Why it is not possible here."""
    seconds: float


class Missed(Exception):
    """A finding that contradicts what must hold."""


class NotPossible(Exception):
    """Why a path cannot be checked on this machine."""


_OUT = "OUT"
_EXPERIMENT = f"--repeats 1 --json -o {_OUT}"
_RECORDINGS = {
    "training": "chopper bench fsdp2 --ranks {ranks} --steps 8 --json -o {out} -- {size}",
    "products": f"chopper bench gemm --ranks 1 {_EXPERIMENT} -- --seconds 6 {{product}}",
    "ceilings": "chopper calibrate --quick --json -o {out}",
    "symmetric": "chopper bench overlap --ranks 2 --variants sequential,symmetric,triton "
    f"{_EXPERIMENT}",
    "flags": f"chopper bench overlap --ranks 1 --variants sequential,triton {_EXPERIMENT}",
    "unified": f"chopper bench offload --ranks 1 --variants ddp,unified {_EXPERIMENT}",
    "clocks": f"chopper sweep clock --points 2 --apply {_EXPERIMENT} -- LOAD",
    "nsys": "nsys profile --trace=cuda,nvtx --export=sqlite -o {out} PRODUCTS",
    "rocprofv3": "rocprofv3 --sys-trace --output-format rocpd -d {out} -- PRODUCTS",
    "ncu": "ncu --csv --page raw --metrics gpu__time_duration.sum --launch-skip 5 --launch-count 1 "
    "PRODUCTS",
}
"""What is recorded, by which command; PRODUCTS and LOAD are the programs below."""
_SHARE = 0.4
"""Most of the time that one recording may take."""
_GRACE_S = 5.0
_COUNT = 40
_PRODUCTS = f"""
import torch
a = torch.ones(2048, 2048, device="cuda", dtype=torch.bfloat16)
for _ in range({_COUNT}):
    b = a @ a
torch.cuda.synchronize()
"""
_LOAD = """
import time, torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
end = time.monotonic() + 4
while time.monotonic() < end:
    b = a @ a
    torch.cuda.synchronize()
"""


class Machine:
    """The machine at hand, and what was recorded on it.

    Args:
        devices: accelerators that torch sees, as ``chopper doctor`` lists them.
        collectors: name → what ``chopper doctor`` found of it.
        folder: for recordings.
        seconds: for all of it.
        set_clocks: clocks may be set, and set back.
        say: tells the user what is under way.
    """

    def __init__(
        self,
        devices: Sequence[Mapping[str, Any]],
        collectors: Mapping[str, Mapping[str, Any]],
        folder: Path,
        *,
        seconds: float,
        set_clocks: bool = False,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.devices = devices
        self.collectors = collectors
        self.set_clocks = set_clocks
        self._folder, self._say = folder, say
        self._end_s, self._longest_s = time.monotonic() + seconds, _SHARE * seconds
        self._made: dict[str, Path | Exception] = {}
        self._attributed: Attributed | None = None

    def lacks(self, needs: Sequence[Needs]) -> str | None:
        """Return why something that a path needs is not here, or None."""
        nvidia, amd = (self.without(name) for name in ("nvml", "amdsmi"))
        none = None if self.devices else "torch sees no accelerator"
        few = None if len(self.devices) > 1 else "torch sees one accelerator, two are needed"
        reasons: dict[Needs, str | None] = {
            "nvidia": nvidia,
            "amd": amd,
            "telemetry": nvidia and amd and f"{nvidia}; {amd}",
            "gpu": none,
            "gpus": none or few,
        }
        return next((why for need in needs if (why := reasons[need])), None)

    def without(self, collector: str) -> str | None:
        """Return why a collector is not available, or None."""
        found = self.collectors.get(collector, {"available": False, "reason": "not installed"})
        return None if found["available"] else f"{collector}: {found['reason']}"

    def recording(self, name: str) -> Path:
        """Return the path of a recording, which is made at the first call."""
        if name not in self._made:
            try:
                self._made[name] = self._record(name)
            except (Missed, NotPossible) as exc:
                self._made[name] = exc
        made = self._made[name]
        if isinstance(made, Exception):
            raise made
        return made

    def document(self, name: str) -> dict[str, Any]:
        """Return what a command printed as JSON."""
        self.recording(name)
        found: dict[str, Any] = msgspec.json.decode((self._folder / f"{name}.out").read_bytes())
        return found

    def run(self, name: str, variant: str = "random") -> Run:
        """Return a recorded run with its telemetry; of products, that of a variant."""
        from chopper.storage.run import Run

        path = self.recording(name)
        return Run.open(path / f"{variant}-1" if name == "products" else path)

    def attributed(self) -> Attributed:
        """Return the attribution of the training run."""
        if self._attributed is None:
            self._attributed = imported(self.recording("training"))
        return self._attributed

    def _record(self, name: str) -> Path:
        target = self._folder / name
        command = _command(self, name, target)
        if shutil.which(command[0]) is None:
            raise NotPossible(f"{command[0]} is not installed")
        if importlib.util.find_spec("torch") is None:
            raise NotPossible(
                "PyTorch is not installed: pip install 'chopper-profiler[torch]', then check again"
            )
        left_s = self._end_s - time.monotonic()
        if left_s < 1:
            raise NotPossible("the time for all checks was over before this one")
        self._say(f"recording: {name}")
        out, errors = self._folder / f"{name}.out", self._folder / f"{name}.err"
        limit_s = min(left_s, self._longest_s)
        code = run_within(command, out, errors, limit_s)
        if code is None:
            why = f"its recording ({name}) had not ended after {limit_s:.0f} s"
            if limit_s < self._longest_s:
                raise NotPossible(f"{why}, when the time for all checks was over")
            raise Missed(why)
        if code:
            last = last_line(errors, out)
            refused = "permission" in last.lower() or "ERR_NVGPUCTRPERM" in last
            raise (NotPossible if refused else Missed)(f"exit code {code}: {last}")
        return target


def _command(machine: Machine, name: str, target: Path) -> list[str]:
    """Return the command that makes a recording."""
    on_gpu = bool(machine.devices)
    filled = _RECORDINGS[name].format(
        out=_OUT,
        ranks=min(len(machine.devices), 2) or 2,
        size="" if on_gpu else "--batch 1 --sequence 64",
        product="--dtypes bfloat16 --shapes 8192x8192x8192"
        if on_gpu
        else "--dtypes float32 --shapes 1024x1024x1024",
    )
    # A path may hold blanks.
    words = [str(target) if word == _OUT else word for word in filled.split()]
    programs = {"PRODUCTS": _PRODUCTS, "LOAD": _LOAD}
    if words[-1] in programs:
        words[-1:] = [sys.executable, "-P", "-c", programs[words[-1]]]
    return own_python(*words) if words[0] == "chopper" else words


def run_within(command: list[str], out: Path, errors: Path, limit_s: float) -> int | None:
    """Run a command to its end and return its exit code; None where it did not end in time.

    Whatever it started is ended with it, also when this process is interrupted; but not the process
    that brings back clocks, which then has work to do.
    """
    import psutil

    with out.open("wb") as stdout, errors.open("wb") as stderr:
        process = psutil.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            code: int = process.wait(limit_s)
            return code
        except psutil.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                started = [
                    one
                    for one in (process, *process.children(recursive=True))
                    if not _brings_back(one)
                ]
                process.send_signal(signal.SIGTERM)
                _, alive = psutil.wait_procs(started, timeout=_GRACE_S)
                for one in alive:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
                psutil.wait_procs(alive, timeout=_GRACE_S)


def _brings_back(process: Any) -> bool:
    """Tell whether a process is the one that brings back clocks."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return "chopper.experiments.guardian" in process.cmdline()
    return False


def run_checks(machine: Machine, paths: Sequence[str]) -> Iterator[Result]:
    """Check each path, whatever became of the others."""
    for name in paths:
        path, started_s = PATHS[name], time.monotonic()
        found = reason = None
        status: Literal["passed", "failed", "not possible"] = "failed"
        try:
            lacking = machine.lacks(path.needs)
            if lacking is not None:
                raise NotPossible(lacking)
            found = CHECKS[name](machine)
            status = "passed"
        except NotPossible as exc:
            status, reason = "not possible", str(exc)
        except (Missed, ChopperError) as exc:
            found = str(exc)
        except Exception as exc:  # noqa: BLE001 - the others are checked all the same
            found = f"the check itself failed: {type(exc).__name__}: {exc}"
        took_s = round(time.monotonic() - started_s, 1)
        yield Result(name, path.title, status, path.expects, found, reason, took_s)


def judged(found: str, holds: bool) -> str:
    """Return what was found where it holds; raise it as Missed where it does not."""
    if not holds:
        raise Missed(found)
    return found


def imported(path: Path) -> Attributed:
    """Return the attribution of a run or a recording of another tool."""
    from chopper import pipeline

    return pipeline.attribute(pipeline.read(path))


# ------------------------------------------------------------------ on any machine


def _report(run: Run, collector: str) -> CollectorReport:
    """Return what a collector of a run's first rank reported."""
    reports = {report.name: report for report in run.part(run.ranks[0]).collectors}
    if collector not in reports:
        raise Missed(f"{collector} is not among the run's collectors")
    found = reports[collector]
    if found.status != "obtained":
        raise Missed(f"{collector} was {found.status}: {found.reason}")
    return found


def host(machine: Machine) -> str:
    """Check that the host's sampler told of the machine."""
    run = machine.run("training")
    report = _report(run, "host")
    rows = run.rows_count(run.ranks[0], "host")
    found = f"{rows} rows, {_rate(report)}"
    return judged(found, rows > 0)


def _rate(report: CollectorReport) -> str:
    achieved, requested = (
        fmt.UNKNOWN if hz is None else f"{hz:.4g}"
        for hz in (report.achieved_hz, report.requested_hz)
    )
    dropped, samples = (
        fmt.UNKNOWN if n is None else n for n in (report.dropped_count, report.samples_count)
    )
    return f"{achieved} of {requested} Hz, {dropped} of {samples} samples dropped"


def closure(found: Attributed) -> str:
    """Check that the causes of each window of each rank sum to it exactly; say how many."""
    keys, windows = ["rank", "step_index"], found.windows
    pieces = (
        found.pieces.group_by(keys).aggregate([("time_ns", "sum")]).select([*keys, "time_ns_sum"])
    )
    sums = {(rank, step): ns for rank, step, ns in zip(*pieces.to_pydict().values(), strict=True)}
    bounds = windows.select([*keys, "start_ns", "end_ns"]).to_pydict().values()
    off = [
        f"step {step} of rank {rank} by {apart} ns"
        for rank, step, start, end in zip(*bounds, strict=True)
        if (apart := sums.get((rank, step), 0) - (end - start))
    ]
    if off or not windows.num_rows:
        raise Missed(f"off: {', '.join(off[:3])}" if off else "no step was attributed")
    ranks = fmt.plural(len({*windows["rank"].to_pylist()}), "rank")
    return f"{fmt.plural(windows.num_rows, 'window')} of {ranks} closed to the nanosecond"


def attribution(machine: Machine) -> str:
    """Check that a recorded training is attributed without a rest."""
    from chopper.views import view

    run = machine.attributed()
    found = closure(run)
    if len(run.ranks) == 1:
        return f"{found}; one rank has no collectives to match"
    collectives = view(run, "collectives")
    matched = sum(count == len(run.ranks) for count in collectives["rank_count"].to_pylist())
    found += f"; {matched} of {fmt.plural(collectives.num_rows, 'collective')} matched"
    return judged(found, 0 < matched == collectives.num_rows)


def ceilings(machine: Machine) -> str:
    """Hold what `chopper calibrate` achieved against the datasheet."""
    measured = machine.document("ceilings")["gemm"]
    best = {d: max((m["best_per_s"] for m in rates), default=0) for d, rates in measured.items()}
    kind = "bf16" if "bf16" in best else next(iter(best), "bf16")
    rate = best.get(kind, 0)
    peak = machine.devices[0]["bf16_flop_per_s"] if machine.devices and kind == "bf16" else None
    found = f"{kind} {fmt.flops(rate)}"
    if peak is None:
        return judged(f"{found}, no peak known", rate > 0)
    ratio = rate / peak
    return judged(f"{found}, {fmt.ratio(ratio)} of {fmt.flops(peak)}", 0.3 <= ratio <= 1.05)


# ------------------------------------------------------------------ telemetry


def limits(machine: Machine, collector: str) -> str:
    """Check the constants that a vendor's library tells of each device."""
    run = machine.run("products")
    _report(run, collector)
    rows = run.table(run.ranks[0], "device_limit").to_pylist()
    told, wrong = [], []
    for row in rows:
        values = {
            "power limit": (row["power_limit_w"], 10, 3000, " W", 1),
            "largest clock": (row["sm_clock_max_hz"], 3e8, 5e9, " MHz", 1e6),
            "memory": (row["memory_bytes"], 1 << 30, 1 << 40, " GB", 1e9),
        }
        of = f"device {row['device_id']}"
        said = [
            f"{what} {fmt.UNKNOWN if v is None else f'{v / per:.4g}{unit}'}"
            for what, (v, _, _, unit, per) in values.items()
        ]
        told.append(f"{of} ({row['name'] or 'no name'}): {', '.join(said)}")
        wrong += [
            what for what, (v, low, high, *_) in values.items() if not low <= (v or 0) <= high
        ]
    # A part of a device is named after it. Marketing names of AMD differ from torch's.
    names = {row["name"] for row in rows if row["name"]}
    seen = [device["name"] for device in machine.devices]
    if collector == "nvml" and names and seen and not any(s.startswith((*names,)) for s in seen):
        wrong.append(f"names, of which torch sees {', '.join(seen)}")
    if wrong or not rows:
        told.append(f"implausible: {', '.join(wrong)}" if wrong else "no rows")
    return judged("; ".join(told), rows != [] and not wrong)


def sampling(machine: Machine, collector: str) -> str:
    """Check rate, clocks and power that the sampler's thread read under load."""
    run = machine.run("products")
    report = _report(run, collector)
    rank = run.ranks[0]
    clocks = run.table(rank, "device_clock")
    largest = {r["device_id"]: r for r in run.table(rank, "device_limit").to_pylist()}
    told, wrong = [_rate(report)], []
    # It may be lower than asked for, where sensors are renewed less often; none may be missed.
    if (report.dropped_count or 0) > 0.1 * (report.samples_count or 1):
        wrong.append("rate")
    for device in sorted({*clocks["device_id"].to_pylist()}):
        rows, limit = clocks.filter(pc.equal(clocks["device_id"], device)), largest.get(device, {})
        for what, column, most, unit, per in (
            ("clock", "sm_clock_hz", limit.get("sm_clock_max_hz"), "MHz", 1e6),
            ("power", "power_w", 2 * (limit.get("power_limit_w") or 0) or None, "W", 1),
        ):
            values = numbers(rows, column)
            if not len(values):
                wrong.append(f"no {what} of device {device}")
                continue
            least, highest = values.min(), values.max()
            told.append(f"device {device}: {what} {least / per:.4g} to {highest / per:.4g} {unit}")
            # A device may overshoot its largest clock by a step.
            if least <= 0 or (most is not None and highest > 1.02 * most):
                wrong.append(
                    f"{what} of device {device}, which allows {(most or 0) / per:.4g} {unit}"
                )
    if wrong or not clocks.num_rows:
        told.append(f"wrong: {', '.join(wrong)}" if wrong else "no sample")
    return judged("; ".join(told), clocks.num_rows > 0 and not wrong)


def numbers(table: pa.Table, column: str) -> np.ndarray:
    """Return a column's values as doubles, without those that are unknown."""
    values = table[column].drop_null().to_numpy()
    return np.asarray(values, dtype=np.float64)


def gpm(machine: Machine) -> str:
    """Check the ratios of GPM, and that products kept the tensor cores busy."""
    run = machine.run("products")
    report = _report(run, "nvml")
    rows = run.table(run.ranks[0], "device_activity")
    if not rows.num_rows:
        why = next((w for t, w in report.absent.items() if "activity" in t), None)
        raise NotPossible(why or "the driver told nothing of it")
    ratios = {c: numbers(rows, c) for c in rows.column_names if c.endswith("_ratio")}
    outside = [c for c, v in ratios.items() if len(v) and not (v.min() >= 0 and v.max() <= 1)]
    busiest = ratios["tensor_utilization_ratio"].max(initial=0)
    found = f"{rows.num_rows} rows, tensor cores busy up to {fmt.ratio(busiest)}"
    if machine.lacks(["gpu"]):
        busiest = 1.0  # the products ran on the host
    found = "; ".join([found, *(f"{c} outside of 0 to 1" for c in outside)])
    return judged(found, not outside and busiest >= 0.2)


def mig(machine: Machine) -> str:
    """Check that a partitioned device is noted."""
    run = machine.run("products")
    report = _report(run, "nvml")
    rows = run.table(run.ranks[0], "device_limit").to_pylist()
    split = [row["device_id"] for row in rows if row["mig"]]
    if not split:
        raise NotPossible("no device is partitioned")
    if "partitioned" not in (report.reason or ""):
        raise Missed(f"devices {split} are partitioned, and the collector notes nothing")
    return str(report.reason)


def energy(machine: Machine) -> str:
    """Hold each device's energy counter against the integral of its power."""
    from chopper.analyzers.events.meter import meter_of, meter_of_power

    run = machine.run("products")
    rank = run.ranks[0]
    counters, clocks = run.table(rank, "device_counter"), run.table(rank, "device_clock")
    told, wrong = [], False
    for device in sorted({*clocks["device_id"].to_pylist()}):
        counted = meter_of(*_series(counters, device, "energy_j"))
        power = meter_of_power(*_series(clocks, device, "power_w"))
        if counted is None or power is None:
            continue
        start = np.array([max(counted.time_ns[0], power.time_ns[0])])
        end = np.array([min(counted.time_ns[-1], power.time_ns[-1])])
        seconds = float(end[0] - start[0]) / 1e9
        if seconds < 5:
            continue
        by_counter, by_power = (float(m.growth(start, end)[0]) for m in (counted, power))
        ratio = by_counter / by_power if by_power else np.inf
        told.append(
            f"device {device}: {by_counter:.4g} J counted, {by_power:.4g} J integrated over "
            f"{seconds:.1f} s ({ratio:.3f})"
        )
        wrong |= not 0.9 <= ratio <= 1.1
    if not told:
        raise NotPossible("no device told both an energy counter and its power for 5 s")
    return judged("; ".join(told), not wrong)


def _series(table: pa.Table, device: int, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Return times and values of one device, NaN for unknown."""
    rows = table.filter(pc.equal(table["device_id"], device))
    values = rows[column].cast("double").to_numpy()
    return np.asarray(rows["time_ns"].to_numpy()), np.asarray(values, dtype=np.float64)


def data_dependence(machine: Machine) -> str:
    """Hold power and clock of products of zeros against those of random numbers."""
    power, clock = under_load(machine.run("products"))
    of_zeros, clock_of_zeros = under_load(machine.run("products", "zeros"))
    found = (
        f"random {power:.4g} W at {clock / 1e6:.4g} MHz, zeros {of_zeros:.4g} W at "
        f"{clock_of_zeros / 1e6:.4g} MHz"
    )
    # One step of the clock, 15 MHz on recent devices, is the sensor's resolution.
    return judged(found, of_zeros < power and clock_of_zeros >= clock - 15e6)


def under_load(run: Run) -> tuple[float, float]:
    """Return mean power and clock of the device that drew most while products were measured."""
    from chopper.analyzers.trace.samples import in_phase
    from chopper.experiments.declarations import MEASURED

    rank = run.ranks[0]
    clocks = in_phase(run, rank, run.table(rank, "device_clock"), MEASURED)
    means = []
    for device in {*clocks["device_id"].to_pylist()}:
        rows = clocks.filter(pc.equal(clocks["device_id"], device))
        power, clock = numbers(rows, "power_w"), numbers(rows, "sm_clock_hz")
        if len(power) and len(clock):
            means.append((float(power.mean()), float(clock.mean())))
    if not means:
        raise NotPossible("neither power nor clock was sampled while products were measured")
    return max(means)


# ------------------------------------------------------------------ traces, memory, networks

_EARLY_NS = 10_000
"""Clocks of host and device are aligned less well on some systems."""


def device_trace(machine: Machine) -> str:
    """Check that kernels follow their launches and end within the recording."""
    run = machine.attributed()
    told = []
    for rank, joined in run.joined.items():
        if joined.host_only:
            raise Missed(f"rank {rank}: the trace holds no kernel of a device")
        kernels = np.asarray(pc.equal(joined.device_event["kind"].cast("string"), "kernel"))
        start, duration = (
            joined.device_event[c].to_numpy()[kernels] for c in ("start_ns", "dur_ns")
        )
        rows = joined.event_link["launch_row"].filter(kernels)
        known = np.asarray(pc.is_valid(rows))
        launch = joined.inputs.host_span["start_ns"].to_numpy()[rows.drop_null().to_numpy()]
        early = int((start[known] < launch - _EARLY_NS).sum())
        last = run.recording.part(rank).end_ns
        late = 0 if last is None else int((start + duration > last).sum())
        count, linked = len(start), int(known.sum())
        told.append(
            f"rank {rank}: {linked} of {fmt.plural(count, 'kernel')} with a launch, {early} before "
            f"it, {late} after the recording"
        )
        if not count or linked < 0.99 * count or early > 0.001 * count or late:
            raise Missed("; ".join(told))
    return "; ".join(told)


def device_memory(machine: Machine) -> str:
    """Check the allocator's counters of each step."""
    run = machine.run("training")
    told = []
    for rank in run.ranks:
        rows = run.table(rank, "device_memory").to_pylist()
        for row in rows:
            index = row["device_id"]
            size = next(
                (d["memory_bytes"] for d in machine.devices if d["device"].endswith(f":{index}")),
                None,
            )
            held, reserved = row["allocated_bytes"] or 0, row["reserved_bytes"] or 0
            peaks = (row["max_allocated_bytes"] or 0) >= held and (
                row["max_reserved_bytes"] or 0
            ) >= reserved
            if not (0 < held <= reserved <= (size or reserved) and peaks):
                raise Missed(f"rank {rank}, step {row['step']}: {row} on a device of {size} bytes")
        if not rows:
            raise Missed(f"rank {rank}: no step's memory was read")
        peak = max(row["max_allocated_bytes"] for row in rows)
        told.append(f"rank {rank}: {fmt.plural(len(rows), 'step')}, peak {fmt.bytes_(peak)}")
    return "; ".join(told)


def fabric(machine: Machine) -> str:
    """Check that counters of the network's ports were read and never fell."""
    why = machine.without("fabric")
    if why is not None:
        raise NotPossible(why)
    run = machine.run("training")
    _report(run, "fabric")
    rows = run.table(run.ranks[0], "fabric_port").to_pylist()
    last: dict[tuple[Any, Any, str], int] = {}
    for row in sorted(rows, key=lambda row: row["time_ns"]):
        for column, value in row.items():
            key = (row["device"], row["port"], column)
            if column.endswith("_bytes") and value is not None:
                if value < last.get(key, 0):
                    raise Missed(f"{column} of {key[0]}/{key[1]} fell to {value}")
                last[key] = value
    ports = {key[:2] for key in last}
    if not ports:
        raise Missed(f"{fmt.plural(len(rows), 'row')}, none with bytes")
    return f"{fmt.plural(len(ports), 'port')}, {fmt.plural(len(rows), 'row')}, none fell"


def clock_setting(machine: Machine) -> str:
    """Check that devices keep to clocks that were set."""
    if not machine.set_clocks:
        raise NotPossible("it sets clocks, and sets them back: ask for it with --set-clocks")
    points = machine.document("clocks")["points"]
    held = [(p["set_value"], (p["clock_hz"] or {}).get("value")) for p in points]
    found = ", ".join(
        f"set {s / 1e6:.4g}, held {fmt.UNKNOWN if h is None else f'{h / 1e6:.4g}'} MHz"
        for s, h in held
    )
    return judged(found, len(held) > 1 and all(h is not None and h <= 1.02 * s for s, h in held))


# ------------------------------------------------------------------ workloads and tools


def variants(machine: Machine, recording: str, *names: str) -> str:
    """Check that variants of a workload, which checks its values, ran to their end."""
    found = machine.document(recording)
    ran = [v["name"] for v in found["variants"] if v["runs"]]
    missing = [name for name in names if name not in ran]
    if missing:
        raise NotPossible("; ".join(found["notes"]) or f"left out: {', '.join(missing)}")
    return f"ran to their end: {', '.join(ran)}"


def tool(machine: Machine, recording: str, pattern: str) -> str:
    """Check that the recording of another profiler holds all products, and closes."""
    path = machine.recording(recording)
    recorded = (*path.parent.glob(f"{path.name}.*"), *path.rglob("*"))
    chosen = [p for p in recorded if p.match(pattern) and p.is_file()]
    if not chosen:
        raise Missed(f"{recording} wrote no {pattern}")
    run = imported(chosen[0])
    names = pc.value_counts(
        pc.filter(
            (event := run.joined[run.recording.ranks[0]].device_event)["name"].cast("string"),
            pc.equal(event["kind"].cast("string"), "kernel"),
        )
    ).to_pylist()
    most = max(names, key=lambda one: one["counts"], default={"counts": 0, "values": "none"})
    found = f"{most['counts']} of {_COUNT} products ({most['values']}); {closure(run)}"
    return judged(found, most["counts"] == _COUNT)


def counters(machine: Machine) -> str:
    """Check that Nsight Compute's table is read."""
    from chopper.collectors.formats.counters import read_counters

    path = machine.recording("ncu").with_suffix(".out")
    rows = read_counters(path)[0].to_pylist()
    times = [row["value"] for row in rows if row["counter"].startswith("gpu__time_duration")]
    if not times or min(times) <= 0:
        raise Missed(f"{fmt.plural(len(rows), 'row')}, durations {times}")
    return f"{rows[0]['kernel']}: duration {times[0]:g}"


def last_line(*logs: Path) -> str:
    """Return the last line that a command wrote; of the first of these files that has one."""
    for log in logs:
        lines = log.read_text(errors="replace").strip().splitlines()
        if lines:
            return lines[-1].strip()[:300]
    return "it wrote nothing"


CHECKS: dict[str, Callable[[Machine], str]] = {
    "host": host,
    "attribution": attribution,
    "ceilings": ceilings,
    "nvml": lambda m: limits(m, "nvml"),
    "nvml_sampling": lambda m: sampling(m, "nvml"),
    "gpm": gpm,
    "mig": mig,
    "amdsmi": lambda m: limits(m, "amdsmi"),
    "amdsmi_sampling": lambda m: sampling(m, "amdsmi"),
    "energy": energy,
    "data_dependence": data_dependence,
    "cuda_trace": device_trace,
    "rocm_trace": device_trace,
    "device_memory": device_memory,
    "fabric": fabric,
    "clock_setting": clock_setting,
    "symmetric_memory": lambda m: variants(m, "symmetric", "symmetric", "triton"),
    "triton_kernels": lambda m: variants(m, "flags", "triton"),
    "unified_memory": lambda m: variants(m, "unified", "unified"),
    "nsys": lambda m: tool(m, "nsys", "*.sqlite"),
    "rocprofv3": lambda m: tool(m, "rocprofv3", "*.db"),
    "counters": counters,
}
