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
from chopper.quantities import between, positive
from chopper.reports.estimate import estimate_page, values
from chopper.reports.page import Page, Section
from chopper.views import view

_USUAL_UTILIZATION = (0.3, 0.5)
"""MFU that published trainings of large models reached: PaLM's table 3 (2204.02311), Llama 3."""
_J_PER_KWH = 3.6e6


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
    tokens_per_s: Annotated[
        float | None, Option("Of one device, instead of a run's throughput.")
    ] = None
    model: Annotated[
        str | None, Option("Project the throughput of this model instead.", metavar="NAME")
    ] = None
    utilization_ratio: Annotated[float, Option("MFU of the projection.")] = 0.4
    price: Annotated[
        float | None, Option("Price of one device per hour. [default: from the list]")
    ] = None
    prices: Annotated[Path | None, Option("A price list of your own.", metavar="FILE")] = None
    power_w: Annotated[
        float | None,
        Option("Power of one device in watts. [default: measured, or the board limit]"),
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
    positive(price_per_hour, "price")
    positive(tokens_per_s, "tokens per second")
    return price_per_hour * 1e6 / (3600 * tokens_per_s)


def estimate(options: Options) -> Cost:
    """Return money and energy at a throughput that is measured, given or projected."""
    options.exactly_one("run", "tokens_per_s", "model", missing="no throughput")
    if "utilization_ratio" in options.given and not options.model:
        raise UsageError("--utilization needs --model, whose throughput it projects")
    device = devices.named(options.device) if options.device else None
    throughput = _measured(options.run, device) if options.run else _throughput(device, options)
    device = device or throughput.device
    listed = devices.load_prices(options.prices)
    price = Priced(value=options.price, source="given") if options.price is not None else None
    power_w, power_source = throughput.power_w, "measured in the run"
    if options.power_w is not None:
        power_w, power_source = options.power_w, "given"
    elif not power_w and device is not None and device.board_power_w.value is not None:
        power_w = float(device.board_power_w.value)
        power_source = "the board's limit, not a measurement"
    return cost(
        throughput,
        prices=listed,
        price_per_hour=price or _listed(listed, device, "; give --price"),
        device=device,
        devices_count=options.devices_count or throughput.devices_count,
        run_tokens_count=options.tokens,
        power_w=power_w,
        power_source=None if power_w is None else power_source,
        against=devices.named(options.against) if options.against is not None else None,
    )


def _listed(listed: Prices, device: DevicePeaks | None, remedy: str) -> Priced:
    if device is None:
        raise UsageError("the device is unknown, so it has no price; specify --device or --price")
    if device.id not in listed.devices:
        known = ", ".join(sorted(listed.devices))
        raise UsageError(
            f"no price of {device.label} in the list of {listed.date}, which has {known}{remedy}"
        )
    return listed.devices[device.id]


def cost(
    throughput: Throughput,
    *,
    prices: Prices,
    price_per_hour: Priced,
    device: DevicePeaks | None = None,
    devices_count: int = 1,
    run_tokens_count: float | None = None,
    power_w: float | None = None,
    power_source: str | None = None,
    against: DevicePeaks | None = None,
) -> Cost:
    """Return money, energy and time from a price, a throughput and a power, each of one device.

    Raises:
        UsageError: a value outside its range, or no price of the other device.
    """
    rate = throughput.tokens_per_s
    # Least and most that is bought anywhere.
    for name, value, least, most in (
        ("price", price_per_hour.value, 1e-6, 1e9),
        ("tokens per second of a device", rate, 1e-3, 1e12),
        ("devices", devices_count, 1, 1e9),
        ("tokens", run_tokens_count, 1, 1e24),
        ("power", power_w, 1e-3, 1e6),
    ):
        if value is not None:
            between(value, least, most, name)
    million = per_million_tokens(price_per_hour.value, rate)
    tariff, pue = prices.electricity_per_kwh.value, prices.pue_ratio.value
    energy = power_w * pue / rate if power_w is not None else None
    kwh = energy * 1e6 / _J_PER_KWH if energy is not None else None
    of_step, of_run = throughput.step_tokens_count, run_tokens_count
    together = devices_count * rate
    return Cost(
        assumptions=assumed("cost"),
        device=device.label if device else None,
        price_per_device_hour=price_per_hour.value,
        price_source=price_per_hour.source,
        currency=prices.currency,
        prices_date=prices.date,
        devices_count=devices_count,
        tokens_per_s_per_device=rate,
        throughput_source=throughput.source,
        tokens_per_s_between=throughput.between,
        per_million_tokens=million,
        per_step=None if of_step is None else million * of_step / 1e6,
        step_s=None if of_step is None else of_step / together,
        run_tokens_count=of_run,
        run_s=None if of_run is None else of_run / together,
        per_run=None if of_run is None else million * of_run / 1e6,
        power_w=power_w,
        power_source=power_source,
        energy_per_token_j=energy,
        energy_per_million_tokens_kwh=kwh,
        energy_cost_per_million_tokens=None if kwh is None else kwh * tariff,
        energy_cost_per_run=None if kwh is None or not of_run else kwh * tariff * of_run / 1e6,
        electricity_per_kwh=tariff,
        pue_ratio=pue,
        against=None
        if against is None
        else _against(rate, price_per_hour, device, against, prices),
    )


def _against(
    tokens_per_s: float, price: Priced, device: DevicePeaks | None, other: DevicePeaks, of: Prices
) -> Against:
    """Compare a second device with the first, at the same tokens per FLOP of peak."""
    other_price = _listed(of, other, "")
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


def _throughput(device: DevicePeaks | None, options: Options) -> Throughput:
    """Return the given throughput, or a model's: peak × utilization ÷ (6 × active parameters)."""
    if options.tokens_per_s:
        return Throughput(tokens_per_s=options.tokens_per_s, source="given")
    if device is None:
        raise UsageError("--model needs a device to be projected onto; give --device")
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


def _measured(source: str, priced: DevicePeaks | None) -> Throughput:
    """Return throughput, power and device of a run; refuse to price it on another device."""
    attribution = attributed([source])
    for rank in attribution.ranks if priced is not None else ():
        name = device_of(attribution, rank.rank)
        known = devices.lookup(rank.device) if rank.device else None
        # If device events name no device, the user says which one it was.
        if priced is not None and name is not None and (known is None or known.id != priced.id):
            raise UsageError(
                f"--device {priced.label}: {source} was measured on {name}, whose tokens per "
                f"second are not those of {priced.label}; give --tokens-per-s of that device or "
                "project them with --model, or omit --device and give --price of what it ran on"
            )
    rate_by_rank = {
        row["rank"]: row["tokens_per_s"]
        for row in view(attribution, "utilization").to_pylist()
        # A run of one rank has no rows but those of the whole.
        if (row["rank"] is not None or len(attribution.ranks) == 1)
        and row["tokens_per_s"] is not None
    }
    rates = [*rate_by_rank.values()]
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
    names = {rank.device for rank in attribution.ranks if rank.device}
    steps = max((rank.steps for rank in attribution.ranks), default=0)
    # Tokens per second are by the time of steps without a trace, where there are some.
    step_time = attribution.step_time()
    time_ns = max(rank.observed_ns for rank in attribution.ranks) * step_time.scale
    middle_half, spread = None, step_time.untraced
    if spread is not None:
        quartiles_ns = spread.quartile_high_ns, spread.quartile_low_ns
        low, high = (rate * spread.value_ns / step_ns for step_ns in quartiles_ns)
        middle_half = low, high
    return Throughput(
        tokens_per_s=rate,
        source=f"measured in {source}, mean of {fmt.plural(len(rates), 'rank')}",
        between=middle_half,
        devices_count=len(attribution.ranks),
        device=devices.lookup(names.pop()) if len(names) == 1 else None,
        power_w=sum(power_w) / len(power_w) if power_w else None,
        step_tokens_count=sum(rates) * time_ns / 1e9 / steps if steps else None,
    )


def page(result: Cost) -> Page:
    """Return the page: cost per token, step and run, energy, and the other device."""
    between = ""
    if result.tokens_per_s_between:
        price = result.price_per_device_hour
        low, high = (per_million_tokens(price, rate) for rate in result.tokens_per_s_between[::-1])
        between = f" ({_number(low)} – {_number(high)})"
    of_device = f" on {result.device}" if result.device else ""
    rate = f"{result.tokens_per_s_per_device:,.0f} tokens/s per device"
    limit = f"the device, {result.price_per_device_hour:g} {result.currency} an hour"
    energy = result.energy_cost_per_million_tokens
    return estimate_page(
        result,
        title="Cost of training",
        headline=f"{_money(result, result.per_million_tokens)} per million tokens"
        f"{between}{of_device}.",
        limit=f"{limit}; its power is not known"
        if energy is None
        else f"{limit}; energy costs {fmt.ratio(energy / result.per_million_tokens)} as much",
        assumes=f"{rate}, {fmt.ellipsize(result.throughput_source, 67 - len(rate))}",
        remedy=_remedy(result),
        facts=(
            f"{result.price_per_device_hour:g} {result.currency} per device and hour: "
            f"{result.price_source}",
            f"{rate}: {result.throughput_source}",
            f"prices of {result.prices_date}",
        ),
        sections=_sections(result),
    )


def _remedy(result: Cost) -> str:
    other = result.against
    if other is None:
        if result.throughput_source.startswith("projected: "):
            return "a recorded run instead of --model, for the tokens/s it reaches"
        return "--against DEVICE, to see when another one pays"
    peak = f" (peak: {other.peak_ratio:.2f}×)" if other.peak_ratio else ""
    return f"{other.device} if more than {other.break_even_ratio:.2f}× as fast{peak}"


def _money(result: Cost, value: float | None) -> str:
    return fmt.UNKNOWN if value is None else f"{_number(value)} {result.currency}"


def _number(value: float) -> str:
    if not 1e-4 <= value < 1e12:
        return f"{value:.3g}"
    return f"{value:,.{4 if value < 0.1 else 3 if value < 10 else 0}f}"


def _some(value: float | None, digits: str, unit: str) -> str:
    return f"{value:{digits}}{unit}" if value else fmt.UNKNOWN


def _sections(result: Cost) -> list[Section]:
    run = fmt.duration(None if result.run_s is None else result.run_s * 1e9)
    if result.run_s is not None and result.run_s >= 86400:
        run = f"{result.run_s / 86400:,.1f} days"
    costs = [
        ("per million tokens", _money(result, result.per_million_tokens)),
        ("per step", _money(result, result.per_step)),
        ("per run", _money(result, result.per_run)),
        ("time of a step", fmt.duration(result.step_s * 1e9 if result.step_s else None)),
        ("time of the run", run),
    ]
    million_kwh = result.energy_per_million_tokens_kwh
    energy = [
        ("power of one device", _some(result.power_w, ".0f", " W")),
        ("energy per token", _some(result.energy_per_token_j, ".3g", " J")),
        ("energy per million tokens", _some(million_kwh, ".3g", " kWh")),
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
