"""``chopper selftest``: each path to a device, proved on the machine at hand."""

from __future__ import annotations

import getpass
import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any

import click

from chopper.cli import _shared as shared
from chopper.cli.doctor_ import examine
from chopper.errors import UsageError, say

_DEFAULT = Path("selftest.json")
_PACKAGES = ("torch", "triton", "nvidia-ml-py", "amdsmi")
_OURS = frozenset(("path", "title", "expected", "status", "schema"))
"""Values that nobody else wrote: a user may be called as a check is."""
_PATH = re.compile(r"(?<![\w/.~>:])/[^\s:'\",;()]*")
_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/", "/lib/", "/lib64/", "/opt/rocm")
"""Absolute paths below these are the same on all machines."""


@click.command("selftest", cls=shared.Command)
@click.option(
    "--only",
    metavar="A,B",
    help="Only these checks, by the names that the result gives them.",
)
@click.option(
    "--seconds",
    type=click.IntRange(min=1),
    default=180,
    show_default=True,
    metavar="N",
    help="Time for all checks; what is left then is not possible here.",
)
@click.option(
    "--set-clocks",
    is_flag=True,
    help="Check clock setting too: sets two clocks, and brings back what was before.",
)
@shared.as_json
@shared.report_output("File to write", " [default: selftest.json]")
def command(
    only: str | None,
    seconds: int,
    set_clocks: bool,
    as_json: bool,
    output: Path | None,
    force: bool,
) -> None:
    """Prove on this machine what Chopper does with its devices.

    Trains, multiplies and calibrates for up to three minutes, and holds what was recorded against
    what must hold: sums that close, kernels after their launches, clocks within the device's range,
    energy counters against power, zeros that draw less power than random numbers. What this machine
    lacks is named.

    The file holds versions, devices and each result, and neither host name nor user nor paths:
    attach it to an issue. Nothing else is kept. The exit code is 1 if a check failed.

    \b
    Examples:
      chopper selftest
      chopper selftest --only nvml_sampling,energy -o nvml.json
      sudo chopper selftest --only clock_setting --set-clocks
    """
    from chopper.cli.output import progress
    from chopper.experiments.selftest import Machine, run_checks
    from chopper.fresh_python import ended_by_signals
    from chopper.reports.selftest import page
    from chopper.storage.caches import scratch

    path = output or _DEFAULT
    shared.check_report(path, force=force)
    chosen = _chosen(only)
    started_s = time.monotonic()
    with progress("probing this machine"):
        found = examine()
    with ended_by_signals(), scratch("selftest") as folder:
        machine = Machine(
            found["devices"],
            {collector["name"]: collector for collector in found["collectors"]},
            folder,
            seconds=seconds - (time.monotonic() - started_s),
            set_clocks=set_clocks,
            say=say,
        )
        results = []
        for result in run_checks(machine, chosen):
            results.append(result)
            say(f"{result.status}: {result.title}")
    document = anonymous(_document(found, results, time.monotonic() - started_s), str(folder))
    shared.present(lambda: page(document), lambda: document, as_json=as_json, output=path)
    if any(result.status == "failed" for result in results):
        sys.exit(1)


def _chosen(only: str | None) -> list[str]:
    """Return the paths to check, in the order of their declaration.

    Raises:
        UsageError: one is not known, or none is named.
    """
    from chopper.experiments.selftest import PATHS
    from chopper.quantities import one_of

    if only is None:
        return [*PATHS]
    named = {one_of("check", word, PATHS) for word in only.split(",") if word.strip()}
    if not named:
        raise UsageError(f"--only {only!r}: none named; expected of {', '.join(PATHS)}")
    return [name for name in PATHS if name in named]


def _document(found: dict[str, Any], results: list[Any], seconds: float) -> dict[str, Any]:
    """Return the documented form: what was found by whom, of which versions."""
    from importlib.metadata import PackageNotFoundError, version

    import msgspec

    from chopper.experiments.selftest import SCHEMA
    from chopper.hardware.environment import environment

    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    known = environment()
    machine = found["environment"]
    return {
        "schema": SCHEMA,
        "versions": {name: machine[name] for name in ("chopper", "python")}
        | {name: installed(name) for name in _PACKAGES}
        | {name: known.get(name) for name in ("cuda", "hip", "nccl", "driver")},
        "system": machine["system"],
        "cpu": known.get("cpu"),
        "cores_count": machine["usable_cores_count"],
        "memory_bytes": machine["memory_bytes"],
        "devices": found["devices"],
        "collectors": [
            {
                key: c[key]
                for key in ("name", "available", "reason", "call_costs_ns", "driver_calls")
            }
            for c in found["collectors"]
        ],
        "permissions": found["permissions"],
        "seconds": round(seconds, 1),
        "results": msgspec.to_builtins(results),
    }


def anonymous(document: Any, folder: str) -> Any:
    """Return a document without names of host and user, and without their directories."""
    names = {
        folder: "<folder>",
        str(Path.cwd()): "<here>",
        sys.prefix: "<python>",
        str(Path.home()): "~",
    }
    host = socket.gethostname()
    words = dict.fromkeys((host, host.partition(".")[0]), "<host>")
    for user in (os.environ.get("USER"), _user()):
        if user and user != "root":
            words[user] = "<user>"
    return _replaced(document, {k: v for k, v in names.items() if k not in ("/", "")}, words)


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return None


def _replaced(value: Any, names: dict[str, str], words: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {
            key: one if key in _OURS else _replaced(one, names, words) for key, one in value.items()
        }
    if isinstance(value, list):
        return [_replaced(one, names, words) for one in value]
    if isinstance(value, str):
        for name, stands in names.items():
            value = value.replace(name, stands)
        value = _PATH.sub(_without_folder, value)
        for word, stands in words.items():
            value = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", stands, value)
    return value


def _without_folder(path: re.Match[str]) -> str:
    """Return an absolute path without its directory, unless that is the system's."""
    folder, _, name = path[0].rpartition("/")
    return path[0] if not folder or path[0].startswith(_SYSTEM) else f"<folder>/{name}"
