"""Checks of ``chopper doctor --prove``: record on this machine, compare with what must hold."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from chopper import wording as fmt
from chopper.errors import CaptureError, ChopperError, CollectorUnavailable, say
from chopper.fresh_python import PACKAGE_PARENT, own_python

_LIMIT_S = 180.0
"""Longest time that one recording may take."""
_GRACE_S = 5.0
_PAUSE_NS = 20_000_000
_PAUSED_PROGRAM = f"""
import json, sys, time, torch
sys.path.append(sys.argv[2])
import chopper
on_gpu = torch.accelerator.is_available()
device = torch.accelerator.current_accelerator() if on_gpu else "cpu"
a = torch.ones(4096 if on_gpu else 256, device=device).diag()
def multiply():
    for _ in range(20):
        a @ a
    if on_gpu:
        torch.accelerator.synchronize()
multiply()
paused_ns = []
with chopper.profile(sys.argv[1], collect=["torch_trace"], steps=(2, 32)) as prof:
    for step in range(32):
        multiply()
        start_ns = time.perf_counter_ns()
        while step % 2 and time.perf_counter_ns() < start_ns + {_PAUSE_NS}:
            pass
        paused_ns.append(time.perf_counter_ns() - start_ns)
        multiply()
        prof.step()
print(json.dumps(paused_ns))
"""


@dataclass
class Machine:
    """The devices of this machine and the recordings made on it, which checks share."""

    devices: list[dict[str, Any]]
    folder: Path
    made: dict[str, Path | ChopperError] = field(default_factory=dict)

    def recording(self, name: str) -> Path:
        """Return the path of a recording, which the first call makes."""
        if name not in self.made:
            say(f"recording: {name}")
            try:
                self.made[name] = _record(self._command(name), self.folder / name)
            except ChopperError as exc:
                self.made[name] = exc
        trace = self.made[name]
        if isinstance(trace, ChopperError):
            raise trace
        return trace

    def printed(self, name: str) -> Any:
        """Return the JSON that the command of a recording printed."""
        self.recording(name)
        return msgspec.json.decode(self.folder.joinpath(f"{name}.out").read_bytes())

    def query(self, name: str, sql: str, variant: str = "") -> list[dict[str, Any]]:
        """Return the rows of an SQL statement over a recording."""
        import chopper

        return [*chopper.query(self.recording(name) / variant, sql)]

    def require_gpu(self) -> None:
        """Raise CollectorUnavailable on a machine without an accelerator."""
        if not self.devices:
            raise CollectorUnavailable("torch sees no accelerator")

    def _command(self, name: str) -> list[str]:
        out = str(self.folder / name)
        gpus = len(self.devices)
        size = [] if gpus else ["--batch", "1", "--sequence", "64"]
        if name == "training":
            words = ["bench", "fsdp2", "--ranks", str(min(gpus, 2) or 2), "--steps", "8"]
            return own_python("chopper", *words, "--json", "-o", out, "--", *size)
        if name == "products":
            shape = ["--dtypes", "bfloat16", "--shapes", "8192x8192x8192", "--seconds", "6"]
            words = ["bench", "gemm", "--ranks", "1", "--repeats", "1", "--json", "-o", out]
            return own_python("chopper", *words, "--", *shape)
        if name == "calibration":
            return own_python("chopper", "calibrate", "--quick", "--json", "-o", out)
        return [sys.executable, "-P", "-c", _PAUSED_PROGRAM, out, PACKAGE_PARENT]


def _record(command: list[str], target: Path) -> Path:
    """Run a command that records into a directory; end it and its descendants if it hangs.

    Raises:
        CaptureError: it failed or did not end in time.
    """
    import psutil

    logs = [target.with_name(f"{target.name}.{stream}") for stream in ("err", "out")]
    with logs[0].open("wb") as stderr, logs[1].open("wb") as stdout:
        process = psutil.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
        )
        try:
            code = process.wait(_LIMIT_S)
        except psutil.TimeoutExpired as exc:
            raise CaptureError(
                f"its recording ({target.name}) had not ended after {_LIMIT_S:.0f} s"
            ) from exc
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                started = [process, *process.children(recursive=True)]
                process.terminate()
                for alive in psutil.wait_procs(started, timeout=_GRACE_S)[1]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        alive.kill()
                psutil.wait_procs(started, timeout=_GRACE_S)
    if code:
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()[-1:]]
        raise CaptureError(f"exit code {code}: {next(iter(lines), 'no message')[:300]}")
    return target


_Verdict = tuple[str, bool]
"""A measurement in words, and whether it is as expected."""


def closure(machine: Machine) -> _Verdict:
    """Causes of each step sum to its time exactly; every collective is matched in all ranks."""
    steps = machine.query(
        "training",
        "SELECT any_value(end_ns - start_ns) - coalesce(sum(time_ns), 0) AS off_ns "
        'FROM "window" LEFT JOIN piece USING (rank, step_index) GROUP BY rank, step_index',
    )
    off_ns = max((abs(step["off_ns"]) for step in steps), default=0)
    (collectives,) = machine.query(
        "training",
        "SELECT count(*) AS all_count, count(*) FILTER (WHERE rank_count = "
        '(SELECT count(DISTINCT rank) FROM "window")) AS matched_count FROM collectives',
    )
    matched, count = collectives["matched_count"], collectives["all_count"]
    text = (
        f"{fmt.plural(len(steps), 'step')} of all ranks off by {off_ns} ns at most, "
        f"{matched} of {fmt.plural(count, 'collective')} matched"
    )
    return text, bool(steps) and not off_ns and matched == count


def known_cause(machine: Machine) -> _Verdict:
    """A pause of Python in every second step is found as that cause, within 10 %."""
    paused_ns = machine.printed("pauses")
    steps = machine.query(
        "pauses",
        "SELECT number, coalesce(sum(time_ns) FILTER (WHERE cause = 'idle.preparation.python'), 0)"
        ' AS python_ns FROM "window" LEFT JOIN piece USING (rank, step_index) GROUP BY number',
    )
    injected_ns = statistics.median(paused_ns[1::2])
    # What a pause takes in excess is injected as well.
    excess_ns = [
        statistics.median(
            s["python_ns"] - paused_ns[s["number"]] for s in steps if s["number"] % 2 == odd
        )
        for odd in (0, 1)
    ]
    found_ns = injected_ns + excess_ns[1] - excess_ns[0]
    text = f"injected {fmt.duration(injected_ns)} per step, found {fmt.duration(found_ns)}"
    return text, abs(found_ns / injected_ns - 1) <= 0.1


def launches(machine: Machine) -> _Verdict:
    """At least 99 % of kernels have a launch, and at most 0.1 % begin over 10 µs before it."""
    machine.require_gpu()
    (kernels,) = machine.query(
        "training",
        "SELECT count(*) AS all_count, count(launch_row) AS linked_count, "
        "count(*) FILTER (WHERE e.start_ns < h.start_ns - 10_000) AS early_count "
        "FROM device_event e JOIN event_link l ON e.rank = l.rank AND e.row = l.row "
        "LEFT JOIN host_span h ON h.rank = l.rank AND h.row = l.launch_row "
        "WHERE e.kind = 'kernel'",
    )
    count, linked, early = (kernels[f"{name}_count"] for name in ("all", "linked", "early"))
    text = f"{linked} of {fmt.plural(count, 'kernel')} with a launch, {early} before it"
    return text, count > 0 and linked >= 0.99 * count and early <= 0.001 * count


def samplers(machine: Machine) -> _Verdict:
    """Each sampler reaches 90 % of its rate for at most 5 % of a core, on a clock within 100 µs."""
    from chopper.storage.run import Run

    name = "products" if machine.devices else "training"
    run = Run.open(machine.recording(name) / ("random-1" if machine.devices else ""))
    reports = [
        report
        for report in run.part(run.ranks[0]).collectors
        if report.status == "obtained" and report.requested_hz
    ]
    texts, as_expected = [], bool(reports)
    for report in reports:
        achieved, cost = report.achieved_hz or 0.0, report.cpu_ratio
        error_ns = report.clock_alignment_error_ns
        texts.append(
            f"{report.name}: {achieved:.4g} of {report.requested_hz:g} Hz, "
            f"{fmt.ratio(cost)} of a core, clock within {fmt.duration(error_ns)}"
        )
        as_expected &= achieved >= 0.9 * (report.requested_hz or 0)
        as_expected &= (cost or 0) <= 0.05 and (error_ns or 0) <= 100_000
    return "; ".join(texts) or "no sampler ran", as_expected


def clocks(machine: Machine) -> _Verdict:
    """Sampled clocks are above 0 and at most the device's largest; power at most twice its cap."""
    machine.require_gpu()
    rows = machine.query(
        "products",
        "SELECT device_id, min(sm_clock_hz) / 1e6 AS least_mhz, max(sm_clock_hz) / 1e6 AS most_mhz,"
        " any_value(sm_clock_max_hz) / 1e6 AS limit_mhz, min(power_w) AS least_w, "
        "max(power_w) AS most_w, any_value(power_limit_w) AS limit_w "
        "FROM device_clock LEFT JOIN device_limit USING (rank, device_id) GROUP BY device_id",
        "random-1",
    )
    texts, as_expected = [], True
    for row in rows:
        device, *values = row.values()
        if None in values:
            raise CollectorUnavailable(f"device {device}: clock, power or their limits are unknown")
        least, most, limit, least_w, most_w, limit_w = values
        texts.append(
            f"device {device}: {least:.4g} to {most:.4g} of {limit:.4g} MHz, "
            f"{least_w:.4g} to {most_w:.4g} of {limit_w:.4g} W"
        )
        # A device may overshoot its largest clock by one step.
        as_expected &= least > 0 and most <= 1.02 * limit
        as_expected &= least_w > 0 and most_w <= 2 * limit_w
    if not rows:
        raise CollectorUnavailable("no clock was sampled; see the collectors nvml and amdsmi")
    return "; ".join(texts), as_expected


def energy(machine: Machine) -> _Verdict:
    """Mean power of the energy counter and of the power samples agree within 10 %, over 5 s."""
    machine.require_gpu()
    rows = machine.query(
        "products",
        "WITH counter AS (SELECT device_id, min(time_ns) AS first_ns, max(time_ns) AS last_ns, "
        "  arg_max(energy_j, time_ns) - arg_min(energy_j, time_ns) AS counted_j"
        "  FROM device_counter WHERE energy_j IS NOT NULL GROUP BY device_id), "
        "sample AS (SELECT device_id, time_ns, power_w, lag(time_ns) OVER times AS before_ns, "
        "  lag(power_w) OVER times AS before_w FROM device_clock WHERE power_w IS NOT NULL "
        "  WINDOW times AS (PARTITION BY device_id ORDER BY time_ns)) "
        "SELECT device_id, 1e9 * any_value(counted_j / (last_ns - first_ns)) AS counter_w, "
        "  sum((power_w + before_w) / 2 * (time_ns - before_ns)) / sum(time_ns - before_ns) "
        "  AS sampled_w, any_value(last_ns - first_ns) / 1e9 AS seconds "
        "FROM sample JOIN counter USING (device_id) "
        "WHERE before_ns >= first_ns AND time_ns <= last_ns "
        "GROUP BY device_id HAVING seconds >= 5",
        "random-1",
    )
    if not rows:
        raise CollectorUnavailable("no device has both an energy counter and power for 5 s")
    texts = [
        f"device {row['device_id']}: {row['counter_w']:.4g} W by its counter, "
        f"{row['sampled_w']:.4g} W by samples over {row['seconds']:.1f} s"
        for row in rows
    ]
    return "; ".join(texts), all(0.9 <= row["counter_w"] / row["sampled_w"] <= 1.1 for row in rows)


def data_dependence(machine: Machine) -> _Verdict:
    """Products of zeros draw less power than products of random numbers, at no lower a clock."""
    machine.require_gpu()
    loads = [
        machine.query(
            "products",
            "SELECT avg(power_w) AS power_w, avg(sm_clock_hz) AS clock_hz FROM device_clock c "
            "JOIN program_phase p ON p.rank = c.rank AND p.name = 'measured' "
            "AND c.time_ns BETWEEN p.start_ns AND p.end_ns "
            "WHERE power_w IS NOT NULL AND sm_clock_hz IS NOT NULL "
            "GROUP BY device_id ORDER BY power_w DESC LIMIT 1",
            f"{variant}-1",
        )
        for variant in ("random", "zeros")
    ]
    if not all(loads):
        raise CollectorUnavailable("neither power nor clock was sampled while products ran")
    random, zeros = (load[0] for load in loads)
    text = ", ".join(
        f"{name} {load['power_w']:.4g} W at {load['clock_hz'] / 1e6:.4g} MHz"
        for name, load in (("random", random), ("zeros", zeros))
    )
    # One step of the clock, 15 MHz on recent devices, is the sensor's resolution.
    step_hz = 15e6
    return text, (
        zeros["power_w"] < random["power_w"] and zeros["clock_hz"] >= random["clock_hz"] - step_hz
    )


def ceiling(machine: Machine) -> _Verdict:
    """Bf16 products reach 30 to 105 % of the datasheet's peak."""
    machine.require_gpu()
    peak = machine.devices[0]["bf16_flop_per_s"]
    if peak is None:
        raise CollectorUnavailable("the device is not in the table of peaks")
    rates = machine.printed("calibration")["gemm"].get("bf16", [])
    ratio = max((rate["best_per_s"] for rate in rates), default=0) / peak
    return f"{fmt.ratio(ratio)} of {fmt.flops(peak)}", 0.3 <= ratio <= 1.05


CHECKS: dict[str, Callable[[Machine], _Verdict]] = {
    "Causes sum to the observed time": closure,
    "A known cause is found": known_cause,
    "Kernels follow their launches": launches,
    "Samplers keep their rate and cost little": samplers,
    "Clocks and power are in range": clocks,
    "Energy counters agree with power": energy,
    "Zeros draw less power than random numbers": data_dependence,
    "Calibration reaches the peak": ceiling,
}


class Result(msgspec.Struct, frozen=True):
    """Outcome of one check."""

    check: str
    status: Literal["passed", "failed", "not possible"]
    expected: str
    found: str


def prove(machine: Machine) -> Iterator[Result]:
    """Run every check, whatever the result of the others."""
    for check, function in CHECKS.items():
        status: Literal["passed", "failed", "not possible"] = "failed"
        try:
            text, as_expected = function(machine)
            status = "passed" if as_expected else "failed"
        except CollectorUnavailable as exc:
            status, text = "not possible", str(exc)
        except ChopperError as exc:
            text = str(exc)
        except Exception as exc:  # noqa: BLE001 - other checks must still run
            text = f"the check itself failed: {type(exc).__name__}: {exc}"
        yield Result(check, status, (function.__doc__ or "").strip(), text)
