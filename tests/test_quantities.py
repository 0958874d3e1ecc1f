from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chopper.errors import UsageError
from chopper.quantities import (
    count,
    flop_per_s,
    frequency_hz,
    number,
    one_of,
    power_w,
    rate_bytes_per_s,
    seconds,
    size_bytes,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("80GB", 80 * 10**9),
        ("16GiB", 16 * 2**30),
        ("512 MB", 512 * 10**6),
        ("42B", 42),
        ("1.5kB", 1500),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert size_bytes(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("50GB/s", 50e9), ("400Gb/s", 50e9), ("10Gbit/s", 1.25e9), ("3.35TB/s", 3.35e12)],
)
def test_rates(text: str, value: float) -> None:
    assert rate_bytes_per_s(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "value"), [("90d", 7_776_000), ("4.5us", 4.5e-6), ("3s", 3), ("2 h", 7200)]
)
def test_times(text: str, value: float) -> None:
    assert seconds(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "value"), [("8192", 8192), ("8K", 8000), ("70B", 70 * 10**9), ("1e9", 10**9)]
)
def test_counts(text: str, value: int) -> None:
    assert count(text) == value


@pytest.mark.parametrize("text", ["", "x", "0", "-3", "1e400", "nan", "inf", "3 apples", "1,5"])
def test_what_is_no_quantity_is_one_line(text: str) -> None:
    for read in (size_bytes, rate_bytes_per_s, seconds, count, number):
        with pytest.raises(UsageError) as caught:
            read(text, "--it")
        assert "\n" not in str(caught.value)
        assert "--it" in str(caught.value)


@pytest.mark.parametrize(
    ("read", "text", "hint"),
    [
        (size_bytes, "80", "80GB or 80GiB?"),
        (seconds, "90", "a time such as 90d"),
        (rate_bytes_per_s, "400", "a rate such as 50GB/s"),
        (power_w, "700", "700W or 700kW?"),
        (flop_per_s, "989", "989TFLOP/s"),
        (frequency_hz, "1980", "1980MHz"),
    ],
)
def test_a_number_without_its_unit_is_refused_with_what_it_may_mean(
    read: Callable[[str, str], float], text: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(hint)):
        read(text, "--it")


def test_power_and_flop_rates() -> None:
    assert power_w("0.7kW") == power_w("700 W") == 700
    assert flop_per_s("989e12") == flop_per_s("989TFLOP/s") == flop_per_s("989T") == 989e12


@given(st.text(max_size=20))
def test_any_text_is_a_positive_number_or_refused(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert size_bytes(text) >= 0


def test_names_that_begin_alike_are_suggested() -> None:
    with pytest.raises(UsageError, match="did you mean h100-sxm or h100-pcie"):
        one_of("device", "h100", ["a100", "h100-sxm", "h100-pcie"])
    assert one_of("device", " H100-SXM ", ["a100", "h100-sxm"]) == "h100-sxm"


@pytest.mark.parametrize(("text", "message"), [("1e-310", "too small"), ("1e61", "too large")])
def test_what_leaves_nothing_to_compute_with_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        number(text)
