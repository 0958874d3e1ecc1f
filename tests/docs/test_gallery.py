"""The gallery shows what lies in every clone; `make docs` builds all of it."""

from __future__ import annotations

import shlex

import pytest

from docs.gallery import EXHIBITS, ROOT, reports
from tests.golden.fetch import catalogue


def test_every_exhibit_has_its_recordings_and_writes_the_page_of_its_name() -> None:
    public = [row["name"] for row in catalogue()]
    for exhibit in EXHIBITS:
        words = shlex.split(exhibit.command)
        assert words[-2:] == ["-o", f"{exhibit.name}.html"]
        for name, place in exhibit.inputs:
            assert name in words
            kind, _, path = place.rpartition(":")
            if kind:
                assert any(known.startswith(path) for known in public), path
            else:
                assert (ROOT / path).is_dir(), path
    assert len({exhibit.name for exhibit in EXHIBITS}) == len(EXHIBITS)


@pytest.mark.long
def test_without_traces_of_others_the_gallery_has_each_kind_of_report(monkeypatch) -> None:
    monkeypatch.delenv("CHOPPER_TRACES", raising=False)
    own = {e.name for e in EXHIBITS if not any(":" in place for _, place in e.inputs)}
    reports.cache_clear()
    pages = reports()
    assert {exhibit.name for exhibit in pages} == own
    assert {"known-causes-cuda", "known-causes-rocm", "overlap", "memory-llama3-8b"} <= own
    for page in pages.values():
        assert page.startswith("<!doctype html>")
