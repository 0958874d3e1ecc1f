"""``chopper calibrate``: measure the rates of this machine and store them for attributions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from chopper import wording as fmt
from chopper.cli import _shared as shared
from chopper.errors import tell
from chopper.reports.page import Column, Items, Page, Table

if TYPE_CHECKING:
    from collections.abc import Callable

    from chopper.hardware.calibration import Calibration, Measured

# Above this the quartiles of a measurement lie so far apart that something else was running.
_BUSY_RATIO = 0.2


@click.command("calibrate", cls=shared.Command)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda", "xpu"]),
    default="auto",
    show_default=True,
    help="What to measure; cuda includes ROCm.",
)
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Processes that measure at the same time: as many as will train on this machine.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="N",
    help="Threads per process. [default: cores divided by ranks]",
)
@click.option(
    "--quick", is_flag=True, help="Under 10 s instead of 30: fewer shapes and repetitions."
)
@shared.force("Measure again even if results are stored.")
@shared.output("File to store it in. [default: ~/.local/share/chopper/calibration.json]")
@shared.as_json
def command(
    device: str,
    ranks: int,
    threads: int | None,
    quick: bool,
    force: bool,
    output: Path | None,
    as_json: bool,
) -> None:
    """Measure what this machine achieves: GEMM, copies, links, launches.

    Attributions use these rates as the ceiling where no datasheet peak is known, which includes
    every machine without an accelerator. Rates are per rank, with --ranks processes at work at
    once; measure with as many as you train with, on an otherwise idle machine. Stored rates of the
    same device, ranks and threads are shown, not measured again, unless --force is set.

    \b
    Examples:
      chopper calibrate
      chopper calibrate --device cpu --ranks 2
      chopper calibrate --quick --force --json
    """
    from chopper.cli.output import progress
    from chopper.collectors import calibration as measuring
    from chopper.hardware import calibration

    path = output or calibration.default_path()
    # What cannot end well is said before time is spent.
    measuring.require_torch()
    calibration.check_writable(path)
    with progress("looking for devices"):
        kind, _ = measuring.find_device(device)
    measured = (
        None if force else _stored(path, kind, ranks, threads or measuring.default_threads(ranks))
    )
    if measured is None:
        with progress("calibrating; the machine is busy meanwhile"):
            measured = measuring.calibrate(device=kind, ranks=ranks, threads=threads, quick=quick)
        calibration.save(measured, path, replace_damaged=force)
        tell(f"stored in {path}")
    else:
        tell(f"already stored in {path}; measure again with --force")
    shared.present(
        lambda: page(measured), lambda: calibration.to_manifest(measured), as_json=as_json
    )
    if (measured.spread_ratio or 0) > _BUSY_RATIO:
        tell(
            f"warning: repetitions differ by {fmt.ratio(measured.spread_ratio)}: the machine was "
            "not idle; measure again on an idle machine with --force"
        )


def _stored(path: Path, device_type: str, ranks: int, threads: int) -> Calibration | None:
    import socket

    from chopper.hardware import calibration

    stored = calibration.load_all(path)
    wanted = (socket.gethostname(), device_type, ranks, threads)
    of = ((c.hostname, c.device_type, c.ranks, c.threads) for c in stored)
    return next((c for c, key in zip(stored, of, strict=True) if key == wanted), None)


def page(measured: Calibration) -> Page:
    """Return the best rate of each kind, and how far the repeats lay apart."""
    rows: list[tuple[str, str, str]] = []

    def add(name: str, rates: list[Measured], show: Callable[[float], str], known: str) -> None:
        best = max(rates, key=lambda r: r.best_per_s)
        at = best.what.removeprefix(known).strip()
        repeats = fmt.plural(best.repeats_count, "repeat")
        spread = f"{at + ', ' if at else ''}{repeats} within {fmt.ratio(best.spread_ratio)}"
        rows.append((name, show(best.best_per_s), spread))

    for dtype, rates in measured.gemm.items():
        add(f"matrix product, {dtype}", rates, fmt.flops, dtype)
    for one in measured.memory:
        add(f"memory, {one.what}", [one], fmt.rate, one.what)
    for one in measured.transfer:
        add(one.what, [one], fmt.rate, one.what)
    for kind in dict.fromkeys(m.what.split()[0] for m in measured.link):
        rates = [m for m in measured.link if m.what.startswith(kind)]
        name = f"{kind}, {measured.link_ranks} ranks, {measured.link_backend}"
        add(name, rates, fmt.rate, kind)
    rows.append(("launching an operator", fmt.duration(measured.launch_ns), ""))
    rows.append(
        ("launching an operator and waiting for it", fmt.duration(measured.roundtrip_ns), "")
    )
    notes = [f"no {what}: {why}" for what, why in sorted(measured.absent.items())]
    table = Table(columns=("measured", "best", Column("", kind="name")), rows=rows)
    more = [Items(items=notes)] if notes else []
    return Page(title="Calibration", headline=measured.source, summary=[table, *more])
