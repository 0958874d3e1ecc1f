"""The FLOP and byte model against torch itself: its counter, its schemas, its tensors."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chopper.analyzers.work import MODELS, Work
from chopper.analyzers.work.attention import Attention
from chopper.analyzers.work.conv import convolution, convolution_backward
from chopper.analyzers.work.vector import norm_backward
from tests.analyzers.work.work_records import Recorded, is_op, recorded

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
    told = (Attention, convolution, convolution_backward, norm_backward)
    checked = 0
    for name, model in MODELS.items():
        overloads = schemas.get(name)
        called = Attention if model.func.__name__ == "attention" else model.func
        if not overloads or called not in told:
            continue
        usual = inspect.signature(called).parameters
        positions = {n: p.default for n, p in usual.items()} | model.keywords
        for field, wanted in named.items():
            position = positions.get(field)
            if position is None or isinstance(position, bool):
                continue
            assert any(
                position < len(arguments) and arguments[position] in wanted
                for arguments in overloads
            ), (name, field, position, overloads)
            checked += 1
        if positions.get("causal_flag") is not None:
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
