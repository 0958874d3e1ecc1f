"""Clock limits of the host's cores: Linux' cpufreq."""

from __future__ import annotations

from pathlib import Path

from chopper.collectors.knobs import Knob, What, refused
from chopper.errors import CollectorUnavailable

_POLICIES = "devices/system/cpu/cpufreq"


def knobs(what: What, root: str) -> list[Knob]:  # noqa: ARG001 - as every vendor's
    """Return the clock of each cpufreq policy, a policy being the cores that share a clock."""
    folder = Path(root) / _POLICIES
    policies = sorted(folder.glob("policy[0-9]*"), key=lambda path: int(path.name[6:]))
    if not policies:
        raise CollectorUnavailable(
            f"{folder}: no cpufreq policy; this kernel, or the virtual machine's host, does not "
            "let clocks be set"
        )
    return [_knob(policy) for policy in policies]


def _knob(policy: Path) -> Knob:
    least_khz, most_khz = (_number(policy / f"cpuinfo_{end}_freq") for end in ("min", "max"))
    return Knob(
        vendor="cpufreq",
        what="clock",
        target=str(policy),
        label=f"{policy.name}, core clock",
        unit="Hz",
        scale=1e3,
        allowed=(least_khz, most_khz),
        continuous=True,
        before={f"{end}_khz": _number(policy / f"scaling_{end}_freq") for end in ("min", "max")},
    )


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it holds no number"
        raise CollectorUnavailable(f"{file}: cannot be read ({reason})") from exc


def put(knob: Knob, number: int) -> None:
    """Limit the clock of a policy to one frequency from both sides."""
    _limit(knob, number, number)


def undo(knob: Knob) -> None:
    """Restore the previous limits."""
    _limit(knob, knob.before["min_khz"], knob.before["max_khz"])


def _limit(knob: Knob, least_khz: int, most_khz: int) -> None:
    """Write both limits; the lower one first out of the way, so that they never cross."""
    policy = Path(knob.target)
    for end, khz in (("min", knob.allowed[0]), ("max", most_khz), ("min", least_khz)):
        try:
            (policy / f"scaling_{end}_freq").write_text(str(khz))
        except OSError as exc:
            permission = isinstance(exc, PermissionError)
            raise refused(knob, exc.strerror or str(exc), permission=permission) from exc
