"""The FLOP and byte model, against torch itself, worked examples, real traces and TraceLens."""

from __future__ import annotations

import ast
import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chopper.analyzers.work import MODELS, Work, estimate, family, matmul_dtype
from chopper.analyzers.work.attention import kept_pairs


class Recorded(NamedTuple):
    name: str
    dims: str | None
    types: str | None
    concrete: str | None

    def work(self, **known: Any) -> Work | None:
        return estimate(self.name, self.dims, self.types, self.concrete, **known)


def of(
    name: str,
    dims: list[Any],
    types: str | list[str],
    concrete: list[str] | None = None,
    **known: Any,
) -> Work:
    """estimate() of hand-written arguments; one type name stands for all tensors."""
    if isinstance(types, str):
        types = [types if size else "Scalar" for size in dims]
    text = None if concrete is None else json.dumps(concrete)
    work = estimate(name, json.dumps(dims), json.dumps(types), text, **known)
    assert work is not None
    return work


# ---- against torch: the profiler's record, FlopCounterMode's number ---------------------------

try:
    import torch as _torch
except ImportError:
    _torch = None  # type: ignore[assignment]
torch: Any = _torch

needs_torch = pytest.mark.skipif(torch is None, reason="needs torch to run the operators")


def profiled(run: Callable[[], Any], tmp_path: Path) -> list[Recorded]:
    """What Kineto writes about every operator of `run`."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
        run()
    path = tmp_path / "trace.json"
    prof.export_chrome_trace(str(path))
    return [
        recorded(event) for event in json.loads(path.read_text())["traceEvents"] if is_op(event)
    ]


def is_op(event: Any) -> bool:
    return isinstance(event, dict) and event.get("cat") in ("cpu_op", "Operator")


def recorded(event: dict[str, Any]) -> Recorded:
    args = event.get("args", {})

    def text(*keys: str) -> str | None:
        return next((json.dumps(args[key]) for key in keys if key in args), None)

    return Recorded(
        event["name"],
        text("Input Dims", "Input dims"),
        text("Input type"),
        text("Concrete Inputs"),
    )


def counted(run: Callable[[], Any]) -> dict[str, int]:
    """FlopCounterMode's count per operator."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    total = counter.get_flop_counts()["Global"]
    return {str(op).replace("aten.", "aten::"): count for op, count in total.items()}


def agree(run: Callable[[], Any], tmp_path: Path) -> dict[str, list[Work]]:
    """Assert that both count the same for each operator that both know; return our works."""
    want = counted(run)
    events = profiled(run, tmp_path)
    works: dict[str, list[Work]] = {}
    for event in events:
        work = event.work()
        if work is not None and work.family != "vector":
            assert work.flop_count is not None, (event, work.reason)
            works.setdefault(event.name, []).append(work)
    assert want, "the counter saw nothing: the test would prove nothing"
    got = {name: sum(w.flop_count or 0 for w in works.get(name, [])) for name in want}
    assert got == want
    return works


def leaf(*shape: int, dtype: Any = None) -> Any:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


GEMM_CASES: dict[str, Callable[[], Any]] = {
    "mm": lambda: (leaf(5, 7) @ leaf(7, 3)).sum().backward(),
    "linear": lambda: (
        torch.nn.functional.linear(leaf(2, 5, 7), leaf(3, 7), leaf(3)).sum().backward()
    ),
    "addmm": lambda: torch.addmm(leaf(3), leaf(5, 7), leaf(7, 3)).sum().backward(),
    "addmm-out": lambda: torch.addmm(
        torch.ones(3), torch.ones(5, 7), torch.ones(7, 3), out=torch.empty(5, 3)
    ),
    "bmm": lambda: torch.bmm(leaf(4, 5, 7), leaf(4, 7, 3)).sum().backward(),
    "baddbmm": lambda: torch.baddbmm(leaf(5, 3), leaf(4, 5, 7), leaf(4, 7, 3)).sum().backward(),
    "matmul-4d": lambda: (leaf(2, 1, 5, 7) @ leaf(3, 7, 4)).sum().backward(),
    "empty": lambda: torch.mm(torch.ones(0, 4), torch.ones(4, 3)),
    "bf16": lambda: torch.mm(
        torch.ones(5, 7, dtype=torch.bfloat16), torch.ones(7, 3, dtype=torch.bfloat16)
    ),
    "fp8": lambda: torch._scaled_mm(
        torch.ones(16, 32).to(torch.float8_e4m3fn),
        torch.ones(48, 32).to(torch.float8_e4m3fn).t(),
        scale_a=torch.ones(()),
        scale_b=torch.ones(()),
        out_dtype=torch.bfloat16,
    ),
}


@needs_torch
@pytest.mark.parametrize("case", GEMM_CASES)
def test_matrix_products_equal_the_flop_counter(case: str, tmp_path: Path) -> None:
    works = agree(GEMM_CASES[case], tmp_path)
    for name, found in works.items():
        assert {work.family for work in found} == {"gemm"}, name
        assert all(work.useful_flop_count == work.flop_count for work in found)
        assert all(work.bytes_count is not None for work in found)


def conv(dims: int, transposed: bool = False, **options: Any) -> Callable[[], Any]:
    functional = torch.nn.functional if torch else None

    def run() -> None:
        groups = options.get("groups", 1)
        size = {1: (17,), 2: (9, 11), 3: (5, 6, 7)}[dims]
        kernel = {1: (3,), 2: (3, 2), 3: (2, 3, 2)}[dims]
        shape = (8, 6 // groups) if transposed else (6, 8 // groups)
        bias = None if options.get("no_bias") else leaf(6)
        call = getattr(functional, f"conv_transpose{dims}d" if transposed else f"conv{dims}d")
        known = {key: value for key, value in options.items() if key != "no_bias"}
        call(leaf(3, 8, *size), leaf(*shape, *kernel), bias, **known).sum().backward()

    return run


CONV_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-bias": {"no_bias": True},
    "stride": {"stride": 2, "padding": 1},
    "dilated": {"dilation": 2, "padding": 2},
    "groups": {"groups": 2},
    "transposed": {"transposed": True},
    "transposed-stride": {"transposed": True, "stride": 2, "padding": 1, "output_padding": 1},
    "transposed-groups": {"transposed": True, "groups": 2, "stride": 2},
}
CONV_CASES: dict[str, Callable[[], Any]] = {
    f"{dims}d-{label}": conv(dims, **options)
    for dims in (1, 2, 3)
    for label, options in CONV_OPTIONS.items()
}
CONV_CASES["2d-same"] = conv(2, padding="same", no_bias=True)
CONV_CASES["1d-unbatched"] = lambda: torch.nn.functional.conv1d(leaf(4, 9), leaf(6, 4, 3))
CONV_CASES["2d-depthwise-double"] = lambda: (
    torch.nn.functional.conv2d(
        leaf(1, 4, 8, 8, dtype=torch.double), leaf(4, 1, 3, 3, dtype=torch.double), groups=4
    )
    .sum()
    .backward()
)
CONV_CASES["2d-frozen-weight"] = lambda: (
    torch.nn.functional.conv2d(leaf(2, 4, 8, 8), torch.ones(6, 4, 3, 3)).sum().backward()
)
CONV_CASES["2d-frozen-input"] = lambda: (
    torch.nn.functional.conv2d(torch.ones(2, 4, 8, 8), leaf(6, 4, 3, 3)).sum().backward()
)


@needs_torch
@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize("case", CONV_CASES)
def test_convolutions_equal_the_flop_counter(case: str, tmp_path: Path) -> None:
    # padding='same' is not among conv2d's recorded values: the operators inside know it.
    want = counted(CONV_CASES[case])
    events = profiled(CONV_CASES[case], tmp_path)
    works = [(event, work) for event in events if (work := event.work()) and work.family == "conv"]
    got = dict.fromkeys(want, 0)
    for event, work in works:
        if event.name in got:
            assert work.flop_count is not None, (event, work.reason)
            assert work.bytes_count is not None, (event, work.reason)
            got[event.name] += work.flop_count
    assert want
    assert got == want
    forward = [w for e, w in works if e.name == "aten::convolution"]
    inner = [
        w
        for e, w in works
        if e.name
        in ("aten::mkldnn_convolution", "aten::_slow_conv2d_forward", "aten::slow_conv3d_forward")
    ]
    if inner:  # the operators inside do together what the outer one says
        assert sum(w.flop_count or 0 for w in inner) == sum(w.flop_count or 0 for w in forward)


def attention(
    backend: str,
    *,
    heads: int = 4,
    kv_heads: int = 4,
    queries: int = 16,
    keys: int = 16,
    head: int = 8,
    value: int = 8,
    causal: bool = False,
    backward: bool = True,
) -> Callable[[], Any]:
    """One attention call; "meta" backends run without a device and are recorded all the same."""

    def run() -> None:
        device = "cpu" if backend in ("auto", "math") else "meta"

        def tensor(*shape: int) -> Any:
            dtype = torch.float32 if device == "cpu" else torch.bfloat16
            return torch.ones(2, *shape, device=device, dtype=dtype, requires_grad=device == "cpu")

        q, k, v = (
            tensor(heads, queries, head),
            tensor(kv_heads, keys, head),
            tensor(kv_heads, keys, value),
        )
        aten = torch.ops.aten
        if backend in ("auto", "math"):
            from torch.nn.attention import SDPBackend, sdpa_kernel

            allowed = [SDPBackend.MATH] if backend == "math" else [SDPBackend.FLASH_ATTENTION]
            with sdpa_kernel(allowed):
                out = torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=causal, enable_gqa=heads != kv_heads
                )
            if backward:
                out.sum().backward()
            return
        grad = tensor(heads, queries, value)
        if backend == "flash":
            out, lse, cq, ck, mq, mk, seed, offset, _ = aten._scaled_dot_product_flash_attention(
                q, k, v, 0.0, causal
            )
            if backward:
                aten._scaled_dot_product_flash_attention_backward(
                    grad, q, k, v, out, lse, cq, ck, mq, mk, 0.0, causal, seed, offset
                )
        elif backend == "efficient":
            out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(
                q, k, v, None, True, 0.0, causal
            )
            if backward:
                aten._scaled_dot_product_efficient_attention_backward(
                    grad, q, k, v, None, out, lse, seed, offset, 0.0, [True] * 4, causal
                )
        elif backend == "cudnn":
            out, lse, cq, ck, mq, mk, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, causal
            )
            if backward:
                aten._scaled_dot_product_cudnn_attention_backward(
                    grad, q, k, v, out, lse, seed, offset, None, cq, ck, mq, mk, 0.0, causal
                )

    return run


ATTENTION_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "grouped": {"kv_heads": 2},
    "cross": {"queries": 16, "keys": 48},
    "one-query": {"queries": 1, "keys": 33},
}


@needs_torch
@pytest.mark.parametrize("backend", ["flash", "efficient", "cudnn", "math"])
@pytest.mark.parametrize("case", ATTENTION_CASES)
def test_attention_equals_the_flop_counter(backend: str, case: str, tmp_path: Path) -> None:
    works = agree(attention(backend, **ATTENTION_CASES[case]), tmp_path)
    if backend == "math":  # counted as the bmm that it is made of
        assert "aten::bmm" in works
        return
    forward = works[f"aten::_scaled_dot_product_{backend}_attention"]
    backward = works[f"aten::_scaled_dot_product_{backend}_attention_backward"]
    assert [work.direction for work in forward + backward] == ["forward", "backward"]
    for work in forward + backward:
        assert work.causal is (case == "causal")
        assert work.dtype == "bf16"
        assert work.bytes_count is not None
        if case == "causal":  # 16·17/2 of 16² pairs
            assert work.useful_flop_count == (work.flop_count or 0) * 136 // 256
        else:
            assert work.useful_flop_count == work.flop_count


@needs_torch
@pytest.mark.parametrize("case", ATTENTION_CASES)
def test_cpu_flash_attention_costs_what_the_gpu_one_costs(case: str, tmp_path: Path) -> None:
    """FlopCounterMode does not know the CPU kernel: its twin's count, same shapes, holds."""
    options = ATTENTION_CASES[case]
    want = counted(attention("flash", **options))
    works = [
        (event.name, event.work()) for event in profiled(attention("auto", **options), tmp_path)
    ]
    cpu = "aten::_scaled_dot_product_flash_attention_for_cpu"
    twin = "aten::_scaled_dot_product_flash_attention"
    for suffix in ("", "_backward"):
        found = [work for name, work in works if name == cpu + suffix]
        assert [work.flop_count for work in found if work] == [want[twin + suffix]]
        assert all(
            work and work.bytes_count and work.causal is (case == "causal") for work in found
        )
    outer = [work for name, work in works if name == "aten::scaled_dot_product_attention"]
    assert [work.flop_count for work in outer if work] == [want[twin]]


@needs_torch
def test_argument_positions_are_those_of_torchs_schemas() -> None:
    """The table's positions were typed by hand: torch's own schemas name the arguments."""
    schemas: dict[str, list[list[str]]] = {}
    for schema in torch._C._jit_get_all_schemas():
        if not schema.overload_name.endswith("out"):
            schemas.setdefault(schema.name, []).append([a.name for a in schema.arguments])
    named = {
        "stride": ("stride",),
        "padding": ("padding",),
        "dilation": ("dilation",),
        "bias": ("bias", "B", "attn_mask", "attn_bias"),
        "weight": ("weight", "W"),
        "x": ("self", "input", "X"),
        "grad": ("grad_output", "grad_out", "grad_out_", "gO"),
        "output_padding": ("output_padding",),
        "mask": ("output_mask",),
        "transposed": ("transposed",),
        "extra_read": ("z",),
        "mask_type": ("custom_mask_type",),
        "q": ("query",),
        "cu_q": ("cum_seq_q",),
        "max_q": ("max_q",),
    }
    checked = 0
    for name, model in MODELS.items():
        overloads = schemas.get(name)
        fields = getattr(type(model), "__dataclass_fields__", None)
        if not overloads or not fields:
            continue
        for field, wanted in named.items():
            position = getattr(model, field, None) if field in fields else None
            if position is None or isinstance(position, bool):
                continue
            assert any(
                position < len(arguments) and arguments[position] in wanted
                for arguments in overloads
            ), (name, field, position, overloads)
            checked += 1
        if "causal_flag" in fields and name in schemas:
            assert any("is_causal" in arguments for arguments in overloads), name
    assert checked > 100


@needs_torch
def test_dtype_codes_are_torchs(tmp_path: Path) -> None:
    """A cast records its dtype as a number: ours must read it as the width torch gave it."""
    names = (
        "uint8 int8 int16 int32 int64 float16 float32 float64 bool bfloat16 "
        "float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz complex64 complex128"
    )
    kinds = [getattr(torch, name) for name in names.split()]
    source = torch.ones(8, dtype=torch.int16)
    narrow = torch.ones(8, dtype=torch.uint8)

    def run() -> None:
        for kind in kinds:
            (narrow if kind == torch.int16 else source).to(kind)

    casts = [e.work() for e in profiled(run, tmp_path) if e.name == "aten::_to_copy"]
    want = [8 * (1 if kind == torch.int16 else 2) + 8 * kind.itemsize for kind in kinds]
    assert [work.bytes_count for work in casts if work] == want


# ---- against torch: the bytes of the tensors that really went in and out ----------------------


def moved(run: Callable[[], Any]) -> dict[str, int]:
    """Bytes of all tensors that enter and leave the first call of each operator."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    total: dict[str, int] = {}

    class Meter(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            given = {key: value for key, value in (kwargs or {}).items() if key != "out"}
            tensors = [t for t in tree_leaves((args, given, out)) if torch.is_tensor(t)]
            total.setdefault(func._schema.name, sum(t.nbytes for t in tensors))
            return out

    with Meter():
        run()
    return total


def norm_inputs(*shape: int) -> tuple[Any, Any, Any]:
    return leaf(*shape), leaf(shape[1]), leaf(shape[1])


VECTOR_CASES: dict[str, tuple[str, Callable[[], Any]]] = {
    "add": ("aten::add", lambda: torch.ones(64, 8) + torch.ones(8)),
    "add-int-float": ("aten::add", lambda: torch.ones(64, dtype=torch.int32) + torch.ones(64)),
    "add-mixed": ("aten::add", lambda: torch.ones(64).bfloat16() + torch.ones(64)),
    "add-scalar-tensor": ("aten::mul", lambda: torch.ones(64).bfloat16() * torch.ones(())),
    "add_": ("aten::add_", lambda: torch.ones(64, 8).add_(torch.ones(8))),
    "eq": ("aten::eq", lambda: torch.ones(64, 8) == torch.ones(8)),
    "where": (
        "aten::where",
        lambda: torch.where(torch.ones(64) > 0, torch.ones(64), torch.ones(64)),
    ),
    "relu": ("aten::relu", lambda: torch.relu(torch.ones(64, dtype=torch.half))),
    "gelu-backward": (
        "aten::gelu_backward",
        lambda: torch.nn.functional.gelu(leaf(64)).sum().backward(),
    ),
    "mul-out": (
        "aten::mul",
        lambda: torch.mul(torch.ones(64), torch.ones(64), out=torch.empty(64)),
    ),
    "clone": ("aten::clone", lambda: torch.ones(64, dtype=torch.double).clone()),
    "cast": ("aten::_to_copy", lambda: torch.ones(64).to(torch.bfloat16)),
    "softmax": ("aten::_softmax", lambda: torch.softmax(torch.ones(64, 8), -1)),
    "softmax-backward": (
        "aten::_softmax_backward_data",
        lambda: torch.softmax(leaf(64, 8), -1).pow(2).sum().backward(),
    ),
    "log-softmax": ("aten::_log_softmax", lambda: torch.log_softmax(torch.ones(64, 8), -1)),
    "dropout": ("aten::native_dropout", lambda: torch.native_dropout(torch.ones(64, 8), 0.1, True)),
    "sum": ("aten::sum", lambda: torch.ones(64, 8).sum()),
    "sum-dim": ("aten::sum", lambda: torch.ones(64, 8).sum(-1, keepdim=True)),
    "sum-int": ("aten::sum", lambda: torch.ones(64, 8, dtype=torch.int32).sum(0)),
    "mean": ("aten::mean", lambda: torch.ones(64, 8).mean([0, 1])),
    "max-dim": ("aten::max", lambda: torch.ones(64, 8).max(1)),
    "max": ("aten::max", lambda: torch.ones(64, 8).max()),
    "argmax": ("aten::argmax", lambda: torch.ones(64, 8).argmax(1)),
    "any": ("aten::any", lambda: torch.ones(64, 8, dtype=torch.bool).any(1)),
    "norm": ("aten::linalg_vector_norm", lambda: torch.linalg.vector_norm(torch.ones(64, 8), 2, 1)),
    "layer-norm": (
        "aten::native_layer_norm",
        lambda: torch.nn.functional.layer_norm(
            torch.ones(64, 1024), [1024], *norm_inputs(2, 1024)[1:]
        ),
    ),
    "layer-norm-backward": (
        "aten::native_layer_norm_backward",
        lambda: (
            torch.nn.functional.layer_norm(leaf(256, 256), [256], leaf(256), leaf(256))
            .sum()
            .backward()
        ),
    ),
    "batch-norm-backward": (
        "aten::native_batch_norm_backward",
        lambda: (
            torch.nn.functional.batch_norm(
                (v := norm_inputs(16, 4, 32, 32))[0], None, None, v[1], v[2], True
            )
            .sum()
            .backward()
        ),
    ),
    "group-norm": (
        "aten::native_group_norm",
        lambda: torch.nn.functional.group_norm((v := norm_inputs(4, 8, 32, 32))[0], 2, v[1], v[2]),
    ),
    "group-norm-backward": (
        "aten::native_group_norm_backward",
        lambda: (
            torch.nn.functional.group_norm((v := norm_inputs(4, 8, 32, 32))[0], 2, v[1], v[2])
            .sum()
            .backward()
        ),
    ),
    "embedding": (
        "aten::embedding",
        lambda: torch.nn.functional.embedding(torch.arange(10), torch.ones(10, 8)),
    ),
    "embedding-backward": (
        "aten::embedding_dense_backward",
        lambda: torch.nn.functional.embedding(torch.arange(10), leaf(10, 8)).sum().backward(),
    ),
    "topk": ("aten::topk", lambda: torch.topk(torch.ones(64, 8), 2)),
    "topk-dim": ("aten::topk", lambda: torch.topk(torch.ones(64, 8), 3, dim=0)),
    "sort": ("aten::sort", lambda: torch.sort(torch.ones(64, 8))),
    "gather": (
        "aten::gather",
        lambda: torch.gather(torch.ones(64, 8), 1, torch.zeros(64, 8, dtype=torch.long)),
    ),
    "bucketize": (
        "aten::bucketize",
        lambda: torch.bucketize(torch.ones(64, 8), torch.arange(4.0), out_int32=True),
    ),
    "searchsorted": (
        "aten::searchsorted",
        lambda: torch.searchsorted(torch.arange(4.0), torch.ones(64, 8)),
    ),
    "max-pool": (
        "aten::max_pool2d_with_indices",
        lambda: torch.nn.functional.max_pool2d(leaf(2, 3, 17, 16), 3, 2, 1, ceil_mode=True),
    ),
    "avg-pool": (
        "aten::avg_pool2d",
        lambda: torch.nn.functional.avg_pool2d(torch.ones(2, 3, 17, 16), 3, 2),
    ),
    "adaptive-pool": (
        "aten::_adaptive_avg_pool2d",
        lambda: torch.nn.functional.adaptive_avg_pool2d(torch.ones(2, 3, 16, 16), 4),
    ),
    "upsample": (
        "aten::upsample_bilinear2d",
        lambda: torch.nn.functional.interpolate(
            torch.ones(2, 3, 8, 8), size=(12, 20), mode="bilinear"
        ),
    ),
    "upsample-backward": (
        "aten::upsample_nearest2d_backward",
        lambda: torch.nn.functional.interpolate(leaf(2, 3, 8, 8), scale_factor=2).sum().backward(),
    ),
    "pad": (
        "aten::constant_pad_nd",
        lambda: torch.nn.functional.pad(torch.ones(2, 3, 8, 8), (1, 2, 3, 0)),
    ),
    "grid-sample": (
        "aten::grid_sampler_2d",
        lambda: torch.nn.functional.grid_sample(
            torch.ones(2, 3, 8, 8), torch.zeros(2, 4, 5, 2), align_corners=False
        ),
    ),
    "fft": ("aten::_fft_r2c", lambda: torch.fft.rfft(torch.ones(64, 10))),
    "var-mean": ("aten::var_mean", lambda: torch.var_mean(torch.ones(64, 8), 0)),
    "glu": ("aten::glu", lambda: torch.nn.functional.glu(torch.ones(64, 8))),
    "glu-backward": (
        "aten::glu_backward",
        lambda: torch.nn.functional.glu(leaf(64, 8)).sum().backward(),
    ),
    "mse-loss": (
        "aten::mse_loss",
        lambda: torch.nn.functional.mse_loss(
            torch.ones(64, 8), torch.zeros(64, 8), reduction="none"
        ),
    ),
    "smooth-l1-backward": (
        "aten::smooth_l1_loss_backward",
        lambda: (
            torch.nn.functional.smooth_l1_loss(leaf(64, 8), torch.zeros(64, 8), reduction="none")
            .mul(2)
            .sum()
            .backward()
        ),
    ),
    "zeros": ("aten::zeros", lambda: torch.zeros(64, 8, dtype=torch.half)),
    "full": ("aten::full", lambda: torch.full((64, 8), 1.0)),
    "scatter": (
        "aten::scatter",
        lambda: torch.zeros(4, 8).scatter(0, torch.zeros(2, 8, dtype=torch.long), torch.ones(2, 8)),
    ),
    "index_copy": (
        "aten::index_copy",
        lambda: torch.zeros(64, 8).index_copy(0, torch.arange(4), torch.ones(4, 8)),
    ),
}


@needs_torch
@pytest.mark.parametrize("case", VECTOR_CASES)
def test_vector_traffic_is_what_went_in_and_out(case: str, tmp_path: Path) -> None:
    name, run = VECTOR_CASES[case]
    want = moved(run)[name]
    work = next(event.work() for event in profiled(run, tmp_path) if event.name == name)
    assert work is not None
    # Row statistics of the norms and the unread bias in their backward are all that may differ.
    close = pytest.approx(want, rel=0.02) if "-norm" in case else want
    assert work.bytes_count == close
    assert work.family == "vector"
    assert (work.direction == "backward") == ("backward" in name)


@needs_torch
def test_optimizers_count_elements_where_types_are_not_recorded(tmp_path: Path) -> None:
    parameters = [leaf(30, 20), leaf(20)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    n = 30 * 20 + 20

    def steps(**options: Any) -> list[tuple[str, Work]]:
        optimizer = torch.optim.AdamW(parameters, **options)
        optimizer.step()  # states are made here
        events = profiled(optimizer.step, tmp_path)
        return [(e.name, work) for e in events if (work := e.work()) and "::_f" in e.name]

    fused = dict(steps(fused=True))["aten::_fused_adamw_"]
    # p, g, m, v read; p, m, v written
    assert fused.unsized_element_count == 7 * n
    assert fused.bytes_count is None
    assert "types" in (fused.reason or "")
    amsgrad = dict(steps(fused=True, amsgrad=True))["aten::_fused_adamw_"]
    assert amsgrad.unsized_element_count == 9 * n

    each = [(name, work.unsized_element_count) for name, work in steps(foreach=True)]
    assert ("aten::_foreach_lerp_", 3 * n) in each  # m, g read; m written
    assert ("aten::_foreach_addcmul_", 4 * n) in each  # v, g, g read; v written
    assert ("aten::_foreach_sqrt", 2 * n) in each


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


# ---- worked examples: backends that a CPU lacks, with the shapes of real runs ------------------

HALF = "c10::BFloat16"


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
    assert backward.direction == "backward"


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


@settings(deadline=None)
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


GROUPED = "aten::_grouped_mm"


@pytest.mark.parametrize(
    ("name", "dims", "types", "concrete", "flop", "dtype"),
    [
        # 64 tokens routed to 4 experts of 32 x 16
        (
            GROUPED,
            [[64, 32], [4, 32, 16], [4], [], []],
            [HALF, HALF, "int", "", ""],
            None,
            65536,
            "bf16",
        ),
        # weight gradient: K = 64 tokens cut into 4 groups, a 32 x 16 result each
        (
            GROUPED,
            [[32, 64], [64, 16], [4], [], []],
            [HALF, HALF, "int", "", ""],
            None,
            65536,
            "bf16",
        ),
        (
            GROUPED,
            [[4, 32, 8], [8, 64], [4], [], []],
            [HALF, HALF, "int", "", ""],
            None,
            32768,
            "bf16",
        ),
        (
            GROUPED,
            [[4, 32, 8], [4, 8, 16], [], [], []],
            [HALF, HALF, "", "", ""],
            None,
            32768,
            "bf16",
        ),
        (
            "aten::_scaled_grouped_mm",
            [[64, 32], [4, 32, 16], [64], [4, 16], [4], [], [], [], []],
            [
                "c10::Float8_e4m3fn",
                "c10::Float8_e4m3fn",
                "float",
                "float",
                "int",
                "",
                "",
                "Scalar",
                "Scalar",
            ],
            ["", "", "", "", "", "", "", "15", "True"],
            65536,
            "fp8",
        ),
        # two 4-bit values per element: K is 64, not 32
        (
            "aten::_scaled_mm",
            [[16, 32], [32, 48], [16, 4], [48, 4], [], [], [], []],
            ["c10::Float4_e2m1fn_x2"] * 2
            + ["c10::Float8_e4m3fn"] * 2
            + ["", "", "Scalar", "Scalar"],
            ["", "", "", "", "", "", "15", "False"],
            2 * 16 * 64 * 48,
            "fp4",
        ),
        ("aten::_int_mm", [[32, 64], [64, 16]], ["signed char"] * 2, None, 65536, "int8"),
        ("aten::mv", [[24, 5], [5]], ["double"] * 2, None, 240, "fp64"),
        ("aten::dot", [[5], [5]], ["float"] * 2, None, 10, "fp32"),
        ("aten::matmul", [[2, 1, 5, 7], [3, 7, 4]], ["float"] * 2, None, 2 * 6 * 5 * 7 * 4, "fp32"),
        ("aten::matmul", [[5], [3, 5, 4]], ["float"] * 2, None, 2 * 3 * 5 * 4, "fp32"),
        ("mkldnn::_linear_pointwise", [[6, 8], [16, 8], [16]], ["float"] * 3, None, 1536, "fp32"),
        (
            "mkldnn::_linear_pointwise",
            [[6, 8], [6, 16], [16, 8], [16]],
            ["float"] * 4,
            None,
            1536,
            "fp32",
        ),
        (
            "vllm::rocm_unquantized_gemm",
            [[8192, 2880], [32, 2880], [32]],
            [HALF] * 3,
            None,
            1509949440,
            "bf16",
        ),
        (
            "aiter::gemm_a16w16",
            [[15360, 4096], [6144, 4096]],
            [HALF] * 2,
            None,
            2 * 15360 * 4096 * 6144,
            "bf16",
        ),
        (
            "aiter::gemm_a4w4",
            [[16, 32], [48, 32]],
            ["unsigned char"] * 2,
            None,
            2 * 16 * 64 * 48,
            "fp4",
        ),
    ],
)
def test_matrix_products_worked_by_hand(
    name: str, dims: list[Any], types: list[str], concrete: list[str] | None, flop: int, dtype: str
) -> None:
    work = of(name, dims, types, concrete)
    assert (work.family, work.flop_count, work.dtype) == ("gemm", flop, dtype)


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


# ---- kernel names ------------------------------------------------------------------------------


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


# ---- any input ---------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**20) | st.floats() | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=20,
)
shapes = st.lists(
    st.lists(st.integers(0, 9) | st.lists(st.integers(0, 9), max_size=3), max_size=5), max_size=12
)
type_names = st.lists(
    st.sampled_from(
        ["float", HALF, "long int", "Scalar", "ScalarList", "TensorList", "", "nonsense", "bool"]
    ),
    max_size=14,
)
concretes = st.lists(
    st.sampled_from(
        [
            "",
            "True",
            "False",
            "0",
            "1",
            "-1",
            "[1, 1]",
            "[0]",
            "[]",
            "[True, False]",
            "[",
            "9" * 40,
            "1.5",
        ]
    )
    | st.text(max_size=6),
    max_size=16,
)
names = st.sampled_from(
    [*sorted(MODELS), "aten::_foreach_add_", "triton_poi_x", "triton_red_y", "triton_tem_mm_z"]
)


def sound(work: Work | None) -> None:
    if work is None:
        return
    counts = (work.flop_count, work.useful_flop_count, work.bytes_count, work.unsized_element_count)
    assert all(count is None or (type(count) is int and count >= 0) for count in counts)
    assert (work.flop_count is None) == (work.useful_flop_count is None)
    if work.flop_count is not None and work.useful_flop_count is not None:
        assert work.useful_flop_count <= work.flop_count
    expected = work.bytes_count if work.family == "vector" else work.flop_count
    assert expected is not None or work.reason


@settings(deadline=None)
@given(st.text(), *[st.none() | st.text()] * 3)
def test_any_text_is_answered(
    name: str, dims: str | None, types: str | None, values: str | None
) -> None:
    sound(estimate(name, dims, types, values))


@settings(deadline=None)
@given(names, *[st.none() | st.text() | json_values.map(json.dumps)] * 3)
def test_any_json_is_answered(
    name: str, dims: str | None, types: str | None, values: str | None
) -> None:
    sound(estimate(name, dims, types, values))


@settings(max_examples=400, deadline=None)
@given(
    names,
    shapes,
    type_names,
    st.none() | concretes,
    st.none() | st.lists(st.integers(0, 9), max_size=5),
)
def test_any_plausible_record_is_answered(
    name: str, dims: list[Any], types: list[str], values: list[str] | None, out: list[int] | None
) -> None:
    known = {} if out is None else {"output_dims": tuple(out)}
    text = None if values is None else json.dumps(values)
    sound(estimate(name, json.dumps(dims), json.dumps(types), text, **known))


def test_deeply_nested_json_is_answered() -> None:
    work = estimate("aten::mm", "[" * 100_000, None, None)
    assert work is not None
    assert work.reason == "Input Dims is not valid JSON"


# ---- real traces -------------------------------------------------------------------------------


def operators(path: Path) -> Iterator[Recorded]:
    text = gzip.decompress(path.read_bytes())
    trace = json.loads(text)
    for event in trace if isinstance(trace, list) else trace["traceEvents"]:
        if is_op(event):
            yield recorded(event)


TRACES = {
    # trace: operators of these families whose FLOP count must be known
    "tracelens/h100-qwen1.5-0.5b-inference": {"gemm": 193, "sdpa": 48},
    "tracelens/mi300x-bert-small-inference": {"gemm": 50, "sdpa": 8},
    "tracelens/mi300x-resnet18-train-no-distributedinfo": {"conv": 10, "gemm": 1},
    "hpctrainingexamples/mi300x-op-replay": {"conv": 10},
    "hta/a100-recsys-rank3of8": {"gemm": 1000},
    "kineto/v100-resnet50-dataloader0-2021": {"gemm": 1},
}


@pytest.mark.parametrize("trace", TRACES)
def test_real_traces_are_understood(traces_dir: Path, trace: str) -> None:
    known: dict[str, int] = {}
    for event in operators(traces_dir / f"{trace}.json.gz"):
        work = event.work()
        sound(work)
        if work is not None and work.flop_count is not None:
            known[work.family] = known.get(work.family, 0) + 1
        elif work is not None and work.family == "gemm" and event.dims is not None:
            pytest.fail(f"{event} has shapes and no count: {work.reason}")
    for kind, least in TRACES[trace].items():
        assert known.get(kind, 0) >= least, known


# ---- against TraceLens' tables -------------------------------------------------------------------


def tracelens_rows(traces_dir: Path, table: str) -> Iterator[tuple[str, Recorded, float, float]]:
    """(report, operator, FLOP, bytes) of each distinct call in TraceLens' published reports."""
    for path in sorted((traces_dir / "tracelens" / "reference-reports").glob(f"*/{table}.csv*")):
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for row in csv.DictReader(io.StringIO(raw.decode())):
            lists = (
                ast.literal_eval(row[f"{key}_first"])
                for key in ("Input Dims", "Input type", "Concrete Inputs")
            )
            event = Recorded(row["name"], *(json.dumps(value) for value in lists))
            yield (
                path.parent.name,
                event,
                float(row["GFLOPS_first"]) * 1e9,
                float(row["Data Moved (MB)_first"] or "nan") * 2**20,
            )


def test_gemm_equals_tracelens(traces_dir: Path) -> None:
    rows = 0
    for report, event, flop, moved_bytes in tracelens_rows(traces_dir, "GEMM"):
        work = event.work()
        assert work is not None
        assert work.flop_count is not None, event
        # TraceLens adds one addition per element for addmm's bias; torch's counter does not.
        bias = 0
        if event.name == "aten::addmm":
            _, left, right, *_ = json.loads(event.dims or "")
            bias = left[0] * right[1]
        assert work.flop_count + bias == pytest.approx(flop, rel=1e-9), (report, event)
        if moved_bytes == moved_bytes:
            assert work.bytes_count == pytest.approx(moved_bytes, rel=0.005), (report, event)
        rows += 1
    assert rows >= 60


def test_convolutions_equal_tracelens(traces_dir: Path) -> None:
    rows = 0
    for table in ("CONV_fwd", "CONV_bwd"):
        for report, event, flop, moved_bytes in tracelens_rows(traces_dir, table):
            work = event.work()
            assert work is not None
            assert work.flop_count is not None, event
            # TraceLens counts both gradients even where the input's is not wanted (first layer).
            unwanted = event.name == "aten::convolution_backward" and '"[False, True, False]"' in (
                event.concrete or ""
            )
            assert work.flop_count * (2 if unwanted else 1) == pytest.approx(flop, rel=1e-9), (
                report,
                event,
            )
            # Backward traffic differs: TraceLens adds up both gradients' reads of grad_output.
            if table == "CONV_fwd":
                assert work.bytes_count == pytest.approx(moved_bytes, rel=0.005), (report, event)
            rows += 1
    assert rows >= 40


def test_attention_equals_tracelens(traces_dir: Path) -> None:
    rows = 0
    for report, event, flop, moved_bytes in tracelens_rows(traces_dir, "SDPA_fwd"):
        work = event.work()
        assert work is not None
        assert work.flop_count is not None
        # TraceLens takes half of the square for a causal mask: L²/2, not the L(L+1)/2 pairs that
        # it keeps. Dense counts are equal.
        assert work.flop_count / (2 if work.causal else 1) == pytest.approx(flop, rel=1e-9), (
            report,
            event,
        )
        length = json.loads(event.dims or "")[0][2]
        if work.causal:
            assert work.useful_flop_count == pytest.approx(flop * (length + 1) / length, rel=1e-9)
        # We count the rows' logsumexp, too.
        assert work.bytes_count == pytest.approx(moved_bytes, rel=0.01)
        rows += 1
    assert rows >= 6


# ---- embeddings of recommendation models --------------------------------------------------------

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
