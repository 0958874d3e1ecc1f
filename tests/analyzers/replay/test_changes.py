"""What a change does to a scenario, by hand and by the laws that it must keep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chopper.analyzers.replay.changes import Link, observed_link, set_link

TRANSFERS = st.lists(st.integers(0, 10**9), min_size=1, max_size=8)
LATENCY_NS = st.floats(0, 1e6)


def changed(
    transfer_ns: list[int], link: Link, bandwidth_ratio: float, latency_ns: float | None
) -> np.ndarray:
    """Transfers of one rank under another link."""
    count = len(transfer_ns)
    node = SimpleNamespace(
        transfer_ns=np.array(transfer_ns), coupled=np.ones(count, dtype=bool), start=np.zeros(count)
    )
    scenario: Any = SimpleNamespace(run_ns={})
    facts: Any = [SimpleNamespace(node=node)]
    set_link(scenario, facts, link, bandwidth_ratio, latency_ns)
    found: np.ndarray = scenario.run_ns[0]
    return found


@given(TRANSFERS, LATENCY_NS)
def test_the_same_link_changes_nothing(transfer_ns: list[int], latency_ns: float) -> None:
    link = Link(latency_ns, 1e9, separable=True)
    for wanted in (None, latency_ns):
        assert changed(transfer_ns, link, 1.0, wanted).tolist() == transfer_ns


@given(TRANSFERS, LATENCY_NS, st.floats(1, 1e6), st.floats(0, 1))
def test_a_better_link_makes_no_transfer_slower(
    transfer_ns: list[int], latency_ns: float, times: float, less: float
) -> None:
    link = Link(latency_ns, 1e9, separable=True)
    better = changed(transfer_ns, link, times, latency_ns * less)
    assert (better <= transfer_ns).all()
    assert (changed(transfer_ns, link, 1 / times, None) >= transfer_ns).all()


def test_a_latency_by_hand() -> None:
    # Of 30 µs, 10 are latency; what took 4 had 4 of it.
    link = Link(10e3, 1e9, separable=True)
    assert changed([30_000, 4_000, 0], link, 2.0, 20e3).tolist() == [30_000, 8_000, 0]


def test_the_latency_leaves_the_bytes_their_time_on_a_known_link() -> None:
    # At 100 MB/s the bytes take 10 and 40 µs; a line through 30 and 46 has an intercept of 24.7.
    sizes, times = np.array([1000.0, 4000.0]), np.array([30_000, 46_000])
    node = SimpleNamespace(transfer_ns=times, coupled=np.ones(2, dtype=bool))
    for at_peak_ns, latency_ns in ((sizes * 10, 6_000), (np.full(2, np.nan), 24_666.7)):
        fact: Any = SimpleNamespace(node=node, bus_bytes=sizes, at_peak_ns=at_peak_ns)
        assert round(observed_link([fact]).latency_ns, 1) == latency_ns
