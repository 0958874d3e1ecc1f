"""Headlines that a formula or a recording of another machine gives: nothing is measured here."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from chopper.analyzers.estimates.memory import memory, rule_of_thumb
from chopper.analyzers.estimates.training import Training
from chopper.cli.estimates import limits
from chopper.cli.estimates.network import ecmp
from chopper.experiments.results import Headline
from chopper.hardware.devices import load_prices
from chopper.hardware.devices import named as named_device
from chopper.models.architectures import named
from chopper.workloads.compile import portability_ratio

GB = 1e9
MODEL = "qwen1.5-0.5b-inference"
MATMUL = "rocmprofiledata/matmul.rpd.gz"
"""A recording with its clocks, in the public rocmProfileData, of a device that it does not name."""
OWN = Path(__file__).resolve().parent.parent / "tests" / "golden" / "own"
"""Recordings of our own."""


def modelled() -> Iterator[Headline]:
    """Yield what estimates give for each headline that no workload measures."""
    fewer, many, most = (ecmp(flows, 16, (16,))[0].gain_ratio for flows in (64, 128, 1000))
    yield Headline(
        system="Meta RoCE: E-ECMP",
        claim="throughput, hashing 16 queue pairs per flow over one, 128 flows on 16 uplinks",
        published="up to 40 % on AllReduce",
        primary="up to 40 % on an AllReduce benchmark",
        ours=many,
        stated=1.4,
        by_choice=True,
        basis="model",
        timed=False,
        configuration="flows hashed uniformly, the fullest uplink decides",
        chosen=f"in flows to come near 40 %: 64 give {fewer:.2f}×, 1 000 {most:.2f}×",
    )
    walls = limits.estimate(limits.Options())
    yield Headline(
        system="Data-movement wall",
        claim=f"size at which utilization falls below {limits.WALL_UTILIZATION_RATIO:.2f}",
        published="2e28 FLOP",
        primary="about 1e28 in the abstract of arXiv 2411.01137, 2e28 in its authors' blog",
        unit="e28 FLOP",
        ours=None if walls.data_wall_flop is None else walls.data_wall_flop / 1e28,
        why="no wall within the published sizes",
        stated=2.0,
        by_choice=True,
        basis="model",
        timed=False,
        configuration="90 days on H100s",
        chosen="in that share, which is ours, to come near 2e28: the publication has none",
    )
    yield Headline(
        system="Latency wall",
        claim="size at which layers × steps × latency fill the time",
        published="2e31 FLOP",
        primary="about 1e31 in the abstract, 2e31 in the blog; 2.8e31 by its own constants",
        unit="e31 FLOP",
        ours=walls.latency_wall_flop / 1e31,
        stated=2.0,
        basis="model",
        timed=False,
        configuration="90 days, 400 µs a layer, batch and model by the publication's laws",
        chosen="as the publication does",
    )
    yield _memory_rule()
    prices = load_prices().devices
    price, base = prices["nvidia-gb200"], prices["nvidia-h100-sxm"]
    yield Headline(
        system="Cost of ownership",
        claim="GB200 NVL72 over H100, per GPU and hour",
        published="about 1.6×",
        primary="1.6× (SemiAnalysis, August 2025)",
        ours=price.value / base.value,
        stated=1.6,
        by_choice=True,
        basis="model",
        timed=False,
        configuration=f"{price.value:.2f} over {base.value:.2f} USD, the shipped list",
        chosen="from the same source: not independent of it",
    )
    yield from _clocks()
    yield _clock_bound()
    yield _portability()


def _memory_rule() -> Headline:
    """Hold 40 bytes × parameters against the memory of a training that somebody measured."""
    model = named("llama2-7b")
    found = memory(Training(architecture=model, precision="bf16", checkpoint="full", batch_count=1))
    rule_bytes, _ = rule_of_thumb(model.parameters_count)
    return Headline(
        system="VRAM rule",
        claim="40 bytes × parameters: Llama 2 7B, bf16, AdamW, one device",
        published=f"{rule_bytes / GB:.0f} GB",
        primary="51.6 GB measured on one A100 (torchtune)",
        unit="GB",
        ours=found.allocated_bytes / GB,
        stated=rule_bytes / GB,
        basis="model",
        timed=False,
        configuration="by chopper estimate memory; the rule is a rule of thumb",
        chosen="because somebody measured this training",
    )


def _clocks() -> Iterator[Headline]:
    """Yield what the clock took of the same products on one H100, by the data that they had."""
    from chopper.pipeline import attribute
    from chopper.views import view

    for data, values in (("random", "random numbers"), ("zeros", "zeros")):
        run = attribute(OWN / f"dvfs_{data}")
        [products] = [
            row
            for row in view(run, "clocks").to_pylist()
            if (row["level"], row["name"]) == ("op", "aten::mm")
        ]
        gap_ms, error_ms = (
            time_ns / run.steps / 1e6
            for time_ns in (run.observed_ns - run.ideal_ns, products["loss_error_ns"])
        )
        yield Headline(
            system="Chopper: DVFS",
            claim=f"clock's part of the gap between ideal and observed step, products of {values}",
            primary="frequency overhead is the largest (MI300X)",
            unit="ms",
            ours=products["loss_ns"] / run.steps / 1e6,
            basis="recorded",
            timed=False,
            configuration=f"of {gap_ms:.1f} ms, ± {error_ms:.1f} ms; "
            f"{products['clock_mean_hz'] / 1e6:.0f} MHz, {products['power_mean_w']:.0f} W; "
            f"40 bf16 products 8192³ per step on one H100, tests/golden/own/dvfs_{data}",
            chosen="so that the same kernels do the same work and only its power differs",
        )


def _clock_bound() -> Headline:
    """Bound what clocks below the reference took of real kernels, where the recording is here."""
    from chopper.pipeline import attribute

    shown = Headline(
        system="Chopper: DVFS",
        claim="most that low clocks took of compute time, matrix products on an AMD GPU",
        published="the largest overhead",
        primary="the largest overhead, above matrix-unit utilization, overlap and launches",
        unit="%",
        why="needs CHOPPER_TRACES, a directory of public traces",
        basis="recorded",
        timed=False,
    )
    traces = os.environ.get("CHOPPER_TRACES")
    if not traces:
        return shown
    run = attribute(Path(traces) / MATMUL, device="mi250")
    (finding,) = [f for f in run.findings if f.code == "compute.clock_bound"]
    time_ms, bound_ms = map(float, re.findall(r"([\d.]+) ms", finding.message))
    return replace(
        shown,
        ours=bound_ms / time_ms * 100,
        why="",
        configuration=f"{MATMUL}, which names no device, as on an MI250: {finding.message}",
        chosen="because no other public recording of an AMD device has its clocks",
    )


def _portability() -> Headline:
    """Return the portability of one model as recorded on two vendors' devices."""
    from chopper.cli.estimates.project import carried
    from chopper.pipeline import attribute, read

    shown = Headline(
        system="UniOrch",
        claim="performance and portability over H100 and MI300X, Qwen 1.5 0.5B inference",
        unit="%",
        why="needs CHOPPER_TRACES, a directory of public traces",
        basis="recorded",
        timed=False,
    )
    traces = os.environ.get("CHOPPER_TRACES")
    if not traces:
        return shown
    efficiencies = {}
    for name in ("h100-sxm", "mi300x"):
        file = Path(traces) / "tracelens" / f"{name.partition('-')[0]}-{MODEL}.json.gz"
        projection = carried(attribute(read(file)), file.name, named_device(name))
        assert projection.recorded_ns is not None
        efficiencies[name] = projection.roofline_ns / projection.recorded_ns
    shares = ", ".join(f"{ratio * 100:.1f} % on {name}" for name, ratio in efficiencies.items())
    return replace(
        shown,
        ours=portability_ratio(efficiencies.values()) * 100,
        why="",
        configuration=f"as recorded there, against each datasheet's roofline: {shares}",
        chosen="because recordings of one model on both are public",
    )
