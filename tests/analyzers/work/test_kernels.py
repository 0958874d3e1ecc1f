"""Searching many names at once gives what searching one by one gives."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from chopper import pipeline
from chopper.analyzers.trace import names
from chopper.analyzers.work import kernels
from chopper.analyzers.work.kernels import NameSearch
from tests.kineto_writer import Trace

WORDS = sorted(
    {
        word
        for search in (names.is_communication, *(search for _, search in kernels._KINDS))
        for pattern in (search.pattern, search.excluded)
        if pattern is not None
        for word in re.findall(r"[A-Za-z0-9_:]+", pattern.pattern)
    }
)


def made(count: int, seed: int) -> list[str]:
    """Names of what the patterns look for, in any order and case."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        parts = draw.choices([*WORDS, "_", "::", "<", ">", "x", "é", "ſ", "K", "\n", " "], k=4)
        name = "".join(parts)
        found.append(name.upper() if draw.random() < 0.2 else name)
    return found


def test_many_names_are_classified_as_one_by_one() -> None:
    values = made(6_000, 1)
    assert kernels.kernel_families(values) == [kernels.kernel_families([v])[0] for v in values]
    assert names.is_communication.many(values).tolist() == [
        names.is_communication(v) for v in values
    ]
    assert len(set(kernels.kernel_families(values))) == 5
    assert kernels.kernel_families([]) == []


def test_the_engine_knows_each_pattern() -> None:
    """Without its lookarounds a pattern finds more, never less."""
    for search in (names.is_communication, *(search for _, search in kernels._KINDS)):
        wider = re.compile(search._wider, search.pattern.flags)
        assert "(?!" not in search._wider
        assert "(?<" not in search._wider
        assert wider.groups <= search.pattern.groups


def test_distinct_names_are_not_searched_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a million kernels with a name each took a minute of searching."""
    trace = Trace()
    for i in range(1_500):
        at = 1_000 * i
        trace.launch(f"thing<{i}>", at, 50, kernel_at=at + 100, kernel_for=700)
    path = tmp_path / "trace.json"
    path.write_bytes(trace.encode())
    searched: list[str] = []
    one = NameSearch.__call__

    def counted(self: NameSearch, name: str) -> bool:
        searched.append(name)
        return one(self, name)

    monkeypatch.setattr(NameSearch, "__call__", counted)
    found = pipeline.attribute(path)
    assert found.observed_ns
    assert not [name for name in searched if name.startswith("thing")]
