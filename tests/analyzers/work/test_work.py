"""The FLOP and byte model, worked by hand: backends that a CPU lacks, shapes of real runs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chopper.analyzers.work import Work, estimate, family, matmul_dtype
from chopper.analyzers.work.attention import kept_pairs
from tests.analyzers.work.work_records import HALF, of


def test_backward_operators_do_not_read_what_only_has_the_size() -> None:
    long = "long int"
    pool = of("aten::avg_pool2d_backward", [[2, 3, 4, 4], [2, 3, 8, 8]], "float")
    assert pool.bytes_count == 4 * (2 * 3 * 4 * 4 + 2 * 3 * 8 * 8)
    loss = of(
        "aten::nll_loss_backward",
        [[], [512, 1024], [512], [], [], [], []],
        ["float", "float", long, "", "Scalar", "Scalar", "float"],
    )
    assert loss.bytes_count == 4 + 512 * 8 + 512 * 1024 * 4  # gradient in, targets, gradient out
    pooled = of(
        "aten::max_pool2d_with_indices_backward",
        [[2, 3, 4, 4], [2, 3, 8, 8], [], [], [], [], [], [2, 3, 4, 4]],
        ["float", "float", *["ScalarList"] * 4, "Scalar", long],
    )
    assert pooled.bytes_count == 2 * 3 * 16 * (4 + 8) + 2 * 3 * 64 * 4


@pytest.mark.parametrize("gates", [1, 3, 4])
def test_a_recurrent_layer_is_two_products_per_token(gates: int) -> None:
    steps, batch, i, h = 16, 8, 256, 512
    states = [[batch, h]] * 2
    weights = [[gates * h, i], [gates * h, h], [gates * h], [gates * h]]
    dims = [[steps, batch, i], *weights, *states, *[[]] * 9]
    types = [*["float"] * 7, *["Scalar"] * 9]
    layer = of("aten::mkldnn_rnn_layer", dims, types)
    assert layer.flop_count == 2 * gates * (i + h) * h * steps * batch
    read = steps * batch * i + gates * h * (i + h + 2) + 2 * batch * h
    assert layer.bytes_count == 4 * (read + steps * batch * h)
    assert (layer.family, layer.dtype) == ("gemm", "fp32")
    back = of("aten::mkldnn_rnn_layer_backward", dims, types)
    assert back.flop_count == 2 * layer.flop_count
    odd = of("aten::mkldnn_rnn_layer", [[steps, batch, 3], *dims[1:]], types)
    assert (odd.flop_count, odd.reason) == (None, "inner dimensions differ: 3 and 256")


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_bags_are_of_all_rows_or_of_those_used(sparse: bool) -> None:
    long = "long int"
    back = of(
        "aten::_embedding_bag_backward",
        [[2, 16], [8], [2], [0], [2], [2], *[[]] * 5],
        ["float", *[long] * 5, *["Scalar"] * 4, ""],
        [*[""] * 6, "100", "False", "0", str(sparse), ""],
    )
    assert back.bytes_count == 2 * 16 * 4 + 8 * 8 + 2 * 8 + (8 if sparse else 100) * 16 * 4


def test_scattered_writes_touch_the_places_that_are_indexed() -> None:
    long = "long int"
    types = ["float", "Scalar", long, "float"]
    dims = [[100, 8], [], [4, 8], [4, 8]]
    # index and source read, the places written; added to: read before
    assert of("aten::scatter_", dims, types).bytes_count == 32 * (8 + 4 + 4)
    assert of("aten::scatter_add_", dims, types).bytes_count == 32 * (8 + 4 + 2 * 4)
    rows = [[100, 8], [], [4], [4, 8]]
    assert of("aten::index_copy_", rows, types).bytes_count == 4 * 8 + 2 * 32 * 4
    assert of("aten::index_add_", rows, types).bytes_count == 4 * 8 + 3 * 32 * 4
    put = ["float", "", "float", "Scalar"]
    values = ["", "", "", "True"]
    assert of("aten::index_put_", [[100, 8], [], [4, 8], []], put).bytes_count == 2 * 128
    assert of("aten::index_put_", [[100, 8], [], [4, 8], []], put, values).bytes_count == 3 * 128
    scalar = of("aten::index_put_", [[100, 8], [], [], []], put)
    assert scalar.bytes_count is None
    assert scalar.reason == "bytes: which elements are written was not recorded"
    bags = of(
        "aten::_embedding_bag",
        [[10, 64], [8], [2], *[[]] * 6],
        ["float", long, long, *["Scalar"] * 6],
        ["", "", "", "False", "0", "False", "", "False", "-1"],
    )
    # 8 indices and 2 offsets, 8 rows of the table, 2 bags
    assert bags.bytes_count == 8 * 8 + 2 * 8 + (8 + 2) * 64 * 4


def test_reductions_of_unrecorded_dimensions_count_what_they_read() -> None:
    assert of("aten::sum", [[64, 8], [], [], []], "float").bytes_count == 64 * 8 * 4


def test_copies_do_not_read_their_target() -> None:
    assert of(
        "aten::copy_", [[64, 8], [64, 8], []], ["c10::BFloat16", "float", "Scalar"]
    ).bytes_count == (64 * 8 * (4 + 2))
    assert of("aten::zero_", [[64]], "float").bytes_count == 64 * 4
    assert of("aten::fill_", [[64], []], "double").bytes_count == 64 * 8


def test_gathers_read_what_they_take() -> None:
    # 888 rows of 2880 bf16 read and written, 888 indices of 8 bytes (a recorded B200 run).
    work = of(
        "aten::embedding",
        [[25136, 2880], [888], [], [], []],
        ["c10::BFloat16", "long int", "Scalar", "Scalar", "Scalar"],
    )
    assert work.bytes_count == 2 * 888 * 2880 * 2 + 888 * 8
    # Two rows in the table: it is read once, however many indices there are.
    work = of("aten::embedding", [[2, 512], [1, 141]], ["float", "long int"])
    assert work.bytes_count == 2 * 512 * 4 + 141 * 8 + 141 * 512 * 4
    work = of(
        "aten::index_select", [[50, 4], [], [7]], ["float", "Scalar", "long int"], ["", "0", ""]
    )
    assert work.bytes_count == 7 * 8 + 2 * 7 * 4 * 4
    work = of(
        "aten::nll_loss_backward",
        [[], [32, 1000], [32], [], [], [], []],
        ["float", "float", "long int", "", "Scalar", "Scalar", "float"],
    )
    assert work.bytes_count == 4 + 32 * 8 + 32 * 1000 * 4


def test_compiled_kernels_touch_each_buffer_once() -> None:
    # A recorded MI300X run: two inputs, one output, 8·4096·2048 elements.
    dims = [[8, 4096, 2048], [8, 4096, 2048], [32768, 2048], []]
    work = of(
        "triton_poi_fused__unsafe_view_add_3", dims, "c10::BFloat16", ["", "", "", "67108864"]
    )
    assert work.bytes_count == 3 * 67108864 * 2
    # A gather from a table larger than the iteration space reads a part of it.
    work = of("triton_poi_fused_0", [[1000000], [64], []], "float", ["", "", "64"])
    assert work.bytes_count == 2 * 64 * 4
    # Without an iteration space there is no telling.
    assert of("triton_poi_fused_0", [[8192], [8192, 64]], "float", ["", ""]).bytes_count is None
    assert family("triton_tem_fused_mm_0") == "gemm"


def sdpa(name: str, dims: list[Any], concrete: list[str]) -> Work:
    return of(name, dims, HALF, concrete)


def test_llama_3_8b_golden_numbers() -> None:
    """Batch 2, sequence 4096: 9.62e11 FLOP up-projection, 2.75e11 causal attention, forward."""
    up = of("aten::mm", [[8192, 4096], [4096, 14336]], HALF)
    assert up.flop_count == 2 * 8192 * 4096 * 14336
    assert f"{up.flop_count:.2e}" == "9.62e+11"
    q, kv = [2, 32, 4096, 128], [2, 8, 4096, 128]
    attention = sdpa(
        "aten::_scaled_dot_product_flash_attention",
        [q, kv, kv, [], [], [], []],
        ["", "", "", "0.", "True", "False", ""],
    )
    assert attention.flop_count == 4 * 2 * 32 * 4096 * 4096 * 128
    assert attention.useful_flop_count == 4 * 2 * 32 * (4096 * 4097 // 2) * 128
    assert f"{attention.useful_flop_count:.2e}" == "2.75e+11"
    # q and out, k and v of 8 heads, and a row's logsumexp in fp32
    assert attention.bytes_count == 2 * (2 * 2 * 32 + 2 * 2 * 8) * 4096 * 128 + 4 * 2 * 32 * 4096


def test_flash_attention_inner_and_outer_operator_agree() -> None:
    """H100, Qwen 1.5: the same call as [B, H, L, D] outside and [B, L, H, D] inside."""
    outer = sdpa(
        "aten::_scaled_dot_product_flash_attention",
        [[16, 16, 559, 64]] * 3 + [[]] * 4,
        ["", "", "", "0.", "True", "False", "0.125"],
    )
    inner = sdpa(
        "aten::_flash_attention_forward",
        [[16, 559, 16, 64]] * 3 + [[]] * 12,
        ["", "", "", "", "", "559", "559", "0.", "True", "False", "0.125", "", "", "", ""],
    )
    assert outer == inner
    assert outer.flop_count == 4 * 16 * 16 * 559 * 559 * 64
    backward = sdpa(
        "aten::_flash_attention_backward",
        [[16, 559, 16, 64]] * 5 + [[16, 16, 559]] + [[]] * 11,
        ["", "", "", "", "", "", "", "", "559", "559", "0.", "True", "", "", "", "", ""],
    )
    assert backward.flop_count == 10 * 16 * 16 * 559 * 559 * 64
    assert backward.useful_flop_count == 10 * 16 * 16 * (559 * 560 // 2) * 64


def test_memory_efficient_attention_masks() -> None:
    """[B, M, H, K] layout; custom_mask_type 1 aligns the mask with the first key, 2 the last."""
    q, k = [2, 8, 4, 64], [2, 32, 4, 64]
    dims = [q, k, k, *[[]] * 11]

    def masked(kind: str) -> Work:
        concrete = ["", "", "", "", "", "", "", "", "0.", kind, "True", "", "", ""]
        return sdpa("aten::_efficient_attention_forward", dims, concrete)

    pairs = 4 * 2 * 4 * 64
    assert masked("0").useful_flop_count == masked("0").flop_count == pairs * 8 * 32
    assert masked("1").useful_flop_count == pairs * (8 * 9 // 2)
    # the last query sees all 32 keys, the first 25
    assert masked("2").useful_flop_count == pairs * sum(range(25, 33))
    assert masked("").causal is None
    assert masked("").useful_flop_count == pairs * 8 * 32


def test_flash_attn_library() -> None:
    q, kv = [2, 1024, 32, 128], [2, 1024, 8, 128]
    dims = [q, kv, kv, *[[]] * 8]
    plain = ["", "", "", "0.", "0.088", "False", "-1", "-1", "0.", "", "False"]
    work = sdpa("flash_attn::_flash_attn_forward", dims, plain)
    assert work.useful_flop_count == work.flop_count == 4 * 2 * 32 * 1024 * 1024 * 128
    # a causal sliding window of 255 keys back: rows 0..255 see i + 1, the rest 256
    window = ["", "", "", "0.", "0.088", "True", "255", "0", "0.", "", "False"]
    work = sdpa("flash_attn::_flash_attn_forward", dims, window)
    assert work.useful_flop_count == 4 * 2 * 32 * (256 * 257 // 2 + 768 * 256) * 128
    grad = [q, q, kv, kv, q, [2, 32, 1024], q, kv, kv, *[[]] * 7]
    values = [*[""] * 9, "0.", "0.088", "True", "-1", "-1", "0.", ""]
    work = sdpa("flash_attn::_flash_attn_backward", grad, values)
    assert work.flop_count == 10 * 2 * 32 * 1024 * 1024 * 128
    assert work.useful_flop_count == 10 * 2 * 32 * (1024 * 1025 // 2) * 128


def test_flash_attention_3() -> None:
    q, kv = [2, 1024, 32, 128], [2, 1024, 8, 128]
    values = [*[""] * 23, "0.088", "True", "-1", "-1", "0", "0.", "False"]
    dims: list[Any] = [q, kv, kv, *[[]] * 27]
    work = sdpa("flash_attn_3::fwd", dims, values)
    assert work.flop_count == 4 * 2 * 32 * 1024 * 1024 * 128
    assert work.useful_flop_count == 4 * 2 * 32 * (1024 * 1025 // 2) * 128
    dims[3] = dims[4] = [2, 1, 8, 128]  # new keys for a cache of unknown filling
    assert sdpa("flash_attn_3::fwd", dims, values).flop_count is None


def packed(tokens: int, offsets: int, longest: int, key_tokens: int | None = None) -> Work:
    key_tokens = tokens if key_tokens is None else key_tokens
    dims: list[Any] = [[tokens, 32, 128], [key_tokens, 8, 128], [key_tokens, 8, 128]]
    dims += [[offsets], [offsets], *[[]] * 6]
    types = [HALF] * 3 + ["int"] * 2 + ["Scalar"] * 6
    longest_text = str(longest)
    values = [*[""] * 5, longest_text, longest_text, "0.", "0.088", "True", "-1"]
    return of("flash_attn::_flash_attn_varlen_forward", dims, types, values)


def test_packed_sequences_are_known_only_when_all_are_equal() -> None:
    per_pair = 4 * 32 * 128
    assert packed(4096, 5, 1024).useful_flop_count == 4 * per_pair * (1024 * 1025 // 2)
    assert packed(1000, 2, 1000).useful_flop_count == per_pair * (1000 * 1001 // 2)
    ragged = packed(4000, 5, 1024)
    assert ragged.flop_count is None
    assert "lengths" in (ragged.reason or "")


def test_sglang_prefill_on_mi300x() -> None:
    """15 sequences of 1024 tokens over a paged cache: 15·1024·1025/2 pairs."""
    dims = [[15360, 32, 128], [835874, 8, 128], [835874, 8, 128], [16], [16], [15616], *[[]] * 12]
    types = [HALF] * 3 + ["int"] * 3 + ["Scalar"] * 12
    values = [*[""] * 6, "1024", "1024", "0.", "0.088", "0.", "False", "True", "-1", "-1", "0"]
    work = of("aiter::mha_batch_prefill", dims, types, [*values, "False", "False"])
    assert work.useful_flop_count == 4 * 32 * 128 * 15 * (1024 * 1025 // 2)
    # the cache itself is not traffic: 15360 tokens of keys and values are
    assert work.bytes_count == 2 * 15360 * 128 * (32 + 8 + 8 + 32)
    # prefix caching: longer keys than queries, lengths are data
    values[7] = "2048"
    assert (
        of("aiter::mha_batch_prefill", dims, types, [*values, "False", "False"]).flop_count is None
    )


@given(
    st.integers(0, 24),
    st.integers(0, 24),
    st.none() | st.integers(0, 30),
    st.none() | st.integers(0, 30),
    st.integers(-30, 30),
)
def test_kept_pairs_equals_counting_them(
    queries: int, keys: int, left: int | None, right: int | None, offset: int
) -> None:
    brute = sum(
        (right is None or k <= q + offset + right) and (left is None or k >= q + offset - left)
        for q in range(queries)
        for k in range(keys)
    )
    assert kept_pairs(queries, keys, left=left, right=right, offset=offset) == brute


def test_rocm_and_cudnn_convolutions() -> None:
    # MI300X, ResNet: [10, 256, 14, 14] * [512, 256, 3, 3], stride 2, padding 1 -> 7 x 7
    values = ["", "", "", "[1, 1]", "[2, 2]", "[1, 1]", "1", "False", "False"]
    work = of(
        "aten::miopen_convolution", [[10, 256, 14, 14], [512, 256, 3, 3], *[[]] * 7], HALF, values
    )
    assert work.flop_count == 2 * 10 * 7 * 7 * 512 * 256 * 9
    assert work.bytes_count == 2 * (10 * 256 * 14 * 14 + 512 * 256 * 9 + 10 * 512 * 7 * 7)
    # The first layer's input needs no gradient: only the weight's counts.
    mask = [
        *[""] * 3,
        "[0]",
        "[2, 2]",
        "[3, 3]",
        "[1, 1]",
        "False",
        "[0, 0]",
        "1",
        "[False, True, False]",
    ]
    dims = [[10, 64, 112, 112], [10, 3, 224, 224], [64, 3, 7, 7], *[[]] * 8]
    work = of("aten::convolution_backward", dims, HALF, mask)
    assert work.flop_count == 2 * 10 * 112 * 112 * 64 * 3 * 49
    # cuDNN's arguments: no bias, padding before stride
    values = ["", "", "[3, 3]", "[2, 2]", "[1, 1]", "1", "False", "False", "True"]
    dims = [[32, 3, 224, 224], [64, 3, 7, 7], *[[]] * 7]
    work = of("aten::cudnn_convolution", dims, "float", values)
    assert work.flop_count == 2 * 32 * 112 * 112 * 64 * 3 * 49


def test_grouped_weight_gradient_keeps_both_counts() -> None:
    """torch.utils.flop_counter overcounts a depthwise weight gradient by the groups (here 32)."""
    dims = [[1, 32, 14, 14], [1, 32, 14, 14], [32, 1, 3, 3], *[[]] * 8]
    values = [
        *[""] * 3,
        "[0]",
        "[1, 1]",
        "[1, 1]",
        "[1, 1]",
        "False",
        "[0, 0]",
        "32",
        "[True, True, False]",
    ]
    work = of("aten::convolution_backward", dims, "float", values)
    one = 2 * 14 * 14 * 32 * 9
    assert work.useful_flop_count == 2 * one
    assert work.flop_count == one + 32 * one


def test_2021_convolutions_need_what_was_not_recorded() -> None:
    """Traces without concrete inputs: no stride, but the gradients' shapes fill the gap."""
    types = ["float", "float", "GenericList", "GenericList", "GenericList", "Int", "Bool"]
    dims: list[Any] = [[32, 64, 56, 56], [128, 64, 3, 3], [], [], [], [], []]
    blind = of("aten::cudnn_convolution", dims, types)
    assert (blind.flop_count, blind.family) == (None, "conv")
    assert "stride" in (blind.reason or "")
    told = of("aten::cudnn_convolution", dims, types, output_dims=(32, 128, 28, 28))
    assert told.flop_count == 2 * 32 * 28 * 28 * 128 * 64 * 9
    types = ["GenericList", "float", "float", "GenericList"]
    into = of(
        "aten::cudnn_convolution_backward_input",
        [[], [32, 128, 28, 28], [128, 64, 3, 3], []],
        types,
    )
    assert into.flop_count == told.flop_count
    assert into.bytes_count is None
    dims = [[], [32, 128, 28, 28], [32, 64, 56, 56], []]
    assert of("aten::cudnn_convolution_backward_weight", dims, types).flop_count is None
    weight = of("aten::cudnn_convolution_backward_weight", dims, types, output_dims=(128, 64, 3, 3))
    assert weight.flop_count == told.flop_count
    assert weight.bytes_count == 4 * (32 * 128 * 28 * 28 + 32 * 64 * 56 * 56 + 128 * 64 * 9)


def test_2021_traces_have_other_type_names_or_none() -> None:
    dims = "[[32], [16, 8], [8, 32], [], []]"
    work = estimate("aten::addmm", dims, "[]", None)
    assert work is not None
    assert (work.flop_count, work.bytes_count, work.dtype) == (2 * 16 * 8 * 32, None, None)
    assert work.reason == "bytes: element types were not recorded"
    work = estimate("aten::addmm", dims, '["float", "float", "float", "Int", "Int"]', None)
    assert work is not None
    assert work.bytes_count == 4 * (32 + 16 * 8 + 8 * 32 + 16 * 32)


TYPES = {
    "bf16": HALF, "fp32": "float", "fp64": "double", "int8": "signed char",
    "uint8": "unsigned char", "int": "int", "fp8": "c10::Float8_e4m3fn",
    "fp4": "c10::Float4_e2m1fn_x2", "-": "", "s": "Scalar",
}  # fmt: skip
GROUPED = "aten::_grouped_mm"
SCALED = "aten::_scaled_mm"
GROUPED_SCALED = "aten::_scaled_grouped_mm"
LINEAR = "mkldnn::_linear_pointwise"
LINEAR_BACKWARD = "aten::mkldnn_linear_backward"


def concrete_inputs(text: str, types: int) -> list[str] | None:
    """Concrete inputs of as many arguments: those of the last ones, ``-`` for none."""
    values = ["" if value == "-" else value for value in text.replace(", ", ",").split()]
    return [*[""] * (types - len(values)), *values] if values else None


@pytest.mark.parametrize(
    ("name", "dims", "types", "concrete", "flop", "dtype"),
    [
        # 64 tokens routed to 4 experts of 32 x 16
        (GROUPED, [[64, 32], [4, 32, 16], [4], [], []], "bf16 bf16 int - -", "", 65536, "bf16"),
        # weight gradient: K = 64 tokens cut into 4 groups, a 32 x 16 result each
        (GROUPED, [[32, 64], [64, 16], [4], [], []], "bf16 bf16 int - -", "", 65536, "bf16"),
        (GROUPED, [[4, 32, 8], [8, 64], [4], [], []], "bf16 bf16 int - -", "", 32768, "bf16"),
        (GROUPED, [[4, 32, 8], [4, 8, 16], [], [], []], "bf16 bf16 - - -", "", 32768, "bf16"),
        (
            *(GROUPED_SCALED, [[64, 32], [4, 32, 16], [64], [4, 16], [4], [], [], [], []]),
            *("fp8 fp8 fp32 fp32 int - - s s", "15 True", 65536, "fp8"),
        ),
        # two 4-bit values per element: K is 64, not 32
        (
            *(SCALED, [[16, 32], [32, 48], [16, 4], [48, 4], [], [], [], []]),
            *("fp4 fp4 fp8 fp8 - - s s", "15 False", 2 * 16 * 64 * 48, "fp4"),
        ),
        ("aten::_int_mm", [[32, 64], [64, 16]], "int8 int8", "", 65536, "int8"),
        ("aten::mv", [[24, 5], [5]], "fp64 fp64", "", 240, "fp64"),
        ("aten::dot", [[5], [5]], "fp32 fp32", "", 10, "fp32"),
        ("aten::matmul", [[2, 1, 5, 7], [3, 7, 4]], "fp32 fp32", "", 2 * 6 * 5 * 7 * 4, "fp32"),
        ("aten::matmul", [[5], [3, 5, 4]], "fp32 fp32", "", 2 * 3 * 5 * 4, "fp32"),
        (LINEAR, [[6, 8], [16, 8], [16]], "fp32 fp32 fp32", "", 1536, "fp32"),
        (LINEAR, [[6, 8], [6, 16], [16, 8], [16]], "fp32 fp32 fp32 fp32", "", 1536, "fp32"),
        (
            *("vllm::rocm_unquantized_gemm", [[8192, 2880], [32, 2880], [32]]),
            *("bf16 bf16 bf16", "", 1509949440, "bf16"),
        ),
        (
            *("aiter::gemm_a16w16", [[15360, 4096], [6144, 4096]]),
            *("bf16 bf16", "", 2 * 15360 * 4096 * 6144, "bf16"),
        ),
        ("aiter::gemm_a4w4", [[16, 32], [48, 32]], "uint8 uint8", "", 2 * 16 * 64 * 48, "fp4"),
    ],
)
def test_matrix_products_worked_by_hand(
    name: str, dims: list[Any], types: str, concrete: str, flop: int, dtype: str
) -> None:
    names = [TYPES[short] for short in types.split()]
    work = of(name, dims, names, concrete_inputs(concrete, len(names)))
    assert (work.family, work.flop_count, work.dtype) == ("gemm", flop, dtype)


@pytest.mark.parametrize(
    ("name", "dims", "types", "concrete", "flop", "bytes_count"),
    [
        # four products of 5 x 7 and 7 x 3, summed into one 5 x 3; the addend is read unless β is 0
        (
            *("aten::addbmm", [[5, 3], [4, 5, 7], [4, 7, 3], [], []], "fp32 fp32 fp32 s s", "1 1"),
            *(2 * 4 * 5 * 7 * 3, 4 * (15 + 140 + 84 + 15)),
        ),
        (
            *("aten::addbmm", [[5, 3], [4, 5, 7], [4, 7, 3], [], []], "fp32 fp32 fp32 s s", "0 1"),
            *(2 * 4 * 5 * 7 * 3, 4 * (140 + 84 + 15)),
        ),
        # input, its gradient, weight, its gradient, and the result's, which is read by both
        (
            *(LINEAR_BACKWARD, [[6, 8], [6, 16], [16, 8], []], "fp32 fp32 fp32 -"),
            *("[True, True, False]", 2 * 2 * 6 * 16 * 8, 4 * (96 + 48 + 48 + 128 + 128)),
        ),
        (
            *(LINEAR_BACKWARD, [[6, 8], [6, 16], [16, 8], []], "fp32 fp32 fp32 -"),
            *("[False, True, False]", 2 * 6 * 16 * 8, 4 * (96 + 48 + 128)),
        ),
        # fp8 in, 15 is bfloat16 out, with a bias
        (
            *("aten::_scaled_mm_v2", [[16, 32], [32, 48], [], [], [], [], [], [], [48], []]),
            *("fp8 fp8 - - - - - - bf16 s", "15"),
            *(2 * 16 * 32 * 48, 16 * 32 + 32 * 48 + 2 * 48 + 2 * 16 * 48),
        ),
        (
            *("_C::cutlass_scaled_mm", [[16, 48], [16, 32], [32, 48]], "bf16 fp8 fp8", ""),
            *(2 * 16 * 32 * 48, 2 * 16 * 48 + 16 * 32 + 32 * 48),
        ),
        # 4 bits a weight; N stands in the scales [K/group, N, 2]
        (
            *("aten::_weight_int4pack_mm", [[4, 64], [2, 2, 32, 4], [], [2, 16, 2]]),
            *("bf16 int s bf16", "32 -"),
            *(2 * 4 * 64 * 16, 2 * 4 * 64 + 64 * 16 // 2 + 2 * 2 * 16 * 2 + 2 * 4 * 16),
        ),
        # Two layers of 32 -> 64 -> 32 on 16 rows; what is kept between them is not recorded.
        (
            *("_LayerNormMLP", [[2, 8, 32], [32], [64, 32], [64], [32, 64]]),
            *("bf16 bf16 bf16 bf16 bf16", "", 2 * 16 * (64 * 32 + 32 * 64), None),
        ),
    ],
)
def test_rarer_products_worked_by_hand(
    name: str, dims: list[Any], types: str, concrete: str, flop: int, bytes_count: int | None
) -> None:
    names = [TYPES[short] for short in types.split()]
    work = of(name, dims, names, concrete_inputs(concrete, len(names)))
    assert (work.family, work.flop_count, work.bytes_count) == ("gemm", flop, bytes_count)


def test_a_backward_that_does_not_say_which_gradients_has_no_count() -> None:
    work = of("aten::linear_backward", [[6, 8], [6, 16], [16, 8], []], ["float"] * 3 + [""])
    assert work.flop_count is None
    assert work.reason == "the requested gradients were not recorded"


def test_a_convolution_from_a_triton_template() -> None:
    """3 channels into 16 by filters of 3 x 3: each of the 2·16·8·8 results meets 27 weights."""
    work = of(
        "triton_tem_fused_convolution_1", [[2, 3, 8, 8], [16, 3, 3, 3], [2, 16, 8, 8]], "float"
    )
    assert (work.family, work.flop_count) == ("conv", 2 * 2048 * 27)
    assert work.bytes_count == 4 * (384 + 432 + 2048)


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("aten::mm", [[5, 7], [8, 3]]),
        ("aten::mm", [[5, 7]]),
        ("aten::mm", [[5], [7]]),
        ("aten::mm", [[5, -7], [-7, 3]]),
        ("aten::mm", [[5, 7.5], [7.5, 3]]),
        ("aten::bmm", [[4, 5, 7], [3, 7, 3]]),
        ("aten::linear", [[5, 7], [3, 8], []]),
        ("aten::matmul", [[2, 5, 7], [3, 7, 4]]),
        ("aten::mm", [[256, 16], [2, 8, 16, 4]]),
        ("aten::bmm", [[1, 5, 7], [3, 7, 4]]),
        ("aten::mv", [[63], [63]]),
        ("aten::dot", [[4, 4], [4, 4]]),
        ("aten::addmm", [[7], [5, 7], [7]]),
        (
            "aten::_scaled_dot_product_flash_attention",
            [[2, 3, 8, 64], [2, 2, 8, 64], [2, 2, 8, 64]],
        ),
        (
            "aten::_scaled_dot_product_flash_attention",
            [[2, 3, 8, 64], [2, 3, 8, 32], [2, 3, 8, 64]],
        ),
        ("aten::convolution_backward", [[1, 8, 4, 4], [1, 8, 4, 4], [8, 3, 3, 3]]),
    ],
)
def test_impossible_shapes_are_unknown_with_a_reason(name: str, dims: list[Any]) -> None:
    work = of(name, dims, "float")
    assert work.flop_count is None
    assert work.useful_flop_count is None
    assert work.reason


def test_names_that_nobody_models() -> None:
    assert estimate("aten::view", "[[1]]", '["float"]', None) is None
    assert estimate("", None, None, None) is None
    assert family("aten::mm") == "gemm"
    assert family("aten::_foreach_add_") == "vector"
    assert family("aten::view") is None
    lost = estimate("aten::mm", None, None, None)
    assert lost is not None
    assert lost.reason == "shapes were not recorded"


@pytest.mark.parametrize(
    ("kernel", "want"),
    [
        ("ampere_sgemm_128x64_nn", "fp32"),
        ("volta_scudnn_128x64_relu_xregs_large_nn_v1", "fp32"),
        ("void cutlass::Kernel<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(...)", "fp32"),
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x128_16x4_nt_align1>(...)", "tf32"),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize1x1x1", "tf32"),
        ("sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw", "tf32"),
        (
            "void cutlass_cudnn_infer::Kernel<cutlass_tensorop_s1688dgrad_optimized_tf32_128x128>",
            "tf32",
        ),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x64x8", "fp32"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "bf16"),
        ("Cijk_Ailk_Bljk_S_B_Bias_HA_S_SAV_UserArgs_MT64x64x64_MI16x16x1_SN", "fp32"),
        ("Cijk_Alik_Bljk_S_MX_B_Bias_HA_S_SAV_UserArgs_MT128x128x32_MI16x16x1", "tf32"),
        ("Cijk_Ailk_Bjlk_BBS_BH_Bias_HAS_SAV_UserArgs_MT64x32x64_MI16x16x1_SN", "bf16"),
        ("Cijk_Ailk_Bjlk_HHS_BH_Bias_HAS_SAV_UserArgs_MT64x32x64_MI16x16x1_SN", "fp16"),
        ("igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32_wt32x32x8", "bf16"),
        ("volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn", "fp16"),
        ("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_nn", "fp16"),
        ("nvjet_tst_144x128_64x6_2x1_v_bz_bias_TNN", "bf16"),
        ("nvjet_sm103_tst_128x8_64x12_4x1_v_bz_NNT", "bf16"),
        ("volta_dgemm_128x64_nn", "fp64"),
        ("some_kernel_nobody_knows", None),
    ],
)
def test_matmul_dtype_reads_kernel_names(kernel: str, want: str | None) -> None:
    assert matmul_dtype(None, kernel) == want
    assert matmul_dtype("fp32", kernel) == (want or "fp32")
    assert matmul_dtype("fp16", kernel) == "fp16"


# What a trace records of fbgemm::split_embedding_codegen_lookup_rowwise_adagrad_function: 5 tables,
# 2048 bags each. Widths are in no shape.
LOOKUP = [[0], [480_000], [0], [0, 0], [5], [5], [6], [], [], [6], [], [169_530], [10_241], []]
LOOKUP_TYPES = [
    *("float", "float", "float", "float", "int", "long", "int", "Scalar", "Scalar"),
    *("long", "Scalar", "long", "long", "Scalar"),
]


@pytest.mark.parametrize(
    ("total", "widest", "mode", "table", "bytes_count"),
    [
        # 96 floats a row: the tables are read once at most; a row per bag is written.
        ("480", "96", "0", 480_000, 169_530 * 8 + 10_241 * 8 + 480_000 * 4 + 10_240 * 384),
        # Without pooling, a row per index is.
        ("480", "96", "2", 480_000, 169_530 * 8 + 10_241 * 8 + 480_000 * 4 + 169_530 * 384),
        # Tables in the host's memory bound nothing.
        ("480", "96", "0", 0, 169_530 * 8 + 10_241 * 8 + 169_530 * 384 + 10_240 * 384),
    ],
)
def test_a_lookup_in_many_tables_reads_and_writes_rows(
    total: str, widest: str, mode: str, table: int, bytes_count: int
) -> None:
    dims = [[0], [table], *LOOKUP[2:]]
    given = ["", "", "", "", "", "", "", total, widest, "", "", "", "", mode]
    name = "fbgemm::split_embedding_codegen_lookup_rowwise_adagrad_function"
    work = of(name, dims, LOOKUP_TYPES, given)
    assert (work.family, work.bytes_count) == ("vector", bytes_count)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (None, "row widths are not recorded"),
        (["480", "128"], "rows differ in width"),
    ],
)
def test_a_lookup_of_unknown_widths_has_no_bytes(given: list[str] | None, reason: str) -> None:
    concrete = None if given is None else [""] * 7 + given + [""] * 4 + ["0"]
    name = "fbgemm::split_embedding_codegen_lookup_adam_function"
    work = of(name, LOOKUP, LOOKUP_TYPES, concrete)
    assert work.bytes_count is None
    assert reason in str(work.reason)


def test_a_sum_of_products_that_is_not_batched_is_unknown() -> None:
    work = estimate("aten::addbmm", "[[8, 8], [8, 8], [8, 8]]", '["float", "float", "float"]', None)
    assert work is not None
    assert work.flop_count is None
    assert work.reason == "expected 3 dimensions, found [8, 8]"
