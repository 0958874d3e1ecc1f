"""Throughput, energy and loss of two runs beside their step times, worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from chopper import pipeline
from chopper.analyzers.compare.result import Comparison, Outcome, signed
from chopper.analyzers.compare.runs import compare
from chopper.reports import comparison as report
from chopper.storage import manifest as m
from chopper.storage.run import Run
from chopper.tables import TABLES
from tests.analyzers.make import kernel, kernels, op, span, spans

BASE = 1_760_000_000_000_000_000
S = 1_000_000_000


def rows(name: str, values: Sequence[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist([*values], schema=TABLES[name].arrow)


def trained(
    step_ns: Sequence[int],
    *,
    tokens: int | None = None,
    power_w: float | None = None,
    of: str = "device",
    losses: Sequence[float] = (),
    loss_name: str = "loss",
) -> Run:
    """One rank whose kernels fill its steps, at a constant power."""
    host, device, steps, work = [], [], [], []
    at = BASE
    for number, length in enumerate(step_ns):
        host += [
            op(at, at + 100, "aten::relu", [64]),
            span(at + 10, at + 20, "cudaLaunchKernel", "runtime", correlation_id=number),
        ]
        device.append(kernel(at + 20, at + length - 10, correlation_id=number))
        bounds = {"start_ns": at, "end_ns": at + length}
        told = {"source": "mark", "traced": True, "profiled": True}
        steps.append({"number": number, **bounds, **told})
        if tokens is not None:
            work.append({"time_ns": at, "span_ns": length, "step": number, "tokens_count": tokens})
        at += length
    tables = {
        (0, "host_span"): spans(*host),
        (0, "device_event"): kernels(*device),
        (0, "step"): rows("step", steps),
    }
    if work:
        tables[0, "step_work"] = rows("step_work", work)
    if power_w is not None:
        readings = range(BASE - S, at + S, S // 10)
        name, key, of_what = {
            "device": ("device_counter", "device_id", 0),
            "host": ("host_energy", "domain", "package-0"),
        }[of]
        total = [
            {"time_ns": t, "span_ns": 0, "energy_j": power_w * (t - BASE) / S, key: of_what}
            for t in readings
        ]
        tables[0, name] = rows(name, total)
    part = m.RankManifest(rank=0, status="complete", device_id=0, devices=[m.Device(device_id=0)])
    part.measures = [
        m.Measure(name=loss_name, value=value, labels={"step": step})
        for step, value in enumerate(losses)
    ]
    return Run(m.RunManifest(kind="recorded", name="made", ranks=[part]), None, tables, "made")


def compared(a: Run, b: Run) -> Comparison:
    return compare(*(pipeline.attribute(run) for run in (a, b)), allow_different=True)


def outcomes(a: Run, b: Run) -> dict[str, Outcome]:
    return {outcome.id: outcome for outcome in compared(a, b).outcomes}


def test_time_throughput_energy_and_loss_stand_together() -> None:
    # Eighteen steps of 1 s and of 2 s, 1000 and 1500 tokens each, 300 W and 400 W.
    a = trained([S] * 18, tokens=1000, power_w=300.0, losses=[4.0 - 0.1 * i for i in range(18)])
    b = trained([2 * S] * 18, tokens=1500, power_w=400.0, losses=[4.0 - 0.1 * i for i in range(18)])
    found = outcomes(a, b)
    assert [*found] == [
        "step_ns",
        "tokens_per_s",
        "energy_per_step_j",
        "energy_per_token_j",
        "loss",
    ]
    assert all(outcome.reason is None for outcome in found.values())
    of = {id: (outcome.a, outcome.b) for id, outcome in found.items()}
    assert of["step_ns"] == pytest.approx((S, 2 * S), rel=1e-6)
    assert of["tokens_per_s"] == pytest.approx((1000.0, 750.0), rel=1e-6)
    assert of["energy_per_step_j"] == pytest.approx((300.0, 800.0), rel=1e-6)
    assert of["energy_per_token_j"] == pytest.approx((0.3, 800 / 1500), rel=1e-6)
    # Steps 9 to 17: the mean is that of step 13.
    assert of["loss"] == pytest.approx((2.7, 2.7))
    assert found["tokens_per_s"].ratio == pytest.approx(-0.25, rel=1e-6)
    assert found["tokens_per_s"].told is True
    # Three groups of at least 5 s of each: 300 W throughout, so nothing varies.
    assert found["energy_per_step_j"].ci95_ratio == pytest.approx((5 / 3, 5 / 3), rel=1e-6)
    assert (found["loss"].ci95_ratio, found["loss"].told) == ((0.0, 0.0), False)


def test_the_interval_of_throughput_is_that_of_the_step_turned_over() -> None:
    lengths = [S, S + S // 10, S - S // 10, S, S + S // 20, S - S // 20]
    found = outcomes(trained(lengths, tokens=10), trained([2 * n for n in lengths], tokens=10))
    low, high = found["step_ns"].ci95_ratio or (0.0, 0.0)
    assert low < 1 < high
    turned = (1 / (1 + high) - 1, 1 / (1 + low) - 1)
    assert found["tokens_per_s"].ci95_ratio == pytest.approx(turned)


def test_losses_are_compared_step_by_step() -> None:
    # They fall by far more from step to step than they differ: unpaired, nothing could be told.
    falling = [8.0 / (1 + i) for i in range(12)]
    higher = [value + 0.1 + 0.01 * (i % 2) for i, value in enumerate(falling)]
    a, b = (trained([S] * 12, losses=of) for of in (falling, higher))
    loss = outcomes(a, b)["loss"]
    assert loss.a is not None
    assert loss.b is not None
    assert loss.b - loss.a == pytest.approx(0.105)
    assert loss.told is True
    low, high = loss.ci95_ratio or (0.0, 0.0)
    assert low < 0.105 / loss.a < high


def test_what_was_not_recorded_is_null_with_the_reason_and_named_on_the_page() -> None:
    found = compared(
        trained([S] * 4, losses=[1.0] * 4, loss_name="train_loss"), trained([S] * 4, tokens=5)
    )
    by_id = {outcome.id: outcome for outcome in found.outcomes}
    tokens, energy, loss = (by_id[n] for n in ("tokens_per_s", "energy_per_step_j", "loss"))
    assert (tokens.a, tokens.ratio, tokens.ci95_ratio) == (None, None, None)
    assert tokens.b == pytest.approx(5.0, rel=1e-6)
    assert tokens.reason is not None
    assert tokens.reason.startswith("A: the tokens of its steps were not counted")
    assert energy.reason == "A and B: neither energy nor power was sampled"
    assert loss.reason is not None
    assert "A: no loss of a step that the other has; B: no loss was recorded" in loss.reason
    text = " ".join(report.render(found, "txt").split())
    assert "; Energy per step, Energy per token (A and B: neither energy nor power was" in text
    assert "Of both runs" not in text  # the step alone is said above


def test_a_loss_below_zero_that_rises_has_risen() -> None:
    a, b = (trained([S] * 8, losses=[-2.0 + more] * 8) for more in (0.0, 0.5))
    loss = outcomes(a, b)["loss"]
    assert (loss.ratio, loss.ci95_ratio) == (0.25, (0.25, 0.25))


def test_processors_are_compared_with_processors_alone() -> None:
    devices, hosts = (
        trained([S] * 18, tokens=1000, power_w=300.0, of=of) for of in ("device", "host")
    )
    alike = outcomes(hosts, hosts)
    assert alike["energy_per_token_j"].a == pytest.approx(0.3, rel=1e-6)
    assert "the hosts' processors" in alike["energy_per_step_j"].note
    for outcome in (outcomes(devices, hosts)[f"energy_per_{x}_j"] for x in ("step", "token")):
        assert (outcome.a, outcome.b) == (None, None)
        assert outcome.reason == (
            "A and B: not alike, of devices in A and of the hosts' processors in B"
        )


def test_each_host_counts_the_tokens_of_the_steps_whose_energy_it_knows() -> None:
    """The second host's readings end after 12 of 18 steps."""
    one = trained([S] * 18, tokens=1000, power_w=300.0, of="host")
    names = ("host_span", "device_event", "step", "step_work", "host_energy")
    tables = {(rank, name): one.table(0, name) for rank in (0, 1) for name in names}
    tables[1, "host_energy"] = tables[1, "host_energy"].slice(0, 130)
    parts = [m.RankManifest(rank=r, status="complete", hostname=f"n{r}") for r in (0, 1)]
    two = Run(m.RunManifest(kind="recorded", name="made", ranks=parts), None, tables, "made")
    found = outcomes(two, two)
    assert found["energy_per_step_j"].a == pytest.approx(600.0, rel=1e-6)
    assert found["energy_per_token_j"].a == pytest.approx(0.3, rel=1e-6)


def test_changes_beyond_any_measure_have_one_sign() -> None:
    assert signed(2e4) == ">1000000 %"
    assert signed(-2e4) == "<−1000000 %"


@pytest.mark.parametrize(("described", "tokens_per_s"), [("mesh_tp", 1000.0), ("dp", 2000.0)])
def test_tokens_of_tensor_parallel_ranks_count_once(described: str, tokens_per_s: float) -> None:
    one = trained([S] * 6, tokens=1000)
    names = ("host_span", "device_event", "step", "step_work")
    tables = {(rank, name): one.table(0, name) for rank in (0, 1) for name in names}
    group = {"pg_desc": described, "ranks": [0, 1]}
    parts = [m.RankManifest(rank=r, status="complete", process_groups=[group]) for r in (0, 1)]
    run = Run(m.RunManifest(kind="recorded", name="made", ranks=parts), None, tables, "made")
    assert outcomes(run, run)["tokens_per_s"].a == pytest.approx(tokens_per_s, rel=1e-6)


def test_energy_over_too_short_a_time_is_withheld_with_the_views_reason() -> None:
    found = outcomes(*(trained([S // 10] * 4, power_w=300.0) for _ in range(2)))
    assert found["energy_per_step_j"].a is None
    assert "resolves nothing below 5 s" in (found["energy_per_step_j"].reason or "")
