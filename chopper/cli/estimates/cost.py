"""Money and energy per token, step and run.

$ per million tokens = price × 10⁶ ÷ (3600 × tokens/s per device). Prices are data with a date and
a source (chopper/data/prices.json) and can be overridden; none is invented for a device that has
none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

import msgspec

from chopper import wording as fmt
from chopper.analyzers.compare.same_work import device_of
from chopper.analyzers.estimates import Estimate, Option, assumed
from chopper.cli import _options
from chopper.cli._shared import attributed
from chopper.errors import UsageError
from chopper.hardware import devices
from chopper.hardware.devices import DevicePeaks, Priced, Prices
from chopper.models import architectures
from chopper.quantities import between
from chopper.reports.estimate import estimate_page, values
from chopper.reports.page import Page, Section
from chopper.views import view

_USUAL_UTILIZATION = (0.3, 0.5)
"""MFU that published trainings of large models reached: PaLM's table 3 (2204.02311), Llama 3."""
_J_PER_KWH, _DAY_S = 3.6e6, 86_400


class Options(_options.Options, kw_only=True, frozen=True):
    """Show what training costs: money and energy per step, per token and per run.

    Throughput and power are measured (RUN), given (--tokens-per-s), or projected from a model and
    a utilization (--model). Prices are dated, and yours to override.

    \b
    Examples:
      chopper estimate cost runs/mine --device h100-sxm --tokens 15e12
      chopper estimate cost --device h100-sxm --tokens-per-s 728 --against gb200
      chopper estimate cost --model llama3-8b --device gb200 --tokens 15e12
    """

    run: Annotated[str | None, Option("", argument=True)] = None
    device: Annotated[
        str | None, Option("Name in the table of devices. [default: the run's]", metavar="NAME")
    ] = None
    devices_count: Annotated[
        int | None, Option("Devices that train together. [default: the run's ranks, or 1]")
    ] = None
    tokens_per_s: Annotated[float | None, Option("Of one device, instead of a run's.")] = None
    model: Annotated[
        str | None, Option("Project the throughput of this model instead.", metavar="NAME")
    ] = None
    utilization_ratio: Annotated[float, Option("MFU of the projection.")] = 0.4
    price: Annotated[float | None, Option("Of a device and hour. [default: as listed]")] = None
    prices: Annotated[Path | None, Option("A price list of your own.", metavar="FILE")] = None
    power_w: Annotated[
        float | None, Option("Of one device. [default: measured, or the board's limit]")
    ] = None
    tokens: Annotated[float | None, Option("Tokens of the whole run, for its cost.")] = None
    against: Annotated[
        str | None, Option("Another device: when does it pay off?", metavar="NAME")
    ] = None


class Throughput(msgspec.Struct, kw_only=True, frozen=True):
    """Tokens per second of one device with their source, and what else a run recorded."""

    tokens_per_s: float
    source: str
    between: tuple[float, float] | None = None
    devices_count: int = 1
    device: DevicePeaks | None = None
    power_w: float | None = None
    step_tokens_count: float | None = None
    """Over all devices."""


class Against(msgspec.Struct, kw_only=True, frozen=True):
    """A second device compared with the first."""

    device: str
    price_per_device_hour: float
    price_source: str
    break_even_ratio: float
    """Factor by which it has to be faster for the same cost per token."""
    peak_ratio: float | None
    """Its peak over the first device's, in bf16; null if a peak is unknown."""
    per_million_tokens_at_peak_ratio: float | None


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
    """Range of the throughput: the middle half of the measured steps, or a usual utilization."""
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


def per_million_tokens(price_per_hour: float, tokens_per_s: float) -> float:
    """Return price × 10⁶ ÷ (3600 × tokens per second), of one device."""
    return price_per_hour * 1e6 / (3600 * tokens_per_s)


def estimate(options: Options) -> Cost:
    """Return money and energy at a throughput that is measured, given or projected."""
    options.exactly_one("run", "tokens_per_s", "model", missing="no throughput")
    if "utilization_ratio" in options.given and not options.model:
        raise UsageError("--utilization needs --model, whose throughput it projects")
    return cost(options, _measured(options) if options.run else _throughput(options))


def cost(options: Options, throughput: Throughput) -> Cost:
    """Return money, energy and time; price, throughput and power are of one device.

    What the options leave open is the run's, the listed price, or the board's limit.
    """
    rate, of_run = throughput.tokens_per_s, options.tokens
    device = devices.named(options.device) if options.device else throughput.device
    count = options.devices_count or throughput.devices_count
    prices = devices.load_prices(options.prices)
    if options.price is not None:
        price = Priced(value=options.price, source="given")
    elif device is not None:
        price = _listed(prices, device)
    else:
        raise UsageError("the device is unknown, so it has no price; specify --device or --price")
    power_w, power_source = options.power_w, "given"
    if power_w is None:
        power_w, power_source = throughput.power_w, "measured in the run"
    if power_w is None and device is not None:
        power_w, power_source = device.board_power_w.value, "the board's limit, not a measurement"
    for name, value, least, most in (
        ("price", price.value, 1e-6, 1e9),
        ("tokens per second of a device", rate, 1e-3, 1e12),
        ("devices", count, 1, 1e9),
        ("tokens", of_run, 1, 1e24),
        ("power", power_w, 1e-3, 1e6),
    ):
        if value is not None:
            between(value, least, most, name)
    million, of_step = per_million_tokens(price.value, rate), throughput.step_tokens_count
    tariff, pue = prices.electricity_per_kwh.value, prices.pue_ratio.value
    joule = _times(power_w, pue / rate)
    kwh = _times(joule, 1e6 / _J_PER_KWH)
    return Cost(
        assumptions=assumed("cost"),
        device=device.label if device else None,
        price_per_device_hour=price.value,
        price_source=price.source,
        currency=prices.currency,
        prices_date=prices.date,
        devices_count=count,
        tokens_per_s_per_device=rate,
        throughput_source=throughput.source,
        tokens_per_s_between=throughput.between,
        per_million_tokens=million,
        per_step=_times(of_step, million / 1e6),
        step_s=_times(of_step, 1 / (count * rate)),
        run_tokens_count=of_run,
        run_s=_times(of_run, 1 / (count * rate)),
        per_run=_times(of_run, million / 1e6),
        power_w=power_w,
        power_source=None if power_w is None else power_source,
        energy_per_token_j=joule,
        energy_per_million_tokens_kwh=kwh,
        energy_cost_per_million_tokens=_times(kwh, tariff),
        energy_cost_per_run=None if of_run is None else _times(kwh, tariff * of_run / 1e6),
        electricity_per_kwh=tariff,
        pue_ratio=pue,
        against=_against(options.against, price, device, rate, prices) if options.against else None,
    )


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _listed(prices: Prices, device: DevicePeaks) -> Priced:
    if device.id not in prices.devices:
        raise UsageError(
            f"no price of {device.label} in the list of {prices.date}, which has "
            f"{', '.join(sorted(prices.devices))}; give a list that has it as --prices, or "
            "--price for --device"
        )
    return prices.devices[device.id]


def _against(
    name: str, price: Priced, device: DevicePeaks | None, tokens_per_s: float, prices: Prices
) -> Against:
    """Compare a second device with the first, at the same tokens per FLOP of peak."""
    other = devices.named(name)
    other_price = _listed(prices, other)
    mine, theirs = device.flop_per_s("bf16") if device else None, other.flop_per_s("bf16")
    ratio = theirs / mine if mine and theirs else None
    return Against(
        device=other.label,
        price_per_device_hour=other_price.value,
        price_source=other_price.source,
        break_even_ratio=other_price.value / price.value,
        peak_ratio=ratio,
        per_million_tokens_at_peak_ratio=ratio
        and per_million_tokens(other_price.value, tokens_per_s * ratio),
    )


def _throughput(options: Options) -> Throughput:
    """Return the given throughput, or a model's: peak × utilization ÷ (6 × active parameters)."""
    if options.tokens_per_s:
        return Throughput(tokens_per_s=options.tokens_per_s, source="given")
    if options.device is None:
        raise UsageError("--model needs a device to be projected onto; give --device")
    device = devices.named(options.device)
    model = architectures.named(options.model or "")
    peak = device.flop_per_s("bf16") or device.flop_per_s("fp16")
    if peak is None:
        raise UsageError(f"--device {device.label}: its 16-bit peak is unknown; use --tokens-per-s")
    utilization = options.utilization_ratio
    if not 0 < utilization <= 1:
        raise UsageError(f"utilization: found {utilization:g}, expected above 0, at most 1")
    rate, low, high = (
        peak * ratio / (6 * model.active_count) for ratio in (utilization, *_USUAL_UTILIZATION)
    )
    return Throughput(
        tokens_per_s=rate,
        source=f"projected: {model.name} at {fmt.percent(utilization, '.0f')} of "
        f"{peak / 1e12:.0f} TFLOP/s",
        between=None if "utilization_ratio" in options.given else (low, high),
    )


def _measured(options: Options) -> Throughput:
    """Return throughput, power and device of a run; refuse to price it on another device."""
    source = str(options.run)
    priced = devices.named(options.device) if options.device else None
    attribution = attributed([source])
    ranks = attribution.ranks
    names = sorted({name for r in ranks if (name := device_of(attribution, r.rank)) is not None})
    recorded = [devices.lookup(name) for name in names]
    # If device events name no device, the user says which one it was.
    if priced is not None and any(device is None or device.id != priced.id for device in recorded):
        raise UsageError(
            f"--device {priced.label}: {source} was measured on {', '.join(names)}, whose tokens "
            f"per second are not those of {priced.label}; give --tokens-per-s of that device or "
            "project them with --model, or omit --device and give --price of what it ran on"
        )
    rates = [
        row["tokens_per_s"]
        for row in view(attribution, "utilization").to_pylist()
        # A run of one rank has no rows but those of the whole.
        if (row["rank"] is not None or len(ranks) == 1)
        and row["ceiling"] == "theoretical"
        and row["tokens_per_s"] is not None
    ]
    if not rates:
        raise UsageError(
            f"{source}: how many tokens it trained on is not recorded; give --tokens-per-s instead"
        )
    power_w = [
        row["power_mean_w"]
        for row in view(attribution, "energy").to_pylist()
        if row["scope"] == "run" and str(row["source"]).startswith("device") and row["power_mean_w"]
    ]
    rate = sum(rates) / len(rates)
    steps = max((rank.steps for rank in ranks), default=0)
    # Tokens per second are by the time of steps without a trace, where there are some.
    step_time = attribution.step_time()
    time_s = max(rank.observed_ns for rank in ranks) * step_time.scale / 1e9
    middle_half, spread = None, step_time.untraced
    if spread is not None:
        scaled = rate * spread.value_ns
        middle_half = scaled / spread.quartile_high_ns, scaled / spread.quartile_low_ns
    return Throughput(
        tokens_per_s=rate,
        source=f"measured in {source}, mean of {fmt.plural(len(rates), 'rank')}",
        between=middle_half,
        devices_count=len(ranks),
        device=recorded[0] if len(recorded) == 1 else None,
        power_w=sum(power_w) / len(power_w) if power_w else None,
        step_tokens_count=sum(rates) * time_s / steps if steps else None,
    )


def page(result: Cost) -> Page:
    """Return the page: cost per token, step and run, energy, and the other device."""
    price, energy = result.price_per_device_hour, result.energy_cost_per_million_tokens
    rate = f"{result.tokens_per_s_per_device:,.0f} tokens/s per device"
    between = ""
    if result.tokens_per_s_between:
        most, least = (per_million_tokens(price, rate) for rate in result.tokens_per_s_between)
        between = f" ({_number(least)} – {_number(most)})"
    of_energy = "its power is not known"
    if energy is not None:
        of_energy = f"energy costs {fmt.ratio(energy / result.per_million_tokens)} as much"
    remedy = "--against DEVICE, to see when another one pays"
    if (other := result.against) is not None:
        peak = f" (peak: {other.peak_ratio:.2f}×)" if other.peak_ratio else ""
        remedy = f"{other.device} if more than {other.break_even_ratio:.2f}× as fast{peak}"
    elif result.throughput_source.startswith("projected: "):
        remedy = "a recorded run instead of --model, for the tokens/s it reaches"
    return estimate_page(
        result,
        title="Cost of training",
        headline=f"{_money(result, result.per_million_tokens)} per million tokens{between}"
        f"{f' on {result.device}' if result.device else ''}.",
        limit=f"the device, {price:g} {result.currency} an hour; {of_energy}",
        assumes=f"{rate}, {fmt.ellipsize(result.throughput_source, 67 - len(rate))}",
        remedy=remedy,
        facts=(
            f"{price:g} {result.currency} per device and hour: {result.price_source}",
            f"{rate}: {result.throughput_source}",
            f"prices of {result.prices_date}",
        ),
        sections=_sections(result),
    )


def _money(result: Cost, value: float | None) -> str:
    return fmt.UNKNOWN if value is None else f"{_number(value)} {result.currency}"


def _number(value: float) -> str:
    if not 1e-4 <= value < 1e12:
        return f"{value:.3g}"
    return f"{value:,.{4 if value < 0.1 else 3 if value < 10 else 0}f}"


def _some(value: float | None, digits: str, unit: str) -> str:
    return f"{value:{digits}}{unit}" if value else fmt.UNKNOWN


def _sections(result: Cost) -> list[Section]:
    kwh, run_s = result.energy_per_million_tokens_kwh, result.run_s
    run = fmt.duration(_times(run_s, 1e9))
    if run_s is not None and run_s >= _DAY_S:
        run = f"{run_s / _DAY_S:,.1f} days"
    costs = [
        ("per million tokens", _money(result, result.per_million_tokens)),
        ("per step", _money(result, result.per_step)),
        ("per run", _money(result, result.per_run)),
        ("time of a step", fmt.duration(_times(result.step_s, 1e9))),
        ("time of the run", run),
    ]
    energy = [
        ("power of one device", _some(result.power_w, ".0f", " W")),
        ("energy per token", _some(result.energy_per_token_j, ".3g", " J")),
        ("energy per million tokens", _some(kwh, ".3g", " kWh")),
        ("its cost per million tokens", _money(result, result.energy_cost_per_million_tokens)),
        ("its cost per run", _money(result, result.energy_cost_per_run)),
    ]
    note = (
        f"{result.electricity_per_kwh:g} {result.currency}/kWh, PUE {result.pue_ratio:g}; "
        f"power: {result.power_source or 'not known'}"
    )
    sections = [values("Cost", costs), values("Energy, at the meter", energy, note)]
    if (other := result.against) is not None:
        at_peak = _money(result, other.per_million_tokens_at_peak_ratio)
        rows = [
            ("its price per hour", _money(result, other.price_per_device_hour)),
            ("speedup needed for equal cost", _some(other.break_even_ratio, ".2f", "×")),
            ("is faster by peak (bf16)", _some(other.peak_ratio, ".2f", "×")),
            ("per million tokens, if its speedup equals the ratio of the peaks", at_peak),
        ]
        sections.append(values(f"Against {other.device}", rows, other.price_source))
    return sections
