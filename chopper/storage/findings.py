"""What checks found, in the words of ``checks.toml``: the one place that makes a ``Finding``."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from chopper import wording as fmt
from chopper.storage.manifest import Finding, Severity


class Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A check of a run: its finding, and the claims that it can withhold.

    ``cases`` are the messages of other situations, by name. ``damage`` continues "The trace …" in
    the first line of a report; empty where it does not limit what the verdict is about.
    """

    title: str
    doc: str
    severity: Severity
    message: str
    cases: dict[str, str] = {}
    withholds: tuple[str, ...] = ()
    damage: str = ""


@cache
def checks() -> dict[str, Check]:
    """Return all checks by their codes."""
    text = Path(__file__).parents[1].joinpath("data", "checks.toml").read_bytes()
    return msgspec.toml.decode(text, type=dict[str, Check])


def finding(
    code: str,
    case: str | None = None,
    *,
    rank: int | None = None,
    count: int | None = None,
    severity: Severity | None = None,
    withholds: bool = True,
    share: float | None = None,
    **values: object,
) -> Finding:
    """Return what a check found, in its own words.

    Args:
        case: one of the check's, which words it differently.
        severity: other than the check's.
        withholds: whether it withholds what it can.
        share: part of the time or of the events that it is about.
        values: of the names in the message. ``{count:kernel}`` is "1 kernel", "2 kernels".
    """
    check = checks()[code]
    message = check.message if case is None else check.cases[case]
    return Finding(
        code=code,
        severity=severity or check.severity,
        message=message.format(
            rank=rank, count=_Count(count or 0), share=fmt.ratio(share), **values
        ),
        rank=rank,
        count=count,
        withholds=check.withholds if withholds else (),
        share_ratio=share,
    )


class _Count(int):
    """A number that is shown with a noun, where its format names one."""

    def __format__(self, noun: str) -> str:
        return fmt.plural(int(self), noun) if noun else str(int(self))
