"""``chopper doctor``: the data that can be collected on this machine, and the data that cannot."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from chopper import wording as fmt
from chopper.cli import _shared as shared
from chopper.cli.output import progress
from chopper.collectors.base import CollectorContext, call_within
from chopper.errors import CollectorUnavailable, InputError, say
from chopper.reports.page import Item, Items, Mark, Page, Section

SCHEMA = "chopper.doctor/1"


@click.command("doctor")
@click.option(
    "--prove",
    is_flag=True,
    help="Record for some minutes, and check accuracy on this machine.",
)
@shared.as_json
def command(prove: bool, as_json: bool) -> None:
    """Show the data that can be collected on this machine, and the data that cannot.

    Each collector is probed: whether it is available, if not why and what would change that, and
    what one sample of it costs. Nothing is recorded without --prove. Collectors are per rank: run
    it where you train, inside the container or the job.

    With --prove, it trains, multiplies and calibrates for some minutes and checks accuracy on this
    machine: causes that sum to the observed time, a known cause that is found, kernels after their
    launches, samplers' rate and cost, clocks within range, energy counters against power, the
    datasheet's peak. The exit code is 1 if a check failed; attach --json to an issue.

    \b
    Examples:
      chopper doctor
      chopper doctor --prove
      chopper doctor --json | jq '.collectors[] | select(.available | not)'
    """
    with progress("probing this machine"):
        examined = examine()
    if prove:
        examined["proof"] = _prove(examined)
    shared.present(lambda: page(examined), lambda: examined, as_json=as_json)
    if any(result["status"] == "failed" for result in examined["proof"] or ()):
        sys.exit(1)


def _prove(examined: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results of all checks, and say each when it is known."""
    from chopper.cli import _proof
    from chopper.fresh_python import ended_by_signals
    from chopper.storage.caches import scratch

    if sys.platform != "linux":
        raise CollectorUnavailable(f"--prove: recording needs Linux, this is {sys.platform}")
    if examined["environment"]["torch"] is None:
        raise CollectorUnavailable("--prove needs torch, which is not installed; pip install torch")
    results = []
    with ended_by_signals(), scratch("prove") as folder:
        for result in _proof.prove(_proof.Machine(examined["devices"], folder)):
            say(f"{result.status}: {result.check}")
            results.append(msgspec.to_builtins(result))
    return results


def examine() -> dict[str, Any]:
    """Return everything that the command shows, as data."""
    return {
        "schema": SCHEMA,
        "environment": _environment(),
        "devices": _devices(),
        "calibrations": _calibrations(),
        "permissions": [
            {"name": name, "value": _setting(file, name), "means": means}
            for name, means, file in _SWITCHES
        ],
        "collectors": _collectors() if sys.platform == "linux" else [],
        "proof": None,
    }


def _environment() -> dict[str, Any]:
    import platform
    import socket
    from importlib.metadata import PackageNotFoundError, version

    import psutil

    from chopper.version import __version__, build

    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = None
    return {
        "chopper": __version__,
        "build": build(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": torch,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "hostname": socket.gethostname(),
        "cores_count": os.cpu_count(),
        "usable_cores_count": None if usable is None else len(usable),
        "memory_bytes": int(psutil.virtual_memory().total),
    }


def _devices() -> list[dict[str, Any]]:
    """Accelerators that torch sees, and whether their peaks are known."""
    try:
        import torch
    except ImportError:
        return []
    if not torch.accelerator.is_available():
        return []
    from chopper.hardware.devices import lookup

    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    module = torch.get_device_module(kind)
    devices = []
    for index in range(torch.accelerator.device_count()):
        properties = module.get_device_properties(index)
        memory_bytes = getattr(properties, "total_memory", None)
        units = getattr(properties, "multi_processor_count", None)
        peaks = lookup(properties.name, multi_processor_count=units, memory_bytes=memory_bytes)
        devices.append(
            {
                "device": f"{kind.type}:{index}",
                "name": properties.name,
                "memory_bytes": memory_bytes,
                "multi_processor_count": units,
                "peaks": None if peaks is None else peaks.label,
                "bf16_flop_per_s": None if peaks is None else peaks.flop_per_s("bf16"),
            }
        )
    return devices


def _calibrations() -> dict[str, Any]:
    import socket

    from chopper.hardware import calibration

    problem, stored = None, []
    try:
        stored = calibration.load_all()
    except InputError as exc:
        problem = str(exc)
    here = socket.gethostname()
    return {
        "file": str(calibration.default_path()),
        "problem": problem,
        "stored": [
            {"device": c.device_name}
            | {name: getattr(c, name) for name in ("ranks", "threads", "kind", "source")}
            for c in stored
            if c.hostname == here
        ],
    }


_SWITCHES = (
    (
        "kernel.perf_event_paranoid",
        "above 1, hardware counters of the kernel side need CAP_PERFMON",
        "sys/kernel/perf_event_paranoid",
    ),
    (
        "nvidia RmProfilingAdminOnly",
        "1: GPU hardware counters are for administrators only",
        "driver/nvidia/params",
    ),
)
"""Settings that decide what may be measured: name, meaning, file in /proc."""


def _setting(file: str, name: str) -> str | None:
    """Return a file's value, or the one of this name where the file has a line for each."""
    try:
        text = Path("/proc", file).read_text(encoding="utf-8").strip()
    except OSError:
        return None
    settings = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return settings.get(name.split()[-1], "").strip() or None if settings else text


def _collectors() -> list[dict[str, Any]]:
    """Probe every collector there is, in a run of its own that is thrown away."""
    import socket

    from chopper.collectors import registry
    from chopper.collectors.base import CollectorContext
    from chopper.storage.caches import scratch
    from chopper.storage.parts import RunWriter

    classes, refused = registry.load_all()
    hostname = socket.gethostname()
    with scratch("doctor") as folder:
        writer = RunWriter(folder, 0)
        writer.manifest.hostname = hostname
        writer.save()
        context = CollectorContext(
            directory=writer.directory, run_path=folder, pid=os.getpid(), hostname=hostname
        )
        return [
            _probe(name, classes.get(name), refused.get(name), context) for name in registry.names()
        ]


_ANSWER_S = 20.0
"""Longest time for a collector's probe and the cost of its readings."""


def _probe(
    name: str, kind: Any, import_error: str | None, context: CollectorContext
) -> dict[str, Any]:
    """Return whether a collector is available, and what its samples and driver calls cost."""
    from chopper.collectors import registry

    report: dict[str, Any] = {
        "name": name,
        "scope": getattr(kind, "scope", None),
        "default": name in registry.defaults(),
        "available": False,
        "failed": kind is None,
        "reason": import_error,
        "remedy": "repair or remove the package that offers it" if kind is None else None,
        "call_costs_ns": {},
        "driver_calls": {},
    }

    def answer() -> dict[str, Any]:
        collector = kind()
        probe = collector.probe(context)
        answers = {"available": probe.ok, "reason": probe.reason, "remedy": probe.remedy}
        for measure in ("call_costs_ns", "driver_calls"):
            if probe.ok and hasattr(collector, measure):
                answers[measure] = msgspec.to_builtins(getattr(collector, measure)(context))
        return answers

    if kind is None:
        return report
    try:
        return report | call_within(_ANSWER_S, answer)
    except TimeoutError:
        reason = f"it has not answered for {_ANSWER_S:g} s: a call of its driver hangs"
    except Exception as exc:  # noqa: BLE001 - the others are shown all the same
        reason = f"its probe failed: {type(exc).__name__}: {exc}"
    return report | {"failed": True, "reason": reason}


_STATUSES: dict[str, tuple[str, Mark]] = {
    "failed": ("Failed", "error"),
    "passed": ("Passed", "ok"),
    "not possible": ("Not possible here", "info"),
}


def page(examined: dict[str, Any]) -> Page:
    """Return the page of :func:`examine`'s result: of the checks alone, if there are any."""
    environment, results = examined["environment"], examined["proof"]
    names = [device["name"] for device in examined["devices"]]
    collectors = [_collector_item(collector, names) for collector in examined["collectors"]]
    sections: list[tuple[str, Sequence[Item | str]]]
    if results is None:
        headline = _verdict(examined, [item.mark for item in collectors].count("error"))
        settings = ((one["name"], one["value"], one["means"]) for one in examined["permissions"])
        sections = [
            ("Devices and ceilings", _ceilings(examined)),
            ("Collected here", [item for item in collectors if item.mark == "ok"]),
            ("Needs attention", [i for i in collectors if i.mark in ("error", "unknown")]),
            ("Does not apply to this machine", [i for i in collectors if i.mark == "info"]),
            ("Permissions", [f"{n}: {v} ({means})" for n, v, means in settings if v is not None]),
        ]
    else:
        passed_count = sum(result["status"] == "passed" for result in results)
        headline = f"{passed_count} of {fmt.plural(len(results), 'check')} passed."
        sections = [
            (title, [_result_item(r, mark) for r in results if r["status"] == status])
            for status, (title, mark) in _STATUSES.items()
        ]
    return Page(
        title=f"chopper {environment['chopper']}, Python {environment['python']}, "
        f"torch {environment['torch'] or 'not installed'}",
        facts=(
            f"{environment['hostname']}: {environment['system']}",
            f"{environment['usable_cores_count'] or fmt.UNKNOWN} of "
            f"{fmt.plural(environment['cores_count'] or 0, 'core')} usable",
            f"{fmt.bytes_(environment['memory_bytes'])} memory",
        ),
        headline=headline,
        sections=[Section(title=t, blocks=(Items(items=items),)) for t, items in sections if items],
    )


def _result_item(result: dict[str, Any], mark: Mark) -> Item:
    expected = f"; expected: {result['expected']}" if mark == "error" else ""
    return Item(f"{result['check']}: {result['found']}{expected}", mark)


def _ceilings(examined: dict[str, Any]) -> list[Item]:
    """Return a line for each device and calibration of this machine."""
    items = []
    for device in examined["devices"]:
        peaks = "not in the table of peaks: `chopper calibrate` measures the ceiling"
        if device["peaks"] is not None:
            peaks = f"{device['peaks']}, bf16 peak {fmt.flops(device['bf16_flop_per_s'])}"
        text = f"{device['device']}: {device['name']}, {fmt.bytes_(device['memory_bytes'])}"
        items.append(Item(f"{text}; {peaks}", "" if device["peaks"] is None else "ok"))
    calibrations = examined["calibrations"]
    items += [Item(stored["source"], "ok") for stored in calibrations["stored"]]
    if calibrations["problem"] is not None:
        items.append(Item(calibrations["problem"], "error"))
    elif not calibrations["stored"]:
        device = "" if items else "no accelerator, "
        items.append(Item(f"{device}no calibration of this machine; run: chopper calibrate"))
    return items


def _verdict(examined: dict[str, Any], failed_count: int) -> str:
    """Return whether this machine can record, and what."""
    if sys.platform != "linux":
        return "Reads and analyzes traces; recording needs Linux."
    if examined["environment"]["torch"] is None:
        return "Reads and analyzes traces; to record, install torch in this Python."
    devices = [device["name"] for device in examined["devices"]]
    on = (
        ", ".join(dict.fromkeys(devices)) if devices else "the CPU; this machine has no accelerator"
    )
    failed = f" {fmt.plural(failed_count, 'collector')} failed, see below." if failed_count else ""
    return f"Ready to record programs on {on}.{failed}"


def _collector_item(collector: dict[str, Any], devices: list[str]) -> Item:
    """Return a line that says whether a collector is available, why not, and the remedy."""
    name, reason, remedy = collector["name"], collector["reason"], collector["remedy"]
    if not collector["available"] and not collector["failed"] and not _applies(remedy, devices):
        return Item(f"{name}: {reason}", "info")
    mark: Mark = "error" if collector["failed"] else "unknown"
    if collector["available"]:
        mark = "ok"
    state = f"{'' if collector['available'] else 'not '}available"
    parts = [f"{name}: {state}{'' if collector['default'] else ', off by default'}"]
    parts += [reason] if reason else []
    parts += [f"remedy: {remedy}"] if remedy else []
    if costs := collector["call_costs_ns"]:
        parts.append(f"one sample costs {fmt.duration(sum(costs.values()))}")
    return Item("; ".join(parts), mark)


def _applies(remedy: str | None, devices: list[str]) -> bool:
    """Return whether a collector could be available on a machine with these devices."""
    what = (remedy or "").partition("none on a machine without ")[2]
    vendor = what.partition(" devices")[0]
    if what and vendor:
        return any(vendor.lower() in device.lower() for device in devices)
    return bool(devices)
