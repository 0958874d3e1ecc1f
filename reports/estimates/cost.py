"""Money and energy of training as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chopper import wording as fmt
from chopper.reports.estimates.parts import estimate_page, lines_figure, values
from chopper.reports.page import Figure, Page, Section

if TYPE_CHECKING:
    from chopper.analyzers.estimates.cost import Against, Cost


def page(result: Cost) -> Page:
    """Return cost per token, step and run, energy, and the other device."""
    of_device = f" on {result.device}." if result.device else "."
    against = (_against(result, result.against),) if result.against else ()
    return estimate_page(
        result,
        title="Cost of training",
        headline=f"{_money(result, result.per_million_tokens)} per million tokens{of_device}",
        facts=(
            f"{result.price_per_device_hour:g} {result.currency} per device and hour: "
            f"{result.price_source}",
            f"{result.tokens_per_s_per_device:,.0f} tokens/s per device: "
            f"{result.throughput_source}",
            f"prices of {result.prices_date}",
        ),
        figures=(_figure(result),),
        sections=(_costs(result), _energy(result), *against),
    )


def _money(result: Cost, value: float | None) -> str:
    if value is None:
        return fmt.UNKNOWN
    if not 1e-4 <= value < 1e12:
        return f"{value:.3g} {result.currency}"
    digits = 4 if value < 0.1 else 3 if value < 10 else 0
    return f"{value:,.{digits}f} {result.currency}"


def _three(value: float | None, unit: str) -> str:
    return f"{value:.3g} {unit}" if value else fmt.UNKNOWN


def _times(value: float | None) -> str:
    return fmt.UNKNOWN if value is None else f"{value:.2f}×"


def _days(seconds: float | None) -> str:
    if seconds is None:
        return fmt.UNKNOWN
    return fmt.duration(seconds * 1e9) if seconds < 86400 else f"{seconds / 86400:,.1f} days"


def _costs(result: Cost) -> Section:
    return values(
        "Cost",
        [
            ("per million tokens", _money(result, result.per_million_tokens)),
            ("per step", _money(result, result.per_step)),
            ("per run", _money(result, result.per_run)),
            ("time of a step", fmt.duration(result.step_s * 1e9 if result.step_s else None)),
            ("time of the run", _days(result.run_s)),
        ],
    )


def _energy(result: Cost) -> Section:
    return values(
        "Energy, at the meter",
        [
            ("power of one device", f"{result.power_w:.0f} W" if result.power_w else fmt.UNKNOWN),
            ("energy per token", _three(result.energy_per_token_j, "J")),
            ("energy per million tokens", _three(result.energy_per_million_tokens_kwh, "kWh")),
            (
                "its cost per million tokens",
                _money(result, result.energy_cost_per_million_tokens),
            ),
            ("its cost per run", _money(result, result.energy_cost_per_run)),
        ],
        note=f"{result.electricity_per_kwh:g} {result.currency}/kWh, PUE {result.pue_ratio:g}; "
        f"power: {result.power_source or 'not known'}",
    )


def _against(result: Cost, other: Against) -> Section:
    return values(
        f"Against {other.device}",
        [
            ("its price per hour", _money(result, other.price_per_device_hour)),
            ("has to be faster by, to cost the same", _times(other.break_even_ratio)),
            ("is faster by peak (bf16)", _times(other.peak_ratio)),
            (
                "per million tokens, if as much faster as its peak",
                _money(result, other.per_million_tokens_at_peak_ratio),
            ),
        ],
        note=other.price_source,
    )


def _figure(result: Cost) -> Figure:
    """Return the cost of a million tokens by how much faster a device of the same price is."""
    other = result.against
    speeds = [0.5 + 0.1 * i for i in range(36)]
    price = other.price_per_device_hour if other else result.price_per_device_hour
    scale = price / result.price_per_device_hour * result.per_million_tokens
    figure = lines_figure(
        {
            result.device or "this device": (speeds, [result.per_million_tokens] * len(speeds)),
            other.device if other else "faster at the same price": (
                speeds,
                [float(f"{scale / s:.5g}") for s in speeds],
            ),
        },
        x=f"times as fast as {result.device or 'this device'}",
        y=f"{result.currency} per million tokens",
        marks={"break-even": other.break_even_ratio} if other else {},
    )
    return Figure(name="cost", title="Cost by speed", figure=figure)
