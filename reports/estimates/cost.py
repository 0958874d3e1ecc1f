"""Money and energy of training as a page."""

from __future__ import annotations

from chopper import wording as fmt
from chopper.analyzers.estimates.cost import Cost
from chopper.reports.estimates.page import Grid, Page, Plot, lines_figure


def page(found: Cost) -> Page:
    """Cost per token, step and run, energy, and the other device."""

    def money(value: float | None) -> str:
        if value is None:
            return fmt.UNKNOWN
        if not 1e-4 <= value < 1e12:
            return f"{value:.3g} {found.currency}"
        digits = 4 if value < 0.1 else 3 if value < 10 else 0
        return f"{value:,.{digits}f} {found.currency}"

    rows = [
        ("per million tokens", money(found.per_million_tokens)),
        ("per step", money(found.per_step)),
        ("per run", money(found.per_run)),
        ("time of a step", fmt.duration(found.step_s * 1e9) if found.step_s else fmt.UNKNOWN),
        ("time of the run", _days(found.run_s)),
    ]
    energy = [
        ("power of one device", f"{found.power_w:.0f} W" if found.power_w else fmt.UNKNOWN),
        (
            "energy per token",
            f"{found.energy_per_token_j:.3g} J" if found.energy_per_token_j else "–",
        ),
        (
            "energy per million tokens",
            "–"
            if found.energy_per_million_tokens_kwh is None
            else f"{found.energy_per_million_tokens_kwh:.3g} kWh",
        ),
        ("its cost per million tokens", money(found.energy_cost_per_million_tokens)),
        ("its cost per run", money(found.energy_cost_per_run)),
    ]
    grids = [
        Grid(title="Cost", columns=("", "value"), rows=rows),
        Grid(
            title="Energy, at the meter",
            columns=("", "value"),
            rows=energy,
            note=f"{found.electricity_per_kwh:g} {found.currency}/kWh, PUE {found.pue_ratio:g}; power: "
            f"{found.power_source or 'not known'}",
        ),
    ]
    facts = [
        f"{found.price_per_device_hour:g} {found.currency} per device and hour: {found.price_source}",
        f"{found.tokens_per_s_per_device:,.0f} tokens/s per device: {found.throughput_source}",
        f"prices of {found.prices_date}",
    ]
    other = found.against
    marks = {}
    if other is not None:
        marks["break-even"] = other.break_even_ratio
        grids.append(
            Grid(
                title=f"Against {other.device}",
                columns=("", "value"),
                rows=[
                    ("its price per hour", money(other.price_per_device_hour)),
                    ("has to be faster by, to cost the same", f"{other.break_even_ratio:.2f}×"),
                    (
                        "is faster by peak (bf16)",
                        "–" if other.peak_ratio is None else f"{other.peak_ratio:.2f}×",
                    ),
                    (
                        "per million tokens, if as much faster as its peak",
                        money(other.per_million_tokens_at_peak_ratio),
                    ),
                ],
                note=other.price_source,
            )
        )
    speeds = [0.5 + 0.1 * i for i in range(36)]
    dearer = other.price_per_device_hour if other else found.price_per_device_hour
    scale = dearer / found.price_per_device_hour * found.per_million_tokens
    figure = lines_figure(
        {
            found.device or "this device": (speeds, [found.per_million_tokens] * len(speeds)),
            (other.device if other else "faster at the same price"): (
                speeds,
                [float(f"{scale / s:.5g}") for s in speeds],
            ),
        },
        x=f"times as fast as {found.device or 'this device'}",
        y=f"{found.currency} per million tokens",
        marks=marks,
    )
    return Page(
        title="Cost of training",
        verdict=f"{money(found.per_million_tokens)} per million tokens"
        + (f" on {found.device}." if found.device else "."),
        facts=tuple(facts),
        grids=tuple(grids),
        plots=(Plot(name="cost", title="Cost by speed", figure=figure),),
        assumptions=found.assumptions,
    )


def _days(seconds: float | None) -> str:
    if seconds is None:
        return fmt.UNKNOWN
    return fmt.duration(seconds * 1e9) if seconds < 86400 else f"{seconds / 86400:,.1f} days"
