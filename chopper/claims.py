"""Checks of a run, and the claims that they can withhold: null or flagged, as reports say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from chopper import wording as fmt
from chopper.storage.manifest import Finding, Severity


class Claim(msgspec.Struct, frozen=True):
    """Something that an attribution says, and may have to leave unsaid.

    ``effect`` is what stands in its place; ``causes``, with all below them, are those whose
    numbers it is about.
    """

    title: str
    effect: str
    causes: tuple[str, ...] = ()


_DATA = Path(__file__).with_name("data")
CLAIMS = msgspec.toml.decode((_DATA / "claims.toml").read_bytes(), type=dict[str, Claim])


class Check(msgspec.Struct, frozen=True):
    """A check of a run: its finding, and the claims that it can withhold.

    ``damage`` continues "The trace …" in the first line of a report; empty where it does not limit
    what the verdict is about.
    """

    title: str
    doc: str
    withholds: tuple[str, ...] = ()
    severity: Severity = "warning"
    message: str = ""
    damage: str = ""


@cache
def checks() -> dict[str, Check]:
    """Return all checks by their codes."""
    return msgspec.toml.decode((_DATA / "checks.toml").read_bytes(), type=dict[str, Check])


def finding(
    code: str,
    *,
    rank: int | None = None,
    count: int | None = None,
    severity: Severity | None = None,
    withholds: bool = True,
    message: str | None = None,
    share: float | None = None,
    **values: object,
) -> Finding:
    """Return what a check found, in its own words unless a ``message`` is given.

    Args:
        severity: other than the check's.
        withholds: whether it withholds what it can.
        share: part of the time or of the events that it is about.
        values: of the names in the check's message. ``{count:kernel}`` is "1 kernel", "2 kernels".
    """
    check = checks()[code]
    return Finding(
        code=code,
        severity=severity or check.severity,
        message=message
        or check.message.format(count=_Count(count or 0), share=fmt.ratio(share), **values),
        rank=rank,
        count=count,
        withholds=check.withholds if withholds else (),
        share_ratio=share,
    )


class _Count(int):
    """A number that is shown with a noun, where its format names one."""

    def __format__(self, noun: str) -> str:
        return fmt.plural(int(self), noun) if noun else str(int(self))


@dataclass(frozen=True, slots=True)
class Withheld:
    """A claim that is withheld, and why; of all ranks where ``ranks`` is None."""

    id: str
    claim: Claim
    reason: str
    codes: tuple[str, ...]
    ranks: tuple[int, ...] | None


def withheld(findings: Iterable[Finding]) -> list[Withheld]:
    """Return the claims that findings withhold, in the order of ``CLAIMS``; others come last."""
    reasons: dict[str, list[Finding]] = {claim: [] for claim in CLAIMS}
    for finding in findings:
        for name in finding.withholds:
            reasons.setdefault(name, []).append(finding)
    return [
        Withheld(
            id=name,
            claim=CLAIMS.get(name) or Claim(name, "", (name,)),
            reason="; ".join(dict.fromkeys(f.message for f in because)),
            codes=tuple(dict.fromkeys(f.code for f in because)),
            ranks=_ranks([f.rank for f in because]),
        )
        for name, because in reasons.items()
        if because
    ]


def _ranks(ranks: list[int | None]) -> tuple[int, ...] | None:
    return None if None in ranks else tuple(sorted({r for r in ranks if r is not None}))
