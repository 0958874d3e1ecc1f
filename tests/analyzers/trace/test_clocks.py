from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chopper.analyzers.causes.clock import (
    CLOCK_LABELS,
    KNOWN,
    MAX_GAP_NS,
    NO_SAMPLES,
    SPARSE,
    EventClocks,
    Held,
    join_clocks,
)
from chopper.analyzers.trace.tables import DeviceEvents
from tests.analyzers.make import kernel, kernels
from tests.analyzers.views.clock_script import Script, samples

MS = 1_000_000
HIGH, LOW = 1.98e9, 1.2e9


def join(table: pa.Table, *bounds: tuple[int, int], device: int = 0) -> EventClocks:
    events = DeviceEvents(kernels(*(kernel(a, b, device_id=device) for a, b in bounds)))
    return join_clocks(events, table)


@settings(max_examples=60)
@given(
    st.lists(st.integers(900, 980), min_size=2, max_size=30),
    st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 900)), min_size=1, max_size=20),
    st.data(),
)
def test_the_mean_is_the_integral(
    clocks: list[int], kernels_us: list[tuple[int, int]], data: st.DataObject
) -> None:
    gaps = data.draw(
        st.lists(st.integers(1, 200), min_size=len(clocks) - 1, max_size=len(clocks) - 1)
    )
    time = np.concatenate([[0], np.cumsum(gaps)]) * 1000
    bounds = sorted(
        {(a * 1000, (a + d) * 1000) for a, d in kernels_us}, key=lambda b: (b[0], -b[1])
    )
    found = join(samples(time, [c * 1e6 for c in clocks]), *bounds)
    for (a, b), clock, state in zip(bounds, found.clock_hz, found.state, strict=True):
        if state != KNOWN:
            continue
        fine = np.arange(a, b, 100) + 50
        assert clock == pytest.approx(
            np.interp(fine, time, np.array(clocks) * 1e6).mean(), rel=1e-4
        )


def test_absent_clocks_are_no_readings() -> None:
    found = join(samples([0, 5 * MS, 10 * MS], [1e9, 0, 1e9]), (4 * MS, 6 * MS))
    assert found.clock_hz[0] == pytest.approx(1e9)
    nothing = join(samples([0, 10 * MS], [None, 0]), (4 * MS, 6 * MS))
    assert nothing.state.tolist() == [NO_SAMPLES]
    assert np.isnan(nothing.clock_hz[0])


def test_two_devices_are_told_apart_and_one_needs_no_number() -> None:
    both = pa.concat_tables(
        [
            samples([0, 10 * MS], [1e9, 1e9], device_id=0),
            samples([0, 10 * MS], [2e9, 2e9], device_id=1),
        ]
    ).unify_dictionaries()
    assert join(both, (MS, 2 * MS), device=1).clock_hz[0] == pytest.approx(2e9)
    assert join(both, (MS, 2 * MS), device=5).state.tolist() == [NO_SAMPLES]
    # CUDA_VISIBLE_DEVICES: the driver's device 3 is the program's device 0.
    other = samples([0, 10 * MS], [1.5e9, 1.5e9], device_id=3)
    assert join(other, (MS, 2 * MS), device=0).clock_hz[0] == pytest.approx(1.5e9)
    # A host's own operators have no device clock.
    assert join(other, (MS, 2 * MS), device=-1).state.tolist() == [NO_SAMPLES]


def test_readings_further_apart_than_the_bound_are_refused_even_when_they_agree() -> None:
    gap = MAX_GAP_NS + 1
    found = join(samples([0, gap, 2 * gap], [1e9] * 3), (1000, 2000))
    assert found.state.tolist() == [SPARSE]
    near = join(samples([0, gap - 1, 2 * gap - 2], [1e9] * 3), (1000, 2000))
    assert near.state.tolist() == [KNOWN]


def test_a_clock_that_changes_as_fast_as_it_is_sampled_is_refused_everywhere() -> None:
    # Every second pair of neighbours disagrees: the agreeing ones agree by chance.
    clocks = [HIGH, HIGH, LOW, LOW] * 10
    found = join(samples(np.arange(40) * 10 * MS, clocks), (2 * MS, 3 * MS), (102 * MS, 103 * MS))
    assert found.state.tolist() == [SPARSE, SPARSE]
    # The same levels held five times longer are resolved.
    slow = np.repeat(clocks, 5)
    found = join(samples(np.arange(200) * 10 * MS, slow), (2 * MS, 3 * MS), (102 * MS, 103 * MS))
    assert found.state.tolist() == [KNOWN, KNOWN]


def test_a_hole_in_which_the_clock_changed_is_refused() -> None:
    time = [*range(0, 100, 10), *range(200, 300, 10)]
    clocks = [HIGH] * 10 + [LOW] * 10
    found = join(samples(np.array(time) * MS, clocks), (50 * MS, 51 * MS), (150 * MS, 151 * MS))
    assert found.state.tolist() == [KNOWN, SPARSE]


@pytest.mark.parametrize("hz", [100, 200, 1000])
def test_a_stepping_clock_is_recovered(hz: int) -> None:
    script = Script(((0, HIGH), (3_003 * MS, LOW), (6_507 * MS, HIGH)), 10_000 * MS)
    bounds = np.arange(0, 9_990 * MS, 3 * MS)
    found = join(
        script.samples(hz, jitter_ns=int(2e8 / hz)),
        *((int(a) + 1, int(a) + 3 * MS) for a in bounds[5:-20]),
    )
    start, end = bounds[5:-20] + 1, bounds[5:-20] + 3 * MS
    assert (found.state == KNOWN).all()
    truth = script.mean_hz(start, end)
    # Wrong by more than rounding only where the step lies within the readings around a kernel,
    # and there by no more than is said.
    assert (np.abs(found.clock_hz - truth) <= 2 * found.error_hz + 1).all()
    assert found.clock_hz.mean() == pytest.approx(truth.mean(), rel=0.002)


@pytest.mark.parametrize(
    ("bits", "label"),
    [
        (0x4, "power_cap"),
        (0x8 | 0x80, "power_cap"),
        (0x20, "thermal"),
        (0x8 | 0x40, "thermal"),
        (0x2, "application"),
        (0x10, "application"),
        (0x1, "idle_ramp"),
        (0x0, "host_limited"),
        (0x8, "unlabelled"),
        (0x4000, "unlabelled"),
        (None, "unlabelled"),
    ],
)
def test_event_reasons_label_the_loss(bits: int | None, label: str) -> None:
    table = samples([0, 10 * MS, 20 * MS], [1e9] * 3, [bits] * 3)
    found = join(table, (2 * MS, 12 * MS))
    series = found.readers[0]
    at = series.locate(np.array([2 * MS]), np.array([12 * MS]))
    blame = series.blame(at, np.array([1.5e9]))[0]
    assert [name for name, weight in zip(CLOCK_LABELS, blame, strict=True) if weight] == [label]


def test_a_loss_is_under_the_reason_of_the_time_in_which_it_arose() -> None:
    # First half at the reference without a reason, second half far below it for power; two reasons
    # at once share.
    table = samples(
        np.arange(8) * 10 * MS,
        [1.5e9] * 4 + [1.0e9] * 4,
        [0, 0, 0, 0, 0x4, 0x4, 0x4 | 0x20, 0x4 | 0x20],
    )
    found = join(table, (0, 70 * MS))
    series = found.readers[0]
    blame = series.blame(series.locate(np.array([0]), np.array([70 * MS])), np.array([1.5e9]))[0]
    share = dict(zip(CLOCK_LABELS, blame / blame.sum(), strict=True))
    # Deficit of 0.5 GHz over 30 ms, and half of the ramp before it; the last 10 ms and half of the
    # 10 ms before are shared by halves.
    power, thermal = 5 + 10 + 5 + 2.5 + 5, 2.5 + 5
    assert share["power_cap"] == pytest.approx(power / (power + thermal))
    assert share["thermal"] == pytest.approx(thermal / (power + thermal))


def test_power_is_unknown_where_a_reading_lacks_it() -> None:
    table = pa.concat_tables(
        [
            samples([0, 10 * MS], [1e9] * 2, power_w=300.0),
            samples([20 * MS, 30 * MS], [1e9] * 2, power_w=None),
        ]
    ).unify_dictionaries()
    start, end = np.array([2, 12, 2]) * MS, np.array([4, 14, 14]) * MS
    found = join(table, *zip(start[:2].tolist(), end[:2].tolist(), strict=True))
    assert (found.state == KNOWN).all()
    series = found.readers[0]
    power = series.mean_power(series.locate(start, end))
    assert power[0] == pytest.approx(300)
    assert np.isnan(power[1:]).all()


def busy(*bounds: tuple[int, int]) -> DeviceEvents:
    return DeviceEvents(kernels(*(kernel(a * MS, b * MS) for a, b in bounds)))


def label_names(events: DeviceEvents, table: pa.Table, held: Held | None = None) -> list[str]:
    """What holds the clock at each reading, the two that hold the edges left out."""
    series = join_clocks(events, table, held or Held()).readers[0]
    return [CLOCK_LABELS[i] for i in series.labels.argmax(axis=1)[1:-1]]


def test_a_clock_that_climbs_after_an_idle_stretch_is_a_ramp() -> None:
    # Busy, idle from 10 to 40 ms, busy again; the clock falls to 0.9 GHz and climbs until 70 ms.
    times = [i * 10 * MS for i in range(10)]
    clocks = [1.4e9, 1.4e9, 0.9e9, 0.9e9, 0.9e9, 1.1e9, 1.3e9, 1.4e9, 1.4e9, 1.4e9]
    events = busy((0, 10), (40, 95))
    found = label_names(events, samples(times, clocks, [0] * 10))
    assert found == ["host_limited"] * 2 + ["idle_ramp"] * 5 + ["host_limited"] * 3


def test_a_clock_that_falls_after_it_has_risen_is_no_ramp() -> None:
    times = [i * 10 * MS for i in range(8)]
    clocks = [0.9e9, 0.9e9, 1.4e9, 1.1e9, 1.1e9, 1.4e9, 1.1e9, 1.1e9]
    found = label_names(busy((0, 1), (10, 75)), samples(times, clocks, [0] * 8))
    assert found == ["host_limited", "idle_ramp", *["host_limited"] * 6]


def test_a_reason_that_the_driver_gives_stands() -> None:
    times = [i * 10 * MS for i in range(6)]
    clocks = [0.9e9] * 3 + [1.4e9] * 3
    found = label_names(busy((0, 1), (20, 55)), samples(times, clocks, [4] * 6))
    assert found == ["power_cap"] * 6


def test_short_pauses_make_no_ramp() -> None:
    times = [i * 10 * MS for i in range(6)]
    clocks = [0.9e9] * 3 + [1.4e9] * 3
    found = label_names(busy((0, 18), (20, 55)), samples(times, clocks, [0] * 6))
    assert found == ["host_limited"] * 6


def test_readings_at_the_clock_that_was_set_are_held_by_it() -> None:
    times = [i * 10 * MS for i in range(4)]
    clocks = [1.2e9, 1.205e9, 1.0e9, 1.2e9]
    found = label_names(busy((0, 35)), samples(times, clocks, [0, 0, 0, 4]), Held(set_hz=1.2e9))
    assert found == ["application", "application", "host_limited", "power_cap"]


@pytest.mark.parametrize(
    ("limit_w", "step_ms", "expected"),
    [
        # 350 W are 87.5 % of 400 W, and 90.2 % of 388 W.
        (400.0, 100, "internal_limit"),
        (388.0, 100, "power_cap"),
        # Seven readings within a second of one: too few to exclude a burst up to the limit.
        (400.0, 300, "power_cap"),
        # Averaged power, or no limit.
        (None, 100, "power_cap"),
    ],
)
def test_a_power_cap_holds_power_near_the_limit(
    limit_w: float | None, step_ms: int, expected: str
) -> None:
    times = [i * step_ms * MS for i in range(30)]
    table = samples(times, [1.2e9] * 30, [0x4] * 30, power_w=350.0)
    found = label_names(busy((0, 29 * step_ms)), table, Held(power_limit_w=limit_w))
    assert {*found[5:-5]} == {expected}


def test_power_that_reaches_the_limit_within_a_second_is_capped() -> None:
    # At 3 s one reading at the limit: readings from 2 to 4 s may be of the same cap.
    times = [i * 100 * MS for i in range(61)]
    power = [700.0 if i == 30 else 400.0 for i in range(61)]
    table = samples(times, [1.2e9] * 61, [0x4] * 61)
    table = table.set_column(table.column_names.index("power_w"), "power_w", pa.array(power))
    found = label_names(busy((0, 6000)), table, Held(power_limit_w=700.0))
    assert [i for i, name in enumerate(found) if name == "power_cap"] == [*range(20, 41)]
    assert {*found} == {"power_cap", "internal_limit"}


@pytest.mark.parametrize(
    ("bits", "is_cool", "expected"),
    [
        (0x20, True, "internal_limit"),
        (0x8 | 0x40, True, "internal_limit"),
        (0x20, False, "thermal"),
        (0x1, True, "idle_ramp"),
        (None, True, "unlabelled"),
    ],
)
def test_heat_is_not_what_slows_down_a_cool_device(
    bits: int | None, is_cool: bool, expected: str
) -> None:
    table = samples([0, 10 * MS, 20 * MS], [1e9] * 3, [bits] * 3)
    assert {*label_names(busy((0, 20)), table, Held(is_cool=is_cool))} == {expected}
