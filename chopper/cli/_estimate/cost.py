"""``chopper estimate cost``: money and energy per token, step and run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from chopper.cli._complete import paths
from chopper.cli._estimate.common import COUNT, NUMBER, check, contradict, show, shown
from chopper.cli._estimate.common import given as was_given
from chopper.cli._path import NamedPath
from chopper.errors import UsageError

if TYPE_CHECKING:
    from chopper.analyzers.estimates.cost import Against, Priced, Prices
    from chopper.attribution import Attribution
    from chopper.hardware.devices import DevicePeaks


@click.command("cost", short_help="Money and energy per token, step and run.")
@click.argument("run", required=False, shell_complete=paths)
@click.option("--device", metavar="NAME", help="Of the table of devices.  [default: the run's]")
@click.option(
    "--devices", type=COUNT, help="That train together.  [default: the run's ranks, or 1]"
)
@click.option("--tokens-per-s", type=NUMBER, help="Of one device, instead of a run's.")
@click.option("--model", metavar="NAME", help="Project the throughput of this model instead.")
@click.option(
    "--utilization", type=NUMBER, default="0.4", show_default=True, help="MFU of the projection."
)
@click.option("--price", type=NUMBER, help="Of one device for one hour.  [default: from the list]")
@click.option(
    "--prices",
    type=NamedPath(),
    metavar="FILE",
    help="A list of prices of your own.",
)
@click.option("--electricity", type=NUMBER, help="Per kWh.  [default: from the list]")
@click.option(
    "--pue", type=NUMBER, help="Building's power over computers'.  [default: from the list]"
)
@click.option(
    "--power", type=NUMBER, help="Watts of one device.  [default: measured, or the board's]"
)
@click.option("--tokens", type=NUMBER, help="Of the whole run, for its cost.")
@click.option("--step-tokens", type=NUMBER, help="Of one step over all devices, for its cost.")
@click.option("--against", metavar="NAME", help="Another device: when does it pay?")
@click.option("--against-price", type=NUMBER, help="Its price per hour.  [default: from the list]")
@shown
def command(
    run: str | None,
    as_json: bool,
    output: Path | None,
    force: bool,
    **options: Any,
) -> None:
    """Show what training costs: money and energy per step, per token and per run.

    Throughput and power are measured (RUN), given (--tokens-per-s), or projected from a model and
    a utilization (--model). Prices are dated, and yours to override.

    \b
    Examples:
      chopper estimate cost runs/mine --device h100-sxm --tokens 15e12
      chopper estimate cost --device h100-sxm --tokens-per-s 728 --against gb200
      chopper estimate cost --model llama3-70b --device h100-sxm --devices 1024 --tokens 15e12
    """
    from chopper.analyzers.estimates.cost import cost
    from chopper.hardware import prices as lists
    from chopper.hardware.devices import named
    from chopper.reports.estimates.cost import page

    check(output, force=force)
    contradict("tokens_per_s", "model")
    given = [
        n
        for n, v in (
            ("RUN", run),
            ("--tokens-per-s", options["tokens_per_s"]),
            ("--model", options["model"]),
        )
        if v
    ]
    if len(given) != 1:
        said = f"{' and '.join(given)} contradict each other" if given else "no throughput given"
        raise UsageError(f"{said}; give one of RUN, --tokens-per-s and --model")
    if was_given("utilization") and not options["model"]:
        raise UsageError("--utilization needs --model, whose throughput it projects")
    device = named(options["device"]) if options["device"] else None
    measured: dict[str, Any] = {}
    if run is not None:
        measured = _measured(run, device)
        device = device or measured["device"]
    prices = lists.load(options["prices"])
    price = _price(prices, device, options["price"], "--price")
    rate, source = _throughput(measured, device, options)
    power, power_source = _power(measured, device, options["power"])
    found = cost(
        prices=prices,
        price_per_hour=price,
        tokens_per_s=rate,
        throughput_source=source,
        device=device.label if device else None,
        devices_count=options["devices"] or measured.get("devices", 1),
        step_tokens_count=options["step_tokens"] or measured.get("step_tokens"),
        run_tokens_count=options["tokens"],
        power_w=power,
        power_source=power_source,
        electricity_per_kwh=options["electricity"],
        pue_ratio=options["pue"],
        against=_against(prices, price, device, rate, options),
    )
    show(found, page, as_json=as_json, output=output)


def _price(prices: Prices, device: DevicePeaks | None, given: float | None, option: str) -> Priced:
    from chopper.analyzers.estimates.cost import Priced

    if given is not None:
        return Priced(value=given, source="given")
    if device is None:
        raise UsageError(f"the device is not known, so it has no price; give --device or {option}")
    if device.id not in prices.devices:
        known = ", ".join(sorted(prices.devices))
        raise UsageError(
            f"no price of {device.label} in the list of {prices.date}, which has {known}; give {option}"
        )
    return prices.devices[device.id]


def _throughput(
    measured: dict[str, Any], device: DevicePeaks | None, options: dict[str, Any]
) -> tuple[float, str]:
    from chopper.analyzers.estimates.cost import projected_tokens_per_s
    from chopper.models.architectures import named

    if measured:
        return measured["tokens_per_s"], measured["source"]
    if options["tokens_per_s"]:
        return options["tokens_per_s"], "given"
    if device is None:
        raise UsageError("--model needs a device to be projected onto; give --device")
    model = named(options["model"])
    peak = device.flop_per_s("bf16") or device.flop_per_s("fp16")
    if peak is None:
        raise UsageError(
            f"--device: peak of {device.label} for 16 bits is not known; give --tokens-per-s"
        )
    rate = projected_tokens_per_s(model.active_count, peak, options["utilization"])
    return (
        rate,
        f"projected: {model.name} at {options['utilization']:.0%} of {peak / 1e12:.0f} TFLOP/s",
    )


def _power(
    measured: dict[str, Any], device: DevicePeaks | None, given: float | None
) -> tuple[float | None, str | None]:
    if given is not None:
        return given, "given"
    if measured.get("power_w"):
        return measured["power_w"], "measured in the run"
    if device is not None and device.board_power_w.value is not None:
        return float(device.board_power_w.value), "the board's limit, not a measurement"
    return None, None


def _against(
    prices: Prices,
    price: Priced,
    device: DevicePeaks | None,
    rate: float,
    options: dict[str, Any],
) -> Against | None:
    from chopper.analyzers.estimates.cost import compare
    from chopper.hardware.devices import named

    if options["against"] is None:
        if options["against_price"] is not None:
            raise UsageError("--against-price needs --against, the device that has it")
        return None
    other = named(options["against"])
    return compare(
        device=other.label,
        price=price,
        other_price=_price(prices, other, options["against_price"], "--against-price"),
        tokens_per_s=rate,
        flop_per_s=device.flop_per_s("bf16") if device else None,
        other_flop_per_s=other.flop_per_s("bf16"),
    )


def _measured(source: str, priced: DevicePeaks | None) -> dict[str, Any]:
    """Throughput per device, power, and the device of a recorded run.

    Args:
        source: the run.
        priced: the device whose price is asked for; None for the run's own.

    Raises:
        UsageError: the run does not tell its tokens, or it was measured on another device.
    """
    from chopper.api import attribute, load
    from chopper.cli._progress import progress
    from chopper.hardware.devices import lookup
    from chopper.views import view
    from chopper.wording import plural

    with progress("attributing"):
        attribution = attribute(load([source]))
    if priced is not None:
        _measured_on(attribution, source, priced)
    rows = view(attribution, "utilization").to_pylist()
    of_ranks = {
        row["rank"]: row["tokens_per_s"]
        for row in rows
        # A run of one rank has no rows but those of the whole.
        if (row["rank"] is not None or len(attribution.ranks) == 1)
        and row["tokens_per_s"] is not None
    }
    if not of_ranks:
        raise UsageError(
            f"{source}: how many tokens it trained on is not recorded; give --tokens-per-s instead"
        )
    energy = [
        row
        for row in view(attribution, "energy").to_pylist()
        if row["scope"] == "run" and str(row["source"]).startswith("device") and row["power_mean_w"]
    ]
    names = {rank.device for rank in attribution.ranks if rank.device}
    rate = sum(of_ranks.values()) / len(of_ranks)
    steps = max((rank.steps for rank in attribution.ranks), default=0)
    # Tokens per second are by the time of steps without a trace, where there are some.
    time_ns = max(rank.observed_ns for rank in attribution.ranks) * attribution.step_time().scale
    return {
        "tokens_per_s": rate,
        "source": f"measured in {source}, mean of {plural(len(of_ranks), 'rank')}",
        "devices": len(attribution.ranks),
        "device": lookup(names.pop()) if len(names) == 1 else None,
        "power_w": sum(r["power_mean_w"] for r in energy) / len(energy) if energy else None,
        "step_tokens": sum(of_ranks.values()) * time_ns / 1e9 / steps if steps else None,
    }


def _measured_on(attribution: Attribution, source: str, device: DevicePeaks) -> None:
    """Refuse to price a device by the tokens per second of another one.

    Raises:
        UsageError: a rank of the run computed on the CPU, or on another device.
    """
    from chopper.analyzers.compare.same_work import device_of
    from chopper.hardware.devices import lookup

    for rank in attribution.ranks:
        name = device_of(attribution, rank.rank)
        known = lookup(rank.device) if rank.device else None
        # Where device events name no device, the user says which one it was.
        if name is not None and (known is None or known.id != device.id):
            raise UsageError(
                f"--device {device.label}: {source} was measured on {name}, whose tokens per second "
                f"are not those of {device.label}; give --tokens-per-s of that device or project "
                "them with --model, or leave --device away and give --price of what it ran on"
            )
