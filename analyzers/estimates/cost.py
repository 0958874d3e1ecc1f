"""Cost of training: money and energy per step, token and run, and when a more expensive device
pays.

$ per million tokens = price × 10⁶ ÷ (3600 × tokens/s per device). Prices are data with a date and
a source (chopper/data/prices.json) and can be overridden; none is invented for a device that has
none.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from chopper.analyzers.estimates import Estimate, assumed
from chopper.errors import UsageError
from chopper.hardware.prices import Priced, Prices
from chopper.quantities import between, positive

_J_PER_KWH = 3.6e6
_RANGES = {
    "price": (1e-6, 1e9),
    "tokens per second of a device": (1e-3, 1e12),
    "devices": (1, 1e9),
    "electricity": (1e-6, 1e6),
    "PUE": (1, 10),
    "tokens of a step": (1, 1e18),
    "tokens": (1, 1e24),
    "power": (1e-3, 1e6),
}
"""Least and most that is bought anywhere."""


class Cost(Estimate, kw_only=True, frozen=True):
    """Money and energy of training at a throughput; unknown is null."""

    SCHEMA: ClassVar[str] = "chopper.estimate.cost/1"

    device: str | None
    price_per_device_hour: float
    price_source: str
    currency: str
    prices_date: str
    devices_count: int
    tokens_per_s_per_device: float
    throughput_source: str
    tokens_per_s_between: tuple[float, float] | None
    """Range of the throughput: half of the measured steps, or the error of a projection."""
    per_million_tokens: float
    per_step: float | None
    step_s: float | None
    run_tokens_count: float | None
    run_s: float | None
    per_run: float | None
    power_w: float | None
    """Of one device."""
    power_source: str | None
    energy_per_token_j: float | None
    """At the meter: with PUE."""
    energy_per_million_tokens_kwh: float | None
    energy_cost_per_million_tokens: float | None
    energy_cost_per_run: float | None
    electricity_per_kwh: float
    pue_ratio: float
    against: Against | None


class Against(msgspec.Struct, kw_only=True, frozen=True):
    """A dearer (or cheaper) device beside this one."""

    device: str
    price_per_device_hour: float
    price_source: str
    break_even_ratio: float
    """Factor by which it has to be faster for the same cost per token."""
    peak_ratio: float | None
    """Its peak over this device's, in bf16; null where a peak is not known."""
    per_million_tokens_at_peak_ratio: float | None


def per_million_tokens(price_per_hour: float, tokens_per_s: float) -> float:
    """Price × 10⁶ ÷ (3600 × tokens per second), of one device."""
    positive(price_per_hour, "price")
    positive(tokens_per_s, "tokens per second")
    return price_per_hour * 1e6 / (3600 * tokens_per_s)


def break_even_ratio(price_per_hour: float, other_per_hour: float) -> float:
    """Return the factor by which the other device has to be faster for the same cost per token."""
    positive(price_per_hour, "price")
    positive(other_per_hour, "price of the other device")
    return other_per_hour / price_per_hour


def projected_tokens_per_s(
    parameters_count: float, flop_per_s: float, utilization_ratio: float
) -> float:
    """Tokens per second and device: peak × utilization ÷ (6 × parameters that a token goes
    through).
    """
    positive(parameters_count, "parameters")
    positive(flop_per_s, "peak")
    if not 0 < utilization_ratio <= 1:
        raise UsageError(f"utilization: found {utilization_ratio:g}, expected above 0, at most 1")
    return flop_per_s * utilization_ratio / (6 * parameters_count)


def cost(
    *,
    prices: Prices,
    price_per_hour: Priced,
    tokens_per_s: float,
    throughput_source: str,
    tokens_per_s_between: tuple[float, float] | None = None,
    device: str | None = None,
    devices_count: int = 1,
    step_tokens_count: float | None = None,
    run_tokens_count: float | None = None,
    power_w: float | None = None,
    power_source: str | None = None,
    electricity_per_kwh: float | None = None,
    pue_ratio: float | None = None,
    against: Against | None = None,
) -> Cost:
    """Return money, energy and time from a price, a throughput and a power.

    Args:
        prices: list with the defaults of electricity and PUE.
        price_per_hour: of one device.
        tokens_per_s: of one device.
        throughput_source: measured or projected, in words.
        tokens_per_s_between: the range in which it lies.
        device: its name.
        devices_count: number of devices that train together.
        step_tokens_count, run_tokens_count: over all devices.
        power_w: of one device, mean.
        power_source: measured or from the board's limit, in words.
        electricity_per_kwh, pue_ratio: price of energy, and the building's power over computers'.
        against: another device, made by :func:`compare`.

    Raises:
        UsageError: a value outside its range.
    """
    tariff = electricity_per_kwh
    if tariff is None:
        tariff = prices.electricity_per_kwh.value
    pue = prices.pue_ratio.value if pue_ratio is None else pue_ratio
    given = (
        *(price_per_hour.value, tokens_per_s, devices_count, tariff, pue),
        *(step_tokens_count, run_tokens_count, power_w),
    )
    for (name, limits), value in zip(_RANGES.items(), given, strict=True):
        if value is not None:
            between(value, *limits, name)
    million = per_million_tokens(price_per_hour.value, tokens_per_s)
    energy = power_w * pue / tokens_per_s if power_w is not None else None
    kwh = energy * 1e6 / _J_PER_KWH if energy is not None else None
    of_run = None if run_tokens_count is None else run_tokens_count / 1e6
    together = devices_count * tokens_per_s
    return Cost(
        assumptions=assumed("cost"),
        device=device,
        price_per_device_hour=price_per_hour.value,
        price_source=price_per_hour.source,
        currency=prices.currency,
        prices_date=prices.date,
        devices_count=devices_count,
        tokens_per_s_per_device=tokens_per_s,
        throughput_source=throughput_source,
        tokens_per_s_between=tokens_per_s_between,
        per_million_tokens=million,
        per_step=None if step_tokens_count is None else million * step_tokens_count / 1e6,
        step_s=None if step_tokens_count is None else step_tokens_count / together,
        run_tokens_count=run_tokens_count,
        run_s=None if run_tokens_count is None else run_tokens_count / together,
        per_run=None if of_run is None else million * of_run,
        power_w=power_w,
        power_source=power_source,
        energy_per_token_j=energy,
        energy_per_million_tokens_kwh=kwh,
        energy_cost_per_million_tokens=None if kwh is None else kwh * tariff,
        energy_cost_per_run=None if kwh is None or of_run is None else kwh * tariff * of_run,
        electricity_per_kwh=tariff,
        pue_ratio=pue,
        against=against,
    )


def compare(
    *,
    device: str,
    price: Priced,
    other_price: Priced,
    tokens_per_s: float,
    flop_per_s: float | None,
    other_flop_per_s: float | None,
) -> Against:
    """A second device beside the first, at the same tokens per FLOP of peak."""
    ratio = other_flop_per_s / flop_per_s if flop_per_s and other_flop_per_s else None
    return Against(
        device=device,
        price_per_device_hour=other_price.value,
        price_source=other_price.source,
        break_even_ratio=break_even_ratio(price.value, other_price.value),
        peak_ratio=ratio,
        per_million_tokens_at_peak_ratio=None
        if ratio is None
        else per_million_tokens(other_price.value, tokens_per_s * ratio),
    )
