from __future__ import annotations

from dataclasses import replace

import pytest

import chopper
from chopper.analyzers.compare.gate import decide, parse
from tests.comparing import attribution, trace
from tests.kineto_writer import Trace


def _checks(found):
    return {c.id: c for c in found.checks}


def test_the_same_workload_passes(tmp_path) -> None:
    a = trace(tmp_path / "a.json", world=1)
    b = trace(tmp_path / "b.json", world=1, matmul_ns=(6_000,))
    found = chopper.compare(a, b)
    checks = _checks(found)
    assert found.refused == ()
    for passed in ("world_size", "flop", "operators", "device", "dtype", "recording", "steps"):
        assert checks[passed].status == "pass", passed
    # 2 · 64 · 32 · 64 FLOP in every step.
    assert checks["flop"].a == checks["flop"].b == 262_144
    assert checks["torch"].status == "unknown"
    assert checks["torch"].shown("a") == "–"


def test_other_flop_withhold_the_verdict(tmp_path) -> None:
    a, b = trace(tmp_path / "a.json"), trace(tmp_path / "b.json", width=84)
    found = chopper.compare(a, b)
    first = found.checks[0]
    assert (first.id, first.status, first.withholds) == ("flop", "differs", True)
    assert "B does 1.31 times A's" in first.note
    assert found.verdict.startswith("No verdict: A and B do not do the same work (FLOP per step: ")
    gate = decide(found, parse("step>+500%"))
    assert gate.failed
    assert gate.refused is not None
    assert "FLOP per step" in gate.refused
    forced = chopper.compare(a, b, allow_different=True)
    assert forced.refused == ()
    assert not decide(forced, parse("step>+500%")).failed


def test_flop_a_little_apart_are_shown_and_no_more(tmp_path) -> None:
    found = chopper.compare(trace(tmp_path / "a.json"), trace(tmp_path / "b.json", width=67))
    flop = _checks(found)["flop"]
    assert (flop.status, flop.withholds) == ("differs", False)


def test_other_world_sizes_withhold_the_verdict() -> None:
    times = {"compute.ideal": [100, 101, 102]}
    found = chopper.compare(attribution(times, ranks=2), attribution(times, ranks=4))
    assert [c.id for c in found.refused] == ["world_size"]


def test_operators_are_compared_as_a_multiset(tmp_path) -> None:
    a = trace(tmp_path / "a.json", adds=1)
    b = trace(tmp_path / "b.json", adds=3)
    check = _checks(chopper.compare(a, b))["operators"]
    # mm and one add of mm and three adds: 2 of 4 calls.
    assert (check.a, check.b, check.status) == (2, 4, "differs")
    assert "(50.0 %); aten::add 1 and 3" in check.note


def _looking_up(path, indices, *, microbatches=1):
    made = Trace()
    for s in range(3):
        t = 20_000 * s
        made.step(s, t, 20_000)
        for i in range(microbatches):
            at = t + 1_000 + 4_000 * i
            op = made.op("aten::embedding", at, 500, shapes=[[1000, 8], indices, []])
            made.launch("gather", at + 100, 50, kernel_at=at + 600, kernel_for=400, op=op)
            op = made.op("aten::embedding", at + 1_000, 500, shapes=[[64, 8], [1, 64], []])
            made.launch("gather", at + 1_100, 50, kernel_at=at + 1_600, kernel_for=400, op=op)
    path.write_bytes(made.encode())
    return path


@pytest.mark.parametrize(("indices", "same"), [([4, 32], True), ([2, 64], True), ([4, 64], False)])
def test_tokens_are_the_indices_of_the_largest_table(tmp_path, indices, same) -> None:
    a = _looking_up(tmp_path / "a.json", [2, 32], microbatches=2)
    b = _looking_up(tmp_path / "b.json", indices)
    check = _checks(chopper.compare(a, b))["tokens"]
    assert check.a == 128
    assert check.b == indices[0] * indices[1]
    assert (check.status == "pass") is same
    assert check.withholds is not same


def test_a_machine_at_another_speed_is_told_from_a_slower_program(tmp_path) -> None:
    a = trace(tmp_path / "a.json", matmul_ns=(4_000,), adds=3)
    # The product at 1.5 times, the additions as before: 4 of 7 µs are slower, so is the median.
    slower = trace(tmp_path / "b.json", matmul_ns=(6_000,), adds=3)
    check = _checks(chopper.compare(a, slower))["speed"]
    assert (check.status, check.a, check.b) == ("differs", 1, 1.5)
    assert "quartiles 1 and 1.5" in check.note
    assert not check.explains
    assert "neighbouring" not in check.note
    # Alone it is all there is: nothing tells the program from the machine.
    b = trace(tmp_path / "c.json", matmul_ns=(6_000,), adds=0)
    alone = trace(tmp_path / "d.json", matmul_ns=(4_000,), adds=0)
    check = _checks(chopper.compare(alone, b))["speed"]
    assert check.explains
    assert "clocks, power or neighbouring jobs" in check.note
    times = [attribution({"compute.ideal": [t] * 4}) for t in (4_000, 6_000)]
    verdict = replace(chopper.compare(*times), checks=(check,)).verdict
    assert verdict.endswith("reasons: time of the same kernels 100 % and 150 %.")
    assert _checks(chopper.compare(a, a))["speed"].status == "pass"


def test_kernels_of_other_names_say_nothing_of_speed(tmp_path) -> None:
    one, other = Trace(), Trace(platform="rocm")
    for made, name in ((one, "sm90_gemm"), (other, "Cijk_gemm")):
        for s in range(3):
            made.step(s, 10_000 * s, 10_000)
            made.launch(name, 10_000 * s + 100, 50, kernel_at=10_000 * s + 500, kernel_for=5_000)
        (tmp_path / f"{name}.json").write_bytes(made.encode())
    found = chopper.compare(tmp_path / "sm90_gemm.json", tmp_path / "Cijk_gemm.json")
    assert _checks(found)["speed"].status == "unknown"
