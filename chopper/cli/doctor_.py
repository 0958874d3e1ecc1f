"""``chopper doctor``: what can be collected on this machine, and what is missing."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from chopper import wording as fmt
from chopper.cli import _shared as shared
from chopper.collectors.base import CollectorContext, call_within
from chopper.errors import InputError
from chopper.reports.page import Item, Items, Mark, Page, Section

SCHEMA = "chopper.doctor/1"


@click.command("doctor")
@shared.as_json
def command(as_json: bool) -> None:
    """Show what can be collected on this machine, and what is missing.

    Each collector is probed: whether it is available, if not why and what would change that, and
    what one sample of it costs. Nothing is recorded. Collectors are per rank: run it where you
    train, inside the container or the job.

    \b
    Examples:
      chopper doctor
      chopper doctor --json | jq '.collectors[] | select(.available | not)'
    """
    from chopper.cli.output import progress

    with progress("probing this machine"):
        found = examine()
    shared.present(lambda: page(found), lambda: found, as_json=as_json)


def examine() -> dict[str, Any]:
    """Return everything that the command shows, as data."""
    return {
        "schema": SCHEMA,
        "environment": _environment(),
        "devices": _devices(),
        "calibrations": _calibrations(),
        "permissions": [
            {"name": name, "value": _setting(Path("/proc", path), key), "means": means}
            for name, path, key, means in _SWITCHES
        ],
        "collectors": _collectors() if sys.platform == "linux" else [],
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
        *("kernel.perf_event_paranoid", "sys/kernel/perf_event_paranoid", None),
        "above 1, hardware counters of the kernel side need CAP_PERFMON",
    ),
    (
        *("kernel.yama.ptrace_scope", "sys/kernel/yama/ptrace_scope", None),
        "above 0, the proportional set size of other processes may be hidden",
    ),
    (
        *("nvidia RmProfilingAdminOnly", "driver/nvidia/params", "RmProfilingAdminOnly"),
        "1: GPU hardware counters are for administrators only",
    ),
)
"""What decides what may be measured: name, file in /proc, key in it, and what it means."""


def _setting(path: Path, key: str | None) -> str | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    if key is None:
        return text
    settings = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return settings.get(key, "").strip() or None


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
"""For a collector's probe and what its readings cost."""


def _probe(name: str, kind: Any, refused: str | None, context: CollectorContext) -> dict[str, Any]:
    from chopper.collectors import registry

    shown: dict[str, Any] = {
        "name": name,
        "scope": getattr(kind, "scope", None),
        "default": name in registry.defaults(),
        "available": False,
        "failed": kind is None,
        "reason": refused,
        "remedy": "repair or remove the package that offers it" if kind is None else None,
        "call_costs_ns": {},
        "driver_calls": {},
    }
    if kind is None:
        return shown
    try:
        shown |= call_within(_ANSWER_S, lambda: _answer(kind(), context))
    except TimeoutError:
        shown["failed"] = True
        shown["reason"] = f"it has not answered for {_ANSWER_S:g} s: a call of its driver hangs"
    except Exception as exc:  # noqa: BLE001 - the others are shown all the same
        shown["failed"] = True
        shown["reason"] = f"its probe failed: {type(exc).__name__}: {exc}"
    return shown


def _answer(collector: Any, context: CollectorContext) -> dict[str, Any]:
    answer = collector.probe(context)
    shown = {"available": answer.ok, "reason": answer.reason, "remedy": answer.remedy}
    if answer.ok and hasattr(collector, "call_costs_ns"):
        shown["call_costs_ns"] = collector.call_costs_ns(context)
    if answer.ok and hasattr(collector, "driver_calls"):
        shown["driver_calls"] = msgspec.to_builtins(collector.driver_calls(context))
    return shown


def page(found: dict[str, Any]) -> Page:
    """Return the page of what was found."""
    environment = found["environment"]
    shown: dict[str, list[Item]] = {"ok": [], "error": [], "unknown": [], "info": []}
    for collector in found["collectors"]:
        item = _collector_item(collector, [device["name"] for device in found["devices"]])
        shown[item.mark].append(item)
    torch = environment["torch"] or "not installed"
    calibrations = found["calibrations"]
    ceilings = [_device_item(device) for device in found["devices"]] or [
        Item("no accelerator; `chopper calibrate` measures the ceiling")
    ]
    ceilings += [Item(stored["source"], "ok") for stored in calibrations["stored"]]
    if calibrations["problem"] is not None:
        ceilings.append(Item(calibrations["problem"], "error"))
    elif not calibrations["stored"]:
        ceilings.append(Item("no calibration of this machine; run: chopper calibrate"))
    permissions = [
        f"{name}: {fmt.UNKNOWN} (not present)" if value is None else f"{name}: {value} ({means})"
        for name, value, means in (switch.values() for switch in found["permissions"])
    ]
    return Page(
        title=f"chopper {environment['chopper']}, Python {environment['python']}, torch {torch}",
        facts=(
            f"{environment['hostname']}: {environment['system']}",
            f"{environment['usable_cores_count'] or fmt.UNKNOWN} of "
            f"{fmt.plural(environment['cores_count'] or 0, 'core')} usable",
            f"{fmt.bytes_(environment['memory_bytes'])} memory",
        ),
        headline=_verdict(found, len(shown["error"])),
        sections=[
            Section(title=title, blocks=(Items(items=items),))
            for title, items in (
                ("Collected here", shown["ok"]),
                ("Needs attention", shown["error"] + shown["unknown"]),
                ("Does not apply to this machine", shown["info"]),
                ("Devices and ceilings", ceilings),
                ("Permissions", permissions),
            )
            if items
        ],
    )


def _verdict(found: dict[str, Any], failed_count: int) -> str:
    """Return whether this machine can record, and what."""
    if sys.platform != "linux":
        return "Reads and analyzes traces; recording needs Linux."
    if found["environment"]["torch"] is None:
        return "Reads and analyzes traces; to record, install torch in this Python."
    devices = [device["name"] for device in found["devices"]]
    on = (
        ", ".join(dict.fromkeys(devices)) if devices else "the CPU; this machine has no accelerator"
    )
    failed = f" {fmt.plural(failed_count, 'collector')} failed, see below." if failed_count else ""
    return f"Ready to record programs on {on}.{failed}"


def _applies(collector: dict[str, Any], devices: list[str]) -> bool:
    """Tell whether a collector that is not available could be, on a machine with these devices."""
    what = (collector["remedy"] or "").partition("none on a machine without ")[2]
    vendor = what.partition(" devices")[0]
    if what and vendor:
        return any(vendor.lower() in device.lower() for device in devices)
    return bool(devices)


def _collector_item(collector: dict[str, Any], devices: list[str]) -> Item:
    mark: Mark = "ok" if collector["available"] else "error"
    if not collector["available"] and not collector["failed"]:
        mark = "unknown" if _applies(collector, devices) else "info"
    state = "available" if collector["available"] else "not available"
    said = [f"{collector['name']}: {state}{'' if collector['default'] else _UNUSED}"]
    if mark == "info":
        return Item(f"{collector['name']}: {collector['reason']}", mark)
    said += filter(None, [collector["reason"]])
    if collector["remedy"]:
        said.append(f"remedy: {collector['remedy']}")
    costs = collector["call_costs_ns"]
    if costs:
        parts = ", ".join(f"{name} {fmt.duration(cost)}" for name, cost in costs.items())
        said.append(f"one sample costs {fmt.duration(sum(costs.values()))}: {parts}")
    if collector["driver_calls"]:
        parts = ", ".join(
            f"{name} {fmt.duration(cost['p50_ns'])} (p99 {fmt.duration(cost['p99_ns'])})"
            for name, cost in collector["driver_calls"].items()
        )
        said.append(f"calls of the driver: {parts}")
    return Item("; ".join(said), mark)


_UNUSED = ", off by default"


def _device_item(device: dict[str, Any]) -> Item:
    peaks = "not in the table of peaks: `chopper calibrate` measures the ceiling"
    if device["peaks"] is not None:
        peaks = f"{device['peaks']}, bf16 peak {fmt.flops(device['bf16_flop_per_s'])}"
    memory = fmt.bytes_(device["memory_bytes"])
    text = f"{device['device']}: {device['name']}, {memory}; {peaks}"
    return Item(text, "" if device["peaks"] is None else "ok")
