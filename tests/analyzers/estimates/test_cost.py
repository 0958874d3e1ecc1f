from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from chopper.cli.estimates.cost import (
    Options,
    Throughput,
    cost,
    estimate,
    per_million_tokens,
)
from chopper.errors import InputError
from chopper.hardware import devices
from chopper.hardware.devices import Priced

H100, GB200 = 1.42, 2.27


def test_gpt_3_on_h100_and_gb200() -> None:
    """1.42 · 1e6 ÷ (3600 · 728) = 0.5418; 1.42 · 1.6 = 2.272."""
    listed = devices.load_prices()
    assert listed.devices["nvidia-h100-sxm"].value == H100
    assert listed.devices["nvidia-gb200"].value == GB200 == pytest.approx(1.6 * H100, abs=0.005)
    assert all(p.source for p in listed.devices.values())
    found = estimate(Options(tokens_per_s=728, device="h100-sxm", against="gb200"))
    assert f"{100 * found.per_million_tokens:.1f}" == "54.2"
    rival = found.against
    assert rival is not None
    assert rival.break_even_ratio == pytest.approx(1.6, abs=0.005)
    # At the break-even both cost the same.
    at_even = per_million_tokens(GB200, 728 * rival.break_even_ratio)
    assert at_even == pytest.approx(found.per_million_tokens)
    # 2500 / 989.4 TFLOP/s: 2.27 · 1e6 ÷ (3600 · 728 · 2.527).
    assert rival.per_million_tokens_at_peak_ratio == pytest.approx(0.3428, rel=0.001)


def test_a_run_by_hand(tmp_path: Path) -> None:
    listed = msgspec.structs.replace(
        devices.load_prices(),
        electricity_per_kwh=Priced(value=0.10, source="test"),
        pue_ratio=Priced(value=1.2, source="test"),
    )
    file = tmp_path / "prices.json"
    file.write_bytes(msgspec.json.encode(listed))
    found = cost(
        Options(prices=file, price=3.6, devices_count=10, tokens=1e9, power_w=500),
        Throughput(tokens_per_s=1000, source="test", step_tokens_count=20_000),
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
    found = estimate(Options(tokens_per_s=1, price=1, against="gb200"))
    assert found.per_step is found.per_run is found.energy_per_token_j is None
    assert found.against is not None
    assert found.against.break_even_ratio == pytest.approx(GB200)
    # The peak of the first device is unknown.
    assert found.against.peak_ratio is None
    assert found.against.per_million_tokens_at_peak_ratio is None


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
    assert devices.load_prices(file).devices["nvidia-h100-sxm"].value == 2.0
    for change, message in (
        ({"schema": "chopper.prices/9"}, "has schema"),
        ({"devices": {"x": {"value": 0, "source": ""}}}, "> 0.0"),
        ({"date": 3}, "Expected"),
        ({"extra": 1}, "unknown field"),
    ):
        file.write_text(json.dumps(mine | change))
        with pytest.raises(InputError, match=message):
            devices.load_prices(file)
    with pytest.raises(InputError, match="cannot be read"):
        devices.load_prices(tmp_path / "absent.json")
