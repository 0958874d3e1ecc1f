"""Claims that a check of a run can withhold: null or flagged, as reports say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from chopper.storage.manifest import Finding


class Claim(msgspec.Struct, frozen=True):
    """Something that an attribution says, and may have to leave unsaid.

    ``effect`` is what stands in its place; ``causes``, with all below them, are those whose
    numbers it is about.
    """

    title: str
    effect: str
    causes: tuple[str, ...] = ()


CLAIMS = msgspec.toml.decode(
    Path(__file__).with_name("data").joinpath("claims.toml").read_bytes(), type=dict[str, Claim]
)


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
