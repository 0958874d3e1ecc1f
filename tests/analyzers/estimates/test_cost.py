from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from chopper.cli.estimates.cost import (
    Throughput,
    cost,
    per_million_tokens,
    projected_tokens_per_s,
)
from chopper.errors import InputError, UsageError
from chopper.hardware import devices, prices
from chopper.hardware.prices import Priced

H100, GB200 = 1.42, 2.27


def test_gpt3_in_fp8_is_54_cents() -> None:
    assert per_million_tokens(H100, 728) == pytest.approx(0.542, abs=0.0005)


def test_a_gb200_has_to_be_1_6_times_as_fast() -> None:
    listed = prices.load()
    assert listed.devices["nvidia-h100-sxm"].value == H100
    assert listed.devices["nvidia-gb200"].value == GB200
    assert all(p.source for p in listed.devices.values())
    found = cost(
        Throughput(tokens_per_s=728, source="test"),
        prices=listed,
        price_per_hour=listed.devices["nvidia-h100-sxm"],
        device=devices.named("h100-sxm"),
        against=devices.named("gb200"),
    )
    assert found.against is not None
    ratio = found.against.break_even_ratio
    assert ratio == pytest.approx(1.6, abs=0.005)
    # At the break-even both cost the same.
    assert per_million_tokens(GB200, 728 * ratio) == pytest.approx(found.per_million_tokens)


def test_a_run_by_hand() -> None:
    listed = prices.load()
    listed = msgspec.structs.replace(
        listed,
        electricity_per_kwh=Priced(value=0.10, source="test"),
        pue_ratio=Priced(value=1.2, source="test"),
    )
    found = cost(
        Throughput(tokens_per_s=1000, source="test", step_tokens_count=20_000),
        prices=listed,
        price_per_hour=Priced(value=3.6, source="test"),
        devices_count=10,
        run_tokens_count=1e9,
        power_w=500,
    )
    # 3.6 per hour is 0.001 per second: 1000 tokens cost 0.001, a million 1.
    assert found.per_million_tokens == pytest.approx(1.0)
    assert found.per_step == pytest.approx(0.02)
    assert found.step_s == pytest.approx(2.0)
    assert found.per_run == pytest.approx(1000)
    assert found.run_s == pytest.approx(1e5)
    # 600 W at the meter: 0.6 J per token, 1/6 kWh per million.
    assert found.energy_per_token_j == pytest.approx(0.6)
    assert found.energy_per_million_tokens_kwh == pytest.approx(1 / 6)
    assert found.energy_cost_per_run == pytest.approx(1000 / 6 * 0.10)
    # The run's price is what all devices cost for its time.
    assert found.run_s is not None
    assert found.per_run == pytest.approx(10 * 3.6 * found.run_s / 3600)


def test_unknown_stays_unknown() -> None:
    found = cost(
        Throughput(tokens_per_s=1, source="test"),
        prices=prices.load(),
        price_per_hour=Priced(value=1, source="test"),
        against=devices.named("gb200"),
    )
    assert found.per_step is found.per_run is found.energy_per_token_j is None
    assert found.against is not None
    assert found.against.break_even_ratio == pytest.approx(GB200)
    # The peak of the first device is unknown.
    assert found.against.peak_ratio is None
    assert found.against.per_million_tokens_at_peak_ratio is None


def test_projection() -> None:
    assert projected_tokens_per_s(1e9, 6e12, 0.5) == pytest.approx(500)
    with pytest.raises(UsageError, match="utilization"):
        projected_tokens_per_s(1e9, 6e12, 1.5)


@pytest.mark.parametrize(("price", "rate"), [(0, 1), (-1, 1), (1, 0), (1, float("nan"))])
def test_what_is_not_positive_is_refused(price: float, rate: float) -> None:
    with pytest.raises(UsageError, match="more than zero"):
        per_million_tokens(price, rate)


def test_a_list_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "prices.json"
    mine = {
        "schema": "chopper.prices/1",
        "date": "2026-01",
        "currency": "EUR",
        "electricity_per_kwh": {"value": 0.2, "source": "bill"},
        "pue_ratio": {"value": 1.1, "source": "meter"},
        "devices": {"nvidia-h100-sxm": {"value": 2.0, "source": "contract"}},
    }
    file.write_text(json.dumps(mine))
    assert prices.load(file).devices["nvidia-h100-sxm"].value == 2.0
    for change, message in (
        ({"schema": "chopper.prices/9"}, "has schema"),
        ({"devices": {"x": {"value": 0, "source": ""}}}, "> 0.0"),
        ({"date": 3}, "Expected"),
        ({"extra": 1}, "unknown field"),
    ):
        file.write_text(json.dumps(mine | change))
        with pytest.raises(InputError, match=message):
            prices.load(file)
    with pytest.raises(InputError, match="cannot be read"):
        prices.load(tmp_path / "absent.json")
