"""What the microbenchmarks show of a machine: the laws that its rates should follow, and whether
they do.

Survey and primary sources state no rates of the machine at hand. What can be held against it is
arithmetic: a law of the collectives or of the kernels, NCCL's own latencies, or a datasheet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chopper.analyzers.estimates.network import Topology, ring_steps
from chopper.experiments.results import Experiment, Headline, Labels, Row, between, quotient
from chopper.hardware.devices import lookup

if TYPE_CHECKING:
    from chopper.statistics import Estimate


def collectives(experiment: Experiment) -> tuple[Headline, ...]:
    """Latency of an all-reduce, and what its largest message makes of the link."""
    ranks = experiment.plan.ranks
    where = f"{ranks} ranks on {experiment.plan.device}"
    out = []
    latency = experiment.find("latency_ns", collective="all_reduce")
    if latency is not None:
        model, steps = Topology(), ring_steps("all_reduce", ranks)
        inside, between_nodes = (
            (model.base_latency_s + steps * step_s) * 1e6
            for step_s in (model.node_latency_s, model.network_latency_s)
        )
        rate = experiment.find("fitted_bus_bandwidth_bytes_per_s", collective="all_reduce")
        out.append(
            _measured(
                latency,
                1e-3,
                system="Collectives",
                claim=f"α of all-reduce between {ranks} ranks",
                primary=f"NCCL's ring takes {inside:.1f} µs over NVLink, {between_nodes:.1f} µs over "
                "a network",
                unit="µs",
                configuration=f"t = α + β·size through all sizes; {where}"
                + (
                    f"; 1/β is {rate.estimate.value / 1e9:.3g} GB/s of bus bandwidth"
                    if rate
                    else ""
                ),
            )
        )
    size = _largest(experiment, "bus_bandwidth_bytes_per_s", "size_bytes")
    if size is None:
        return tuple(out)
    rates = {
        str(dict(row.labels)["collective"]): row
        for row in experiment.rows
        if row.measure == "bus_bandwidth_bytes_per_s" and dict(row.labels)["size_bytes"] == size
    }
    whole = rates.get("all_reduce")
    link = rates.pop("send_receive", None)
    if whole is None:
        return tuple(out)
    of_link = quotient(whole, link)
    others = {name: quotient(row, link) for name, row in rates.items() if name != "all_reduce"}
    named = ", ".join(f"{name} {found.value:.2f}×" for name, found in others.items() if found)
    out.append(
        _ratio(
            of_link,
            system="Collectives",
            claim=f"bus bandwidth of all-reduce over that of send and receive, {_mib(size)}",
            primary="1: bus bandwidth is the link's, whatever the collective (nccl-tests)",
            stated=1.0,
            why="send and receive were not measured",
            configuration="; ".join(part for part in (where, named) if part),
        )
    )
    times = [
        experiment.find("time_ns", collective=name, size_bytes=size)
        for name in ("all_reduce", "reduce_scatter", "all_gather")
    ]
    if None not in times:
        one, *two = (row.values for row in times if row is not None)
        found = between(one, [sum(values) for values in zip(*two, strict=True)], ratio=True)
        out.append(
            _ratio(
                found,
                system="Collectives",
                claim=f"all-reduce's time over reduce-scatter's and all-gather's, {_mib(size)}",
                primary="1: a ring does the one, then the other",
                stated=1.0,
                configuration=f"{where}; below 1 where reduce-scatter is made of an all-reduce, as "
                "gloo's is",
            )
        )
    asymptote = experiment.find("fitted_bus_bandwidth_bytes_per_s", collective="all_reduce")
    reached = quotient(whole, asymptote)
    if reached is not None:
        out.append(
            _ratio(
                reached,
                system="Collectives",
                claim=f"bus bandwidth of all-reduce, {_mib(size)}, over its fit's",
                configuration=f"{where}; well below 1 where messages outgrow a cache or a buffer, "
                "which α + β·size knows nothing of",
            )
        )
    return tuple(out)


def gemm(experiment: Experiment) -> tuple[Headline, ...]:
    """What the data of a matrix product does to its speed, in the shape that is quickest on both:
    that which is quickest on zeros would be chosen for what it gains there, by luck too.
    """
    rates: dict[str, dict[Labels, float]] = {}
    for row in experiment.rows:
        if row.measure == "median_flop_per_s":
            of = rates.setdefault(str(dict(row.labels)["dtype"]), {})
            of[row.labels] = of.get(row.labels, 1.0) * row.estimate.value
    out = []
    for dtype, products in rates.items() if "zeros" in experiment.variants else ():
        quickest = max(products, key=products.__getitem__)
        labels = dict(quickest)
        found = experiment.ratio("median_flop_per_s", "zeros", "random", **labels)
        out.append(
            _ratio(
                found,
                system="Chopper: DVFS",
                claim=f"{dtype} products on zeros over random numbers, {labels['shape']}",
                why="random numbers were not run",
                configuration=f"rate on {experiment.plan.device}; {_sensed(experiment)}",
            )
        )
    return tuple(out)


def membw(experiment: Experiment) -> tuple[Headline, ...]:
    """Memory's bandwidth against its datasheet, and what the kernels' ratios tell of its stores."""
    size = _largest(experiment, "bandwidth_bytes_per_s", "array_bytes")
    if size is None:
        return ()
    where = f"{experiment.plan.device}, arrays of {_mib(size)}"
    rows = {
        name: experiment.find("bandwidth_bytes_per_s", kernel=name, array_bytes=size)
        for name in ("copy", "scale", "add", "triad")
    }
    out = []
    triad = rows["triad"]
    if triad is not None:
        name, stated = _datasheet(experiment)
        out.append(
            _measured(
                triad,
                1e-9,
                system="Memory",
                claim="triad's bandwidth (STREAM)",
                primary=f"{stated / 1e9:,.0f} GB/s ({name}'s datasheet)" if stated else None,
                unit="GB/s",
                stated=stated / 1e9 if stated else None,
                configuration=where
                + ("" if stated else f"; what its memory could do at most is not known of {name}"),
            )
        )
    for name, law in (
        ("scale", "each reads one array and writes one: 1 in theory"),
        (
            "add",
            "bytes as STREAM counts them: 1 where stores go past the caches, 1.125 where each line "
            "is read before it is written (3/4 of its traffic is counted, 2/3 of copy's)",
        ),
    ):
        found = quotient(rows[name], rows["copy"])
        if found is not None:
            out.append(
                _ratio(
                    found,
                    system="Memory",
                    claim=f"bandwidth of {name} over copy's",
                    configuration=f"{where}; {law}",
                )
            )
    if "zeros" in experiment.variants:
        found = experiment.ratio(
            "bandwidth_bytes_per_s", "zeros", "random", kernel="triad", array_bytes=size
        )
        out.append(
            _ratio(
                found,
                system="Memory",
                claim="triad on zeros over random numbers",
                why="random numbers were not run",
                configuration=f"{where}; {_sensed(experiment)}",
            )
        )
    return tuple(out)


def _sensed(experiment: Experiment) -> str:
    """What clock and power were on zeros, in words."""
    clock, power = (
        experiment.ratio(name, "zeros", "random") for name in ("sm_clock_hz", "power_w")
    )
    return ", ".join(
        f"{what} {found.value:.2f}×" if found else f"no {what} was sampled"
        for what, found in (("clock", clock), ("power", power))
    )


def _ratio(
    found: Estimate | None,
    *,
    system: str,
    claim: str,
    configuration: str,
    primary: str | None = None,
    stated: float | None = None,
    why: str = "",
) -> Headline:
    """The headline that a ratio is; where there is none, the reason."""
    return Headline(
        system=system,
        claim=claim,
        survey=None,
        primary=primary,
        unit="×",
        ours=None if found is None else found.value,
        ci95=None if found is None else found.ci95,
        stated=stated,
        why=why if found is None else "",
        configuration=configuration,
    )


def _measured(
    row: Row,
    factor: float,
    *,
    system: str,
    claim: str,
    primary: str | None,
    unit: str,
    configuration: str,
    stated: float | None = None,
) -> Headline:
    """The headline that a measured number is, in its unit times ``factor``."""
    ci95 = row.estimate.ci95
    return Headline(
        system=system,
        claim=claim,
        survey=None,
        primary=primary,
        unit=unit,
        ours=row.estimate.value * factor,
        ci95=ci95 and (ci95[0] * factor, ci95[1] * factor),
        stated=stated,
        configuration=configuration,
    )


def _largest(experiment: Experiment, measure: str, label: str) -> int | None:
    """The largest size that a measure has."""
    sizes = [int(dict(row.labels)[label]) for row in experiment.rows if row.measure == measure]
    return max(sizes, default=None)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):g} MiB"


def _datasheet(experiment: Experiment) -> tuple[str, float | None]:
    """What the first rank computed on, and the bandwidth of its memory by the table of devices."""
    found = next((a for runs in experiment.attributions.values() for a in runs), None)
    if found is None:
        return "a machine that is not known", None
    part = found.run.manifest.ranks[0]
    device = next((d for d in part.devices if d.name), None)
    if device is None or device.name is None:
        return str(part.environment.get("cpu", "an unknown processor")), None
    peaks = lookup(
        device.name,
        multi_processor_count=device.multiprocessor_count,
        memory_bytes=device.memory_bytes,
    )
    if peaks is None or peaks.memory_bandwidth_bytes_per_s.value is None:
        return device.name, None
    return peaks.label, float(peaks.memory_bandwidth_bytes_per_s.value)
