from __future__ import annotations

import json

import psutil
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from chopper import pipeline  # noqa: E402
from chopper.errors import UsageError  # noqa: E402
from chopper.experiments import results as ex  # noqa: E402
from chopper.experiments.loading import load  # noqa: E402
from chopper.experiments.prepare import WorkloadUnavailable, prepare  # noqa: E402
from chopper.statistics import line  # noqa: E402
from chopper.workloads import link  # noqa: E402
from chopper.workloads.interconnect import ring_bytes  # noqa: E402


def test_without_root_it_is_refused_with_the_model_as_the_way_out(monkeypatch):
    monkeypatch.setattr(link, "unavailable", lambda: "shaping a link needs root")
    with pytest.raises(WorkloadUnavailable, match="needs root; the model alone: chopper estimate"):
        prepare("interconnect")


def test_without_root_the_model_alone_is_shown(monkeypatch, tmp_path):
    from chopper.cli.bench_ import command

    monkeypatch.setattr(link, "unavailable", lambda: "shaping a link needs root")
    asked = ["interconnect", "-o", str(tmp_path / "x")]
    told = CliRunner().invoke(command, asked)
    assert isinstance(told.exception, WorkloadUnavailable)
    assert "39.8 s/step over 10 GbE" in told.stdout
    assert "by a model" in told.stdout
    plain = json.loads(CliRunner().invoke(command, [*asked, "--json"]).stdout)
    assert plain["schema"] == "chopper.headlines/1"
    assert "needs root" in plain["absent"]["interconnect"]
    # T = 4.29 s + 45 GB / B
    assert [h["ours"] for h in plain["headlines"]] == pytest.approx([40.29, 4.4025])
    assert not (tmp_path / "x").exists()


def test_the_link_has_two_ends():
    with pytest.raises(UsageError, match="--ranks 3: a link has two ends"):
        prepare("interconnect", ranks=3)


def test_a_ring_gathers_twice_what_was_dropped_and_reduces_once():
    model = torch.nn.ModuleDict({"layers": torch.nn.Linear(10, 10, bias=False)})
    model["head"] = torch.nn.Linear(10, 5, bias=False)
    # 400 + 200 bytes gathered and reduced, 400 gathered again; each rank of four sends 3/4.
    assert ring_bytes(model, 4) == 3 / 4 * (2 * 600 + 400)


def test_the_interval_of_the_slope_is_that_of_the_textbook():
    # Residuals ±1, ∓1 about y = x: s² = 4/2, Σ(x − x̄)² = 5, t(0.975, 2) = 4.3027.
    x, y = [0.0, 1.0, 2.0, 3.0], [1.0, 0.0, 1.0, 4.0]
    _, slope, ci95, _ = line(x, y)
    assert slope == pytest.approx(1.0)
    assert ci95 == pytest.approx(
        (1 - 4.3027 * (2 / 5) ** 0.5, 1 + 4.3027 * (2 / 5) ** 0.5), rel=1e-4
    )
    assert line(x[:2], y[:2])[2] is None


@pytest.mark.slow
@pytest.mark.long
def test_training_over_a_shaped_link_is_as_slow_as_the_link_and_the_same(tmp_path):
    reason = link.unavailable()
    if reason is not None:
        pytest.skip(reason)
    from chopper.cli.bench_ import command

    path = tmp_path / "run"
    words = ["interconnect", "-o", str(path), "--variants", "unshaped,100mbit", "--repeats", "1"]
    words += ["--steps", "3", "--json", "--", "--batch", "1", "--sequence", "32"]
    done = CliRunner().invoke(command, words, standalone_mode=False, catch_exceptions=False)
    assert done.return_value == 0, done.output
    document = json.loads(done.stdout)
    assert document["schema"] == ex.SCHEMA
    found = load(path)
    for step in range(3):
        losses = {
            row.values for v in ("unshaped", "100mbit") if (row := found.find("loss", v, step=step))
        }
        assert len(losses) == 1
    sent, ring = found.find("sent_bytes", "100mbit"), found.find("ring_bytes", "100mbit")
    took = found.find("median_step_ns", "100mbit")
    assert sent is not None
    assert ring is not None
    assert took is not None
    # Gloo sends the reduced gradients twice; headers and meetings add a little.
    assert ring.estimate.value < sent.estimate.value < 1.6 * ring.estimate.value
    # Sent through the bucket, that many bytes take this long at least; the burst goes ahead.
    least_s = (sent.estimate.value - 1e6) / 12.5e6
    assert took.estimate.value / 1e9 > 0.9 * least_s
    assert found.ratio("median_step_ns", "100mbit", "unshaped") is not None
    # Each variant is judged by its own link, of which nothing is known where it is not shaped.
    for variant, known in (("100mbit", 12.5e6), ("unshaped", None)):
        run = pipeline.attribute(path / f"{variant}-1")
        links = run.communication.select(["link_bytes_per_s", "link_source"]).to_pylist()
        assert {row["link_bytes_per_s"] for row in links} == {known}
        assert all("no loopback joins" in row["link_source"] for row in links if known is None)
        spent = {row.id for row in run.leaves() if row.time_ns}
        assert ("communication.transfer.at_peak" in spent) == (known is not None)
    left = [words for p in psutil.Process().children(recursive=True) if (words := cmdline(p))]
    assert not [words for words in left if "chopper.workloads.interconnect" in words]


def cmdline(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []
