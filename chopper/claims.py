"""Claims of an attribution that a finding can withhold: null or flagged, as the reports say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from chopper.storage.manifest import Finding


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that an attribution says, and may have to leave unsaid."""

    id: str
    title: str
    effect: str
    """What stands in its place."""
    causes: tuple[str, ...] = ()
    """Causes, with all below them, whose numbers it is about."""


@dataclass(frozen=True, slots=True)
class Withheld:
    """A claim that is withheld, and why."""

    claim: Claim
    reason: str
    codes: tuple[str, ...]
    ranks: tuple[int, ...] | None
    """Ranks that it is withheld of; None: the whole run."""


_CLAIMS = (
    Claim("attribution", "Attribution of a rank", "The rank has no windows and no time."),
    Claim(
        "compute.ideal",
        "Ideal time",
        "`ideal_ns` is null, and so is everything that is measured against it: distance from the "
        "ceiling, MFU, speed-up.",
        ("compute.ideal",),
    ),
    Claim(
        "compute.clock",
        "Clock",
        "No time is blamed on a low clock; it stays in the rest of the efficiency, which says so.",
        ("compute.clock",),
    ),
    Claim(
        "compute.contention",
        "Contention",
        "No time of these kernels is blamed on others that ran beside them.",
        ("compute.contention",),
    ),
    Claim(
        "compute.counters",
        "Instructions and busy matrix units",
        "The counters are not used; the efficiency is not split by them.",
        ("compute.efficiency.instructions", "compute.efficiency.tensor_core"),
    ),
    Claim(
        "communication.wait",
        "Straggler wait",
        "Waiting is not told from transfer: the time is `communication.unseparated`, and no rank "
        "is called late.",
        ("communication.wait", "communication.transfer"),
    ),
    Claim(
        "idle.causes",
        "Causes of idle time",
        "The idle time stands, the causes below it are flagged: the launches that would tell are "
        "not in the trace.",
        ("idle.dependency", "idle.launch_latency", "idle.call", "idle.preparation"),
    ),
    Claim(
        "confidence",
        "Confidence intervals",
        "`ci95_ns` is null: there are too few steps to resample.",
    ),
)
CLAIMS = {claim.id: claim for claim in _CLAIMS}


def withheld(findings: Iterable[Finding]) -> list[Withheld]:
    """Return the claims that findings withhold, in the order of ``CLAIMS``; others come last."""
    reasons: dict[str, list[Finding]] = {claim: [] for claim in CLAIMS}
    for finding in findings:
        for name in finding.withholds:
            reasons.setdefault(name, []).append(finding)
    return [
        Withheld(
            claim=CLAIMS.get(name) or Claim(name, name, "", (name,)),
            reason="; ".join(dict.fromkeys(f.message for f in because)),
            codes=tuple(dict.fromkeys(f.code for f in because)),
            ranks=_ranks(because),
        )
        for name, because in reasons.items()
        if because
    ]


def _ranks(findings: list[Finding]) -> tuple[int, ...] | None:
    ranks = {finding.rank for finding in findings}
    return None if None in ranks else tuple(sorted(rank for rank in ranks if rank is not None))
