"""The page of a selftest: what each path to a device was found to do on this machine."""

from __future__ import annotations

from typing import Any

from chopper import wording as fmt
from chopper.reports.page import Item, Items, Mark, Page, Section

_SECTIONS: tuple[tuple[str, str, Mark], ...] = (
    ("failed", "Failed", "error"),
    ("passed", "Passed", "ok"),
    ("not possible", "Not possible here", "info"),
)


def page(document: dict[str, Any]) -> Page:
    """Return the page of a selftest's JSON form."""
    results = document["results"]
    count = {status: sum(r["status"] == status for r in results) for status, *_ in _SECTIONS}
    devices = [device["name"] for device in document["devices"]]
    versions = document["versions"]
    return Page(
        title=f"Selftest of chopper {versions['chopper']}",
        headline=f"{count['passed']} of {fmt.plural(len(results), 'check')} passed, "
        f"{count['failed']} failed, {count['not possible']} not possible here.",
        facts=(
            ", ".join(devices) or "no accelerator that torch sees",
            ", ".join(f"{name} {v}" for name, v in versions.items() if v and name != "chopper"),
            f"took {document['seconds']:.0f} s",
        ),
        sections=[
            Section(
                title=title,
                blocks=(Items(items=_items([r for r in results if r["status"] == status], mark)),),
            )
            for status, title, mark in _SECTIONS
            if count[status]
        ],
    )


def _items(results: list[dict[str, Any]], mark: Mark) -> list[Item]:
    """Return a line for each result; those that are not possible for one reason share it."""
    titles: dict[str, list[str]] = {}
    for result in results:
        said = result["reason"] or result["found"]
        if mark == "error":
            said = f"found {said}; expected: {result['expected']}"
        titles.setdefault(said, []).append(f"{result['title']} ({result['path']})")
    if mark == "info":
        return [Item(f"{said}: {', '.join(of)}", mark) for said, of in titles.items()]
    return [Item(f"{', '.join(of)}: {said}", mark) for said, of in titles.items()]
