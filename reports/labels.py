"""Names and colours of causes, findings and methods, as parts of a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from chopper import wording as fmt
from chopper.causes import CAUSES, LEAVES, inherited, parent
from chopper.claims import withheld
from chopper.reports.page import Cards, Cell, Column, Table
from chopper.storage.manifest import Finding

# Parents without which their leaves' labels say too little.
_CONTEXT = frozenset({"compute.vector", "communication.transfer"}) | {
    f"communication.{dimension}" for dimension in ("tensor", "expert", "context")
}


def color(cause: str) -> str:
    """Return the colour of a cause; one that is not of the tree takes its parent's."""
    return inherited(cause, "color") or "#8a8f98"


def ink(background: str) -> str:
    """Return black or white, whichever reads better on a colour (WCAG 2: at least 4.58 to 1)."""
    channels = [int(background[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if luminance > 0.179 else "#ffffff"


def full_label(cause: str) -> str:
    """Return a cause's label, with its parent's where it needs one: ``Transfer: at link peak``."""
    if cause not in CAUSES:
        return cause
    label, above = CAUSES[cause].label, parent(cause)
    if above not in _CONTEXT:
        return label
    return f"{CAUSES[above].label}: {label[:1].lower()}{label[1:]}"


def cause_cell(cause: str, label: str) -> Cell:
    """Return a cause in its place in the tree, with its colour and its meaning."""
    depth = cause.count(".")
    return Cell(
        text=label,
        depth=depth,
        strong=not depth,
        hint=CAUSES[cause].doc,
        color=color(cause),
        hollow=cause not in LEAVES,
    )


def sentence(text: str) -> str:
    """Return a remark as a sentence: a capital and a full stop."""
    text = text.strip()
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}"


def method(report: str, **values: str) -> Cards:
    """Return how the numbers of a report are made: its part of ``method.toml``, with values."""
    text = Path(__file__).with_name("method.toml").read_bytes()
    cards = msgspec.toml.decode(text, type=dict[str, dict[str, list[str]]])[report]
    return Cards(
        cards=[
            (title, [said for part in parts if (said := part.format_map(values))])
            for title, parts in cards.items()
        ]
    )


def meaning(cause: str) -> str:
    """Return the address on a run's page that explains a cause."""
    return f"cause-{cause}"


def merged(findings: Sequence[Finding]) -> list[tuple[Finding, list[int]]]:
    """Return findings that differ in rank and figures only as one: the gravest, and its ranks.

    What is said of the whole run has no ranks; neither has a merged finding whose figures are
    those of all its ranks.
    """
    alike: dict[tuple[str, str, int | str], list[Finding]] = {}
    for one in findings:
        key = one.message if one.rank is None else -1
        alike.setdefault((one.severity, one.code, key), []).append(one)
    rows = []
    for of in alike.values():
        worst = max(of, key=lambda f: f.count or 0)
        if all(f.message == worst.message for f in of):
            worst = msgspec.structs.replace(worst, rank=None)
        rows.append((worst, sorted({f.rank for f in of if f.rank is not None})))
    return rows


def of_ranks(finding: Finding, message: str, ranks: Sequence[int], all_ranks: int) -> str:
    """Return a finding's message with the ranks that it is about: ``Ranks 0–7: …``."""
    if all_ranks < 2 or not ranks:
        return message
    if len(ranks) == 1:
        return f"Rank {ranks[0]}: {message}"
    of_one = "" if finding.rank is None else f" (figures of rank {finding.rank})"
    return f"Ranks {_ranges(ranks)}{of_one}: {message}"


def _ranges(ranks: Sequence[int]) -> str:
    return fmt.ranges(ranks).replace("-", "–").replace(",", ", ")


def finding_table(findings: Sequence[Finding], *, ranks: int, title: str = "") -> Table:
    """Return findings about data, a row for those alike; with several ranks, whose they are."""
    several = ranks > 1
    return Table(
        title=title,
        columns=(
            "Severity",
            *([Column("Ranks", kind="id")] if several else []),
            Column("Finding", kind="prose"),
            Column("Count", kind="number"),
            Column("Withholds", kind="prose"),
        ),
        rows=[
            (
                Cell(text=f.severity, mark=f.severity),
                *([_ranges(of) or "all"] if several else []),
                Cell(text=sentence(f.message), below=f"`{f.code}`"),
                fmt.UNKNOWN if f.count is None else fmt.count(f.count),
                ", ".join(fmt.inside(w.claim.title) for w in withheld([f])) or fmt.UNKNOWN,
            )
            for f, of in merged(findings)
        ],
    )
