"""What gemm, membw and collectives refuse, and the sums behind their numbers."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from chopper.errors import UsageError  # noqa: E402
from chopper.experiments.prepare import WorkloadUnavailable, prepare  # noqa: E402
from chopper.hardware import measure  # noqa: E402
from chopper.hardware.measure import Bench, bus_factors, product, stream  # noqa: E402
from chopper.workloads import collectives  # noqa: E402
from chopper.workloads.collectives import fit  # noqa: E402


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("gemm", ["--shapes", "1000000x1000000x1000000"], "needs about 42000 GB, one rank here"),
        ("gemm", ["--shapes", "8x8"], "'8x8' is not MxNxK, for example 4096x4096x4096"),
        ("gemm", ["--shapes", "8x8x0"], "'8x8x0' is not MxNxK"),
        (
            "gemm",
            ["--dtypes", "int4"],
            "'int4' unknown: one of float64, float32, float16, bfloat16",
        ),
        ("membw", ["--largest", "1000000000000"], "needs about 3000 GB, one rank here"),
        ("membw", ["--smallest", "9", "--largest", "8"], "--smallest 9 is larger than --largest 8"),
        ("collectives", ["--factor", "1"], "--factor 1: sizes must grow: choose 2 or more"),
        ("collectives", ["--largest", "1000000000000"], "needs about 6000 GB, 2 ranks here"),
    ],
)
def test_impossible_sizes_are_refused_in_one_line(name, words, message):
    with pytest.raises((UsageError, WorkloadUnavailable), match=message) as refused:
        prepare(name, options=[*words, "--device", "cpu"])
    assert "\n" not in str(refused.value)


def test_a_data_type_that_the_gpu_lacks_is_refused_where_it_is_named(monkeypatch):
    import argparse

    from chopper.workloads import gemm

    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Tesla V100")
    named = argparse.Namespace(dtypes="float16,bfloat16")
    with pytest.raises(ValueError, match="Tesla V100 has no bfloat16"):
        gemm.chosen_dtypes(named, "cuda")
    assert gemm.chosen_dtypes(argparse.Namespace(dtypes="all"), "cuda") == [
        "float32",
        "float16",
        "float64",
    ]


def test_bus_factors_are_those_of_nccl_tests():
    assert bus_factors(8) == {
        "all_reduce": 1.75,
        "all_gather": 0.875,
        "reduce_scatter": 0.875,
        "all_to_all": 0.875,
        "broadcast": 1.0,
        "send_receive": 1.0,
    }


def test_streams_kernels_pass_over_what_they_count_and_leave_the_arrays_as_they_were():
    arrays = [torch.randn(64) for _ in range(3)]
    before = arrays[0].clone()
    calls = stream(arrays)
    assert {name: passes for name, (passes, _) in calls.items()} == {
        "copy": 2,
        "scale": 2,
        "add": 3,
        "triad": 3,
    }
    for _ in range(40):  # any other factor would overflow, or vanish, within as many rounds
        for _, call in calls.values():
            call()
    assert torch.allclose(arrays[0], before, rtol=1e-4)


class Clock:
    """A clock that goes on only as calls say."""

    def __init__(self, monkeypatch):
        self.now_s = 0.0
        monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: self.now_s))

    def call(self, seconds, log):
        def run():
            self.now_s += seconds
            log.append(seconds)

        return run


def test_short_calls_are_timed_many_at_once_behind_one_that_is_not(monkeypatch):
    clock = Clock(monkeypatch)
    log: list[float] = []
    bench: Bench[str] = Bench(torch.device("cpu"))
    assert bench.add("short", clock.call(1e-4, log)) == pytest.approx(1e-4)
    assert bench.add("long", clock.call(1e-1, log)) == pytest.approx(1e-1)
    log.clear()
    ended = []
    times_s = bench.run(2, after_round=(lambda: ended.append(len(log)),))
    assert times_s == {"short": pytest.approx([1e-4] * 2), "long": pytest.approx([1e-1] * 2)}
    # 5 ms of the short one behind another call of it; the long one alone is long enough.
    assert (log.count(1e-4), log.count(1e-1)) == (2 * 51, 2)
    assert ended == [len(log) // 2, len(log)]


def test_calls_that_are_slow_to_begin_are_timed_so_many_at_once_that_it_does_not_count(monkeypatch):
    """A busy machine wakes the threads of a call late, and those of the next ones at once."""
    clock = Clock(monkeypatch)
    began_s = -1.0

    def call():
        nonlocal began_s
        # The clock is read before a batch: the call behind that is the first.
        clock.now_s += 1e-5 if clock.now_s == began_s else 4e-2
        began_s = clock.now_s

    def perf_counter():
        nonlocal began_s
        began_s = -1.0
        return clock.now_s

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=perf_counter))
    bench: Bench[str] = Bench(torch.device("cpu"))
    assert bench.add("", call) < 1e-4
    assert max(bench.run(3)[""]) < 1e-4


def test_a_call_that_was_disturbed_when_it_was_settled_is_timed_long_enough_later(monkeypatch):
    clock = Clock(monkeypatch)
    log: list[float] = []
    bench: Bench[str] = Bench(torch.device("cpu"))
    slow, quick = clock.call(1e-1, log), clock.call(1e-4, log)
    bench.add("", lambda: slow() if len(log) < 2 else quick())
    assert len(log) == 2
    times_s = bench.run(3)[""]
    assert times_s == pytest.approx([1e-4] * 3)
    # One alone; then 50 of them, twice, behind one that is not timed.
    assert len(log) == 2 + 1 + 2 * 51


def test_a_budget_is_filled_with_timings(monkeypatch):
    clock = Clock(monkeypatch)
    log: list[float] = []
    bench: Bench[str] = Bench(torch.device("cpu"))
    bench.add("short", clock.call(5e-3, log))
    bench.add("long", clock.call(2.0, log))
    times_s = bench.run(3, budget_s=0.101)
    assert (len(times_s["short"]), len(times_s["long"])) == (3 * 21, 3)
    assert len(bench.run(1, budget_s=1.999)["short"]) == 400


@pytest.mark.parametrize("shape", [(3, 5, 7), (7, 3, 5), (4, 4, 4)])
def test_a_product_multiplies_the_first_numbers_by_the_last(shape):
    m, n, k = shape
    values, out = torch.randn(m * k + k * n), torch.zeros(m * n)
    product(values, out, m, n, k)()
    expected = values[: m * k].view(m, k) @ values[m * k :].view(k, n)
    assert torch.allclose(out.view(m, n), expected)


class Ranks(Clock):
    """torch.distributed as the first of four ranks sees it."""

    ReduceOp = SimpleNamespace(MAX="max")
    irecv, isend = "receive", "send"

    def __init__(self, monkeypatch):
        super().__init__(monkeypatch)
        self.begun = []
        monkeypatch.setattr(measure, "dist", self)
        monkeypatch.setattr(torch.distributed, "get_rank", self.get_rank)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)

    def get_rank(self):
        return 0

    def barrier(self):
        self.now_s += 1.0  # no part of what is timed

    def all_reduce(self, took, op):
        assert op == "max"

    def P2POp(self, what, tensor, peer):
        return what, tensor.numel(), peer

    def batch_isend_irecv(self, begun):
        self.begun += begun
        return []


def test_the_table_holds_what_a_call_takes_and_its_bandwidths(monkeypatch):
    ranks, found = Ranks(monkeypatch), {}

    class Calls:
        def __init__(self, largest_bytes, ranks, device):
            assert (largest_bytes, ranks) == (1 << 20, 4)

        def call(self, name, size_bytes):
            return ranks.call(2e-5 + size_bytes / 3e9, [])

    prof = SimpleNamespace(step=lambda: None)
    prof.measure = lambda name, value, **of: found.update({(name, *of.values()): value})
    monkeypatch.setattr(measure, "Collectives", Calls)
    monkeypatch.setattr("chopper.profile", lambda *_, **__: nullcontext(prof))
    words = ["--smallest", "1024", "--largest", str(1 << 20), "--factor", "32", "--repeats", "2"]
    args = collectives.WORKLOAD.parse(words)
    collectives.measure(args, torch.device("cpu"))
    assert len(found) == 6 * (3 * 4 + 2)
    for size in (1 << 10, 1 << 15, 1 << 20):
        time_s = 2e-5 + size / 3e9
        assert found["time_ns", "all_reduce", size] == pytest.approx(time_s * 1e9)
        for name, factor in bus_factors(4).items():
            rate = found["bus_bandwidth_bytes_per_s", name, size]
            assert rate == pytest.approx(size / time_s * factor)
    assert found["latency_ns", "all_reduce"] == pytest.approx(2e4)
    assert found["fitted_bus_bandwidth_bytes_per_s", "all_reduce"] == pytest.approx(3e9 * 1.5)


@pytest.mark.parametrize(
    ("times", "latency_s", "per_byte_s"),
    [
        # Slower than in proportion: no latency is left. Larger is not slower: all of it is.
        ([(1000, 1e-6), (2000, 3e-6)], 0.0, None),
        ([(1000, 2e-6), (2000, 1e-6)], None, 0.0),
    ],
)
def test_a_fit_without_latency_or_without_a_slope_is_still_the_best(times, latency_s, per_byte_s):
    found_s, rate = fit(times)
    found = (found_s, 1 / rate)
    assert latency_s is None or found_s == latency_s
    assert per_byte_s is None or found[1] == per_byte_s

    def errors(alpha_s, beta_s):
        return sum((1 - (alpha_s + beta_s * s) / t) ** 2 for s, t in times)

    for changed in (0.99, 1.01):
        assert errors(*found) < errors(found[0] * changed, found[1] * changed)


def test_progress_is_said_now_and_then_by_one_rank(monkeypatch, capsys):
    import time

    from chopper.workloads.ranks import Progress

    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        now_s = 100.0
        progress = Progress(8, "step")
        for _ in range(8):
            now_s += 2
            progress.advance()
    assert capsys.readouterr().out.splitlines() == [
        "step 3 of 8, about 10 s left",
        "step 6 of 8, about 4 s left",
    ]
