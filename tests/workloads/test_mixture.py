from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from chopper.workloads.mixture import (
    VOCABULARY,
    Mixture,
    Source,
    SourceError,
    make_sources,
    tokenize,
)
from chopper.workloads.planning import Cost, Draw, Planner
from tests.waiting import PATIENCE_S


def made(fault="none", count=4, **changes):
    options: dict[str, Any] = {
        "count": count,
        "state_bytes": 100_000,
        "latency_s": 1e-4,
        "documents": 200,
        "tokens": 20,
        "longest": 64,
        "seed": 3,
        "fault": fault,
    }
    return make_sources(**(options | changes))


def drawn(sources, batch=2, ramp=0):
    of = Draw(
        sources=sources, batch=batch, ranks=2, seed=0, cost=Cost(), method="random", ramp=ramp
    )
    return Planner(of)


def test_sources_are_skewed_around_what_was_asked_for():
    sources = made(count=24, latency_s=0.15, state_bytes=12_000_000)
    weight = np.array([s.weight for s in sources])
    assert weight.sum() == pytest.approx(1)
    assert (weight * [s.latency_s for s in sources]).sum() == pytest.approx(0.15)
    assert np.mean([s.state_bytes for s in sources]) == pytest.approx(12e6, rel=1e-3)
    assert max(s.size or 0 for s in sources) > 10 * min(s.size or 0 for s in sources)
    assert len({s.name for s in sources}) == 24


def test_latency_differs_by_document_and_has_the_mean_of_its_source():
    spec = made()[0]
    found = np.array([spec.latency_of(i) for i in range(3000)])
    assert found.mean() == pytest.approx(spec.latency_s, rel=0.03)
    assert found.max() > 2 * found.mean()
    assert spec.latency_of(17) == spec.latency_of(17)


@pytest.mark.parametrize("number", range(4))
def test_a_document_has_as_many_tokens_as_its_metadata_says(number):
    spec = made()[number]
    opened = Source(spec)
    index = np.arange(50)
    lengths = spec.lengths(index)
    assert lengths.min() >= 4
    assert lengths.max() <= 64
    assert len(set(lengths.tolist())) > 10
    for i, length in zip(index.tolist(), lengths.tolist(), strict=True):
        ids, wait_s, _ = opened.read(i)
        assert len(ids) == length
        assert 0 < ids.min() <= ids.max() < VOCABULARY
        assert wait_s >= 1e-4 * 0.01
        assert ids.tolist() == Source(spec).read(i)[0].tolist() if i == 7 else True


def test_tokenizing_takes_the_longest_known_stem():
    ids = tokenize("balbed balber")
    assert len(ids) == 4
    assert ids[0] == ids[2]
    assert ids[1] != ids[3]
    with pytest.raises(ValueError, match="unknown word 'xyzzy'"):
        tokenize("balbed xyzzy")


def test_state_is_held_while_a_source_is_open():
    code = """
import os
from pathlib import Path
from chopper.workloads.mixture import Mixture, make_sources
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
mixture = Mixture(make_sources(count=2, state_bytes=30_000_000, latency_s=1e-4, documents=9,
                               tokens=9, longest=64, seed=0))
before = resident()
mixture.open([0, 1])
held = resident() - before
mixture.close([0, 1])
print(held, resident() - before)
"""
    if not sys.platform.startswith("linux"):
        pytest.skip("/proc of Linux")
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    held, left = map(int, done.stdout.split())
    assert held == pytest.approx(60e6, rel=0.1)
    assert left < 6e6


def test_documents_come_in_the_order_asked_for_also_when_read_at_once():
    items = [(3, 5), (0, 1), (3, 4), (1, 9), (0, 0)]
    one_by_one = [Mixture(made()).read(item)[0].tolist() for item in items]
    with ThreadPoolExecutor(5) as pool:
        at_once = [ids.tolist() for ids, _, _ in Mixture(made()).read_all(items, pool)]
    assert at_once == one_by_one


def test_a_source_that_raises_is_named():
    items = [(0, 1), (1, 7), (2, 2)]
    with pytest.raises(SourceError, match="source code-01, sample 7: OSError: connection reset"):
        Mixture(made("raises")).read_all(items, ThreadPoolExecutor(4))


def test_a_source_that_hangs_is_given_up():
    code = """
from concurrent.futures import ThreadPoolExecutor
from chopper.workloads import mixture
from chopper.workloads.mixture import Mixture, SourceError, make_sources
import os
mixture.READ_TIMEOUT_S = 0.5
sources = make_sources(count=3, state_bytes=1000, latency_s=1e-4, documents=9, tokens=9,
                       longest=64, seed=0, fault="hangs")
try:
    list(Mixture(sources).read_all([(1, 2), (0, 1)], ThreadPoolExecutor(2)))
except SourceError as exc:
    print(exc, flush=True)
os._exit(0)  # the thread that waits for storage never ends
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout == "source code-01, sample 2: no answer for 0 s\n"


def test_an_empty_source_is_refused_before_anything_is_read():
    with pytest.raises(SourceError, match="source code-01 is empty: leave it out"):
        drawn(made("empty"))


def test_an_endless_source_is_read_on_and_on():
    sources = made("endless")
    assert sources[1].size is None
    plans = drawn(sources, batch=8)
    read = [
        int(i)
        for step in range(100)
        for s, i in zip(plans.plan(step).source, plans.plan(step).index, strict=True)
        if s == 1
    ]
    assert read == list(range(len(read)))
    ids, _, _ = Mixture(sources).read((1, 10**9))
    assert 4 <= len(ids) <= 64


def test_the_ramp_turns_the_mixture_around():
    sources = made()
    plans = drawn(sources, ramp=10)
    first, last = plans.weights_at(0), plans.weights_at(10)
    assert first.argmax() == last.argmin()
    assert sorted(first) == pytest.approx(sorted(last))


def test_a_document_is_whole_however_little_its_source_holds():
    spec = made(state_bytes=1, tokens=20_000, longest=40_000)[0]
    source = Source(spec)
    lengths = spec.lengths(np.arange(6))
    assert lengths.max() > 10_000
    assert [len(source.read(i)[0]) for i in range(6)] == lengths.tolist()
