from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chopper import wording as fmt
from chopper.reports.labels import merged, of_ranks
from chopper.storage.manifest import Finding
from tests.reports import make


@pytest.mark.parametrize(
    ("time_ns", "shown"),
    [
        (None, "–"),
        (0, "0"),
        (1, "1 ns"),
        (999, "999 ns"),
        (999.6, "1.00 µs"),
        (1_234, "1.23 µs"),
        (12_345, "12.3 µs"),
        (999_499, "999 µs"),
        (999_501, "1.00 ms"),
        (12_345_678, "12.3 ms"),
        (1_500_000_000, "1.50 s"),
        (59_900_000_000, "59.9 s"),
        (61_000_000_000, "1 min 01 s"),
        (-5_000_000, "−5.00 ms"),
        (90 * 86400 * 10**9, "90.0 days"),
        (3.2e11 * 1e9, "1e+04 years"),
    ],
)
def test_duration(time_ns: float | None, shown: str) -> None:
    assert fmt.duration(time_ns) == shown


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (fmt.ratio(None), "–"),
        (fmt.ratio(0), "0 %"),
        (fmt.ratio(0.00001), "<0.1 %"),
        (fmt.ratio(0.238), "23.8 %"),
        (fmt.ratio(-0.238), "−23.8 %"),
        (fmt.percent(0.0351, "+.2f"), "+3.51 %"),
        (fmt.percent(None), "–"),
        (fmt.ratio(1), "100 %"),
        (fmt.bytes_(None), "–"),
        (fmt.bytes_(0), "0 B"),
        (fmt.bytes_(1536), "1.50 KiB"),
        (fmt.bytes_(1024 * 1023.7), "1.00 MiB"),
        (fmt.rate(3.35e12), "3.35 TB/s"),
        (fmt.flops(989.4e12), "989 TFLOP/s"),
        (fmt.hertz(99.8), "99.8 Hz"),
        (fmt.hertz(1.98e9), "1.98 GHz"),
        (fmt.count(216_092), "216\u202f092"),
        (fmt.factor(2.8), "2.8×"),
        (fmt.plural(1, "rank"), "1 rank"),
        (fmt.plural(2, "rank"), "2 ranks"),
    ],
)
def test_quantities(shown: str, expected: str) -> None:
    assert shown == expected


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (make.ADD, "vectorized_elementwise_kernel<CUDAFunctor_add<BFloat16>>"),
        (make.MUL, "vectorized_elementwise_kernel<BinaryFunctor<BFloat16, MulFunctor<float>>>"),
        (make.GEMM, "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8"),
        (make.NCCL, "ncclDevKernel_AllGather_RING_LL"),
        (make.ADAM, "multi_tensor_apply_kernel<FusedAdamMathFunctor<float>, float, double>"),
        ("ampere_sgemm_128x64_nn", "ampere_sgemm_128x64_nn"),
        ("aten::mm", "aten::mm"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)"),
        ("torch/nn/modules/module.py(1775): _call_impl", None),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        ("_ZN2ck16tensor_operation11gemm_kernelILi64EEvv", "gemm_kernel"),
        ("", ""),
        *((name, None) for name in make.HOSTILE[:2]),
        ("a<b<c<", None),
        ("void f<<<>>>((", None),
    ],
)
def test_kernel_names(name: str, short: str | None) -> None:
    shown = fmt.kernel_name(name)
    if short is None:
        assert shown, "a name never vanishes"
    else:
        assert shown == short


@given(st.text(max_size=80), st.integers(min_value=1, max_value=40))
def test_ellipsize_never_exceeds(text: str, width: int) -> None:
    assert len(fmt.ellipsize(text, width)) <= width


def test_energies_read_in_their_own_unit() -> None:
    shown = [fmt.joules(v) for v in (0, 4.2e-5, 0.0382, 0.9996, 412.3, 12_400, 3.1e6, -5)]
    assert shown == [
        "0.00 J",
        "42.0 µJ",
        "38.2 mJ",
        "1.00 J",
        "412 J",
        "12.4 kJ",
        "3.10 MJ",
        "−5.00 J",
    ]


def test_findings_of_several_ranks_are_one() -> None:
    def lost(rank: int | None, count: int) -> Finding:
        message = f"{count} events are lost"
        return Finding(
            code="trace.lost", severity="warning", message=message, rank=rank, count=count
        )

    found = merged([lost(0, 4), lost(1, 9), lost(2, 4), lost(None, 17)])
    told = [of_ranks(f, f.message, ranks, 4) for f, ranks in found]
    assert told == ["Ranks 0–2 (figures of rank 1): 9 events are lost", "17 events are lost"]
    ((same, ranks),) = merged([lost(0, 4), lost(2, 4)])
    assert of_ranks(same, same.message, ranks, 4) == "Ranks 0, 2: 4 events are lost"
    assert of_ranks(lost(0, 4), "alone", [0], 1) == "alone"


def test_texts_that_differ_are_still_different_when_they_are_shortened() -> None:
    begin, end = "void at::native::vectorized_elementwise_kernel<4, ", ", std::array<char*, 3ul> >"
    texts = [f"{begin}{name}{end}" for name in ("AddFunctor", "MulFunctor", "AddFunctor")]
    shown = fmt.ellipsize_all(texts, 30)
    assert shown[0] == shown[2] != shown[1]
    assert "Add" in shown[0]
    assert "Mul" in shown[1]
    assert all(len(text) <= 30 for text in shown)
    assert fmt.ellipsize_all([*texts[:1], "short"], 30) == [
        fmt.ellipsize(texts[0], 30),
        "short",
    ]


def test_a_whole_kernel_name_keeps_what_tells_instances_apart() -> None:
    name = "void at::native::(anonymous namespace)::Cat<float, int, {0}, 64>(at::Meta<4>, int)"
    assert fmt.kernel_name(name.format(2)) == fmt.kernel_name(name.format(3))
    assert fmt.whole_kernel_name(name.format(3)) == "Cat<float, int, 3, 64>"
