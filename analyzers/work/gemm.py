"""Matrix multiplications: 2·M·N·K per matrix pair, as `torch.utils.flop_counter` counts them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isqrt, prod

from chopper.analyzers.work.record import (
    Record,
    Shape,
    Unknown,
    Work,
    broadcast,
    documented,
    with_bytes,
)

Model = Callable[[Record], Work]


def _gemm(record: Record, flop: int, a: int) -> Work:
    return Work("gemm", flop_count=flop, useful_flop_count=flop, dtype=record.dtype(a))


def _same(left: int, right: int) -> int:
    if left != right:
        raise Unknown(f"inner dimensions differ: {left} and {right}")
    return left


def _rank(shape: Shape, *ranks: int) -> Shape:
    if len(shape) not in ranks:
        raise Unknown(f"expected {' or '.join(map(str, ranks))} dimensions, found {list(shape)}")
    return shape


def _read_addend(record: Record, index: int, beta: int) -> int:
    # BLAS: with beta = 0 the addend is not read (torch's mv passes an uninitialised one).
    return 0 if record.text(beta) in ("0", "0.") else record.nbytes(index)


def _traffic(record: Record, a: int, b: int, out: int, addend: int | None, beta: int | None) -> int:
    """Return bytes of both factors, an addend that is read, and ``out`` elements like ``a``."""
    extra = 0
    if addend is not None:
        extra = _read_addend(record, addend, -1 if beta is None else beta)
    return record.nbytes(a) + record.nbytes(b) + extra + out * record.itemsize(a)


@documented
def _mm(a: int = 0, b: int = 1, *, addend: int | None = None, beta: int | None = None) -> Model:
    """[B,] M×K times [B,] K×N, plus an optional addend that broadcasts to the result."""

    def model(record: Record) -> Work:
        left, right = _rank(record.shape(a), 2, 3), record.shape(b)
        _rank(right, len(left))
        k = _same(left[-1], right[-2])
        if left[:-2] != right[:-2]:
            raise Unknown(f"batch sizes differ: {list(left)} and {list(right)}")
        out = prod((*left[:-1], right[-1]))

        return with_bytes(
            _gemm(record, 2 * out * k, a), lambda: _traffic(record, a, b, out, addend, beta)
        )

    return model


def _int_mm(record: Record) -> Work:
    """int8 × int8 → int32."""
    work = _mm()(record)
    out = record.shape(0)[0] * record.shape(1)[1]
    return with_bytes(work, lambda: record.nbytes(0) + record.nbytes(1) + out * 4)


def _addbmm(record: Record) -> Work:
    """Σ_b A_b·B_b + C: the batch is summed, so the result has one matrix."""
    left, right = _rank(record.shape(1), 3), _rank(record.shape(2), 3)
    work = _mm(1, 2)(record)
    out = left[1] * right[2]
    return with_bytes(
        work,
        lambda: (
            record.nbytes(1)
            + record.nbytes(2)
            + _read_addend(record, 0, 3)
            + out * record.itemsize(1)
        ),
    )


def _matmul(record: Record) -> Work:
    """torch.matmul's rules: 1-d operands are padded, the leading dimensions broadcast."""
    left, right = record.shape(0), record.shape(1)
    if not left or not right:
        raise Unknown("matmul of a scalar")
    rows = left[-2:-1] if len(left) > 1 else ()
    columns = right[-1:] if len(right) > 1 else ()
    k = _same(left[-1], right[-2] if len(right) > 1 else right[0])
    out = prod((*broadcast([left[:-2], right[:-2]]), *rows, *columns))
    return with_bytes(
        _gemm(record, 2 * out * k, 0),
        lambda: record.nbytes(0) + record.nbytes(1) + out * record.itemsize(0),
    )


@documented
def _linear(x: int = 0, weight: int = 1, bias: int | None = 2) -> Model:
    """x[..., K] times weight[N, K] transposed."""

    def model(record: Record) -> Work:
        left, right = record.shape(x), _rank(record.shape(weight), 1, 2)
        if not left:
            raise Unknown("linear of a scalar")
        k = _same(left[-1], right[-1])
        out = prod(left[:-1]) * prod(right[:-1])

        def traffic() -> int:
            extra = 0 if bias is None else record.nbytes(bias)
            result = out * record.itemsize(x)
            return record.nbytes(x) + record.nbytes(weight) + extra + result

        return with_bytes(_gemm(record, 2 * out * k, x), traffic)

    return model


def _linear_pointwise(record: Record) -> Work:
    """mkldnn::_linear_pointwise(X, W, B, …) and its binary form (X, other, W, B, …)."""
    binary = record.has(2) and len(record.shape(2)) == 2
    return _linear(0, 2, 3)(record) if binary else _linear()(record)


def _linear_backward(record: Record) -> Work:
    """linear_backward(self, grad_output, weight, output_mask): one product per wanted gradient."""
    x, grad, weight = record.shape(0), record.shape(1), _rank(record.shape(2), 2)
    mask = record.booleans(3)
    if mask is None or len(mask) < 2:
        raise Unknown("which gradients are wanted was not recorded")
    _same(grad[-1] if grad else 0, weight[0])
    base = 2 * prod(grad) * weight[1]
    if prod(x) != prod(grad[:-1]) * weight[1]:
        raise Unknown("input and gradient shapes do not fit")
    work = replace(_gemm(record, base * (mask[0] + mask[1]), 1), direction="backward")

    def traffic() -> int:
        inputs = record.nbytes(1) + mask[0] * record.nbytes(2) + mask[1] * record.nbytes(0)
        return inputs + mask[0] * record.nbytes(0) + mask[1] * record.nbytes(2)

    return with_bytes(work, traffic)


@documented
def _pair(a: int = 0, b: int = 1, *, packed: bool = False) -> Model:
    """Custom kernels: a[M, K] with b either [K, N] or [N, K].

    Both orders give the same count where both fit (then b is square). `packed`: 4-bit values,
    two per recorded element, so K is twice the recorded size.
    """

    def model(record: Record) -> Work:
        left, right = record.shape(a), _rank(record.shape(b), 2)
        if not left:
            raise Unknown("product of a scalar")
        k = left[-1]
        if k not in right:
            raise Unknown(f"inner dimensions differ: {list(left)} and {list(right)}")
        n = right[0] if right[1] == k else right[1]
        flop = 2 * prod(left[:-1]) * n * k * (2 if packed else 1)
        work = _gemm(record, flop, a)
        work = replace(work, dtype="fp4") if packed else work
        return replace(work, reason="bytes: the result's type was not recorded")

    return model


@documented
def _typed_pair(out_type: int | None = None) -> Model:
    """Unquantized custom linear (x[..., K], weight, bias?): a result of x's type or `out_type`."""

    def model(record: Record) -> Work:
        work = _pair()(record)
        left, right = record.shape(0), record.shape(1)
        n = right[0] if right[1] == left[-1] else right[1]

        def traffic() -> int:
            width = record.itemsize(0)
            if out_type is not None:
                width = record.scalar_type_bytes(out_type, width)
            inputs = sum(record.nbytes(i) for i in range(3))
            return inputs + prod(left[:-1]) * n * width

        return with_bytes(work, traffic)

    return model


@documented
def _out_first(*, packed: bool = False) -> Model:
    """Custom kernels whose first argument is the result: (out[M, N], a, b, …)."""

    def model(record: Record) -> Work:
        out = _rank(record.shape(0), 2)
        work = _pair(1, 2, packed=packed)(record)
        right = record.shape(2)
        if out[1] not in right:
            raise Unknown(f"result {list(out)} does not fit operand {list(right)}")
        return with_bytes(work, lambda: sum(record.nbytes(i) for i in range(3)))

    return model


def _scaled_mm(record: Record) -> Work:
    """Scaled product: (self, mat2, scale_a, scale_b, bias, scale_result, out_dtype, …).

    4-bit operands are stored two to an element along K.
    """
    left, right = _rank(record.shape(0), 2), _rank(record.shape(1), 2)
    k = _same(left[1], right[0]) * (2 if record.dtype(0) == "fp4" else 1)
    out = left[0] * right[1]

    def traffic() -> int:
        result = out * record.scalar_type_bytes(6, record.itemsize(0))
        return sum(record.nbytes(i) for i in range(5)) + result

    return with_bytes(_gemm(record, 2 * out * k, 0), traffic)


def _scaled_mm_v2(record: Record) -> Work:
    """Scaled product in its newer form: several scales, the same FLOP."""
    left, right = _rank(record.shape(0), 2), _rank(record.shape(1), 2)
    k = _same(left[1], right[0]) * (2 if record.dtype(0) == "fp4" else 1)
    out = left[0] * right[1]

    def traffic() -> int:
        result = out * record.scalar_type_bytes(9, record.itemsize(0))
        return record.nbytes(0) + record.nbytes(1) + record.nbytes(8) + result

    return with_bytes(_gemm(record, 2 * out * k, 0), traffic)


@documented
def _grouped_mm(offsets: int, bias: int, out_type: int) -> Model:
    """Grouped products: 2d×3d, 3d×2d, 2d×2d (K cut into groups) and 3d×3d.

    Where the group sizes are data (``offs``), rows past the last offset are counted too: their
    number is not in the trace.
    """

    def model(record: Record) -> Work:
        left, right = _rank(record.shape(0), 2, 3), _rank(record.shape(1), 2, 3)
        k = _same(left[-1], right[-2]) * (2 if record.dtype(0) == "fp4" else 1)
        if len(left) == len(right) == 3:
            _same(left[0], right[0])
            out = left[0] * left[1] * right[2]
            flop = 2 * out * k
        elif len(left) == 2 and len(right) == 2:
            groups = _rank(record.shape(offsets), 1)[0]
            out = groups * left[0] * right[1]
            flop = 2 * left[0] * right[1] * k
        else:
            out = left[-2] * right[-1]
            flop = 2 * out * k
        return with_bytes(
            _gemm(record, flop, 0),
            lambda: (
                record.nbytes(0)
                + record.nbytes(1)
                + record.nbytes(bias)
                + out * record.scalar_type_bytes(out_type, record.itemsize(0))
            ),
        )

    return model


@documented
def _addmv(matrix: int, vector: int, addend: int | None, beta: int | None) -> Model:
    """A matrix times a vector, plus an optional addend."""

    def model(record: Record) -> Work:
        rows, columns = _rank(record.shape(matrix), 2)
        k = _same(columns, _rank(record.shape(vector), 1)[0])

        return with_bytes(
            _gemm(record, 2 * rows * k, matrix),
            lambda: _traffic(record, matrix, vector, rows, addend, beta),
        )

    return model


def _dot(record: Record) -> Work:
    """Two vectors: one number."""
    n = _same(_rank(record.shape(0), 1)[0], _rank(record.shape(1), 1)[0])
    return with_bytes(
        _gemm(record, 2 * n, 0),
        lambda: record.nbytes(0) + record.nbytes(1) + record.itemsize(0),
    )


def _int4pack(record: Record) -> Work:
    """_weight_int4pack_mm(self, mat2, qGroupSize, qScaleAndZeros[K/group, N, 2]).

    mat2's packed layout differs per device; N stands in the scales. Arithmetic is in self's type.
    """
    left, scales = _rank(record.shape(0), 2), _rank(record.shape(3), 3)
    n = scales[1]
    flop = 2 * left[0] * left[1] * n
    return with_bytes(
        _gemm(record, flop, 0),
        lambda: (
            record.nbytes(0)
            + left[1] * n // 2
            + record.nbytes(3)
            + left[0] * n * record.itemsize(0)
        ),
    )


def template(record: Record) -> Work:
    """A product that TorchInductor generated from a Triton template: triton_tem_*(A, B, …, out).

    A and B are the first two buffers and come as they lie in memory, possibly transposed or with
    their batch folded in. What A, B and the result have in common tells the three sizes, since
    M·K·N and one batch: (|A|·|B|·|out|)/batch is (M·K·N·batch)². Epilogues add buffers between.
    """
    if "attention" in record.name:
        raise Unknown("the mask of flex attention is data")
    buffers = [i for i in range(len(record)) if record.has(i) and record.shape(i)]
    if len(buffers) < 3:
        raise Unknown("the kernel's buffers were not recorded")
    a, b, out = buffers[0], buffers[1], buffers[-1]
    left, right = record.shape(a), record.shape(b)
    if len(right) > 3:
        return _convolved(record, a, b, out)
    batch = left[0] if len(left) == len(right) == 3 and left[0] == right[0] else 1
    if batch == 0:
        return _gemm(record, 0, a)
    square = record.numel(a) * record.numel(b) * record.numel(out)
    flop = 2 * isqrt(square // batch)
    if square % batch or (flop // 2) ** 2 * batch != square:
        raise Unknown(f"sizes do not fit a product: {list(left)}, {list(right)}")
    work = _gemm(record, flop, a)
    return with_bytes(work, lambda: sum(record.nbytes(i) for i in buffers))


def _convolved(record: Record, x: int, weight: int, out: int) -> Work:
    """A convolution from a template: each value of the result meets one filter."""
    filters, result = record.shape(weight), record.shape(out)
    if len(result) != len(filters) or not filters[0] or result[1] != filters[0]:
        raise Unknown(f"result {list(result)} does not fit filters {list(filters)}")
    flop = 2 * prod(result) * prod(filters[1:])
    work = Work("conv", flop, flop, dtype=record.dtype(x))
    return with_bytes(work, lambda: sum(record.nbytes(i) for i in (x, weight, out)))


_ADDMM = _mm(1, 2, addend=0, beta=3)


@documented
def _recurrent(passes: int = 1) -> Model:
    """One recurrent layer in one direction, (x[T, B, i], W[g·h, i], U[g·h, h], two biases, h, c,
    …): 2·T·B·g·h·(i + h), g gates (LSTM 4, GRU 3, tanh 1); backward twice that.
    """

    def model(record: Record) -> Work:
        x, w, u = (_rank(record.shape(i), n) for i, n in ((0, 3), (1, 2), (2, 2)))
        _same(x[2], w[1])
        _same(w[0], u[0])
        steps, hidden = x[0] * x[1], u[1]
        work = _gemm(record, passes * 2 * steps * (prod(w) + prod(u)), 0)

        def traffic() -> int:
            states = sum(record.nbytes(i) for i in range(7))
            out = steps * hidden * record.itemsize(0)
            # Backward also reads the result and its gradient, and writes a gradient of each input.
            return states + out if passes == 1 else 2 * states + 2 * out

        direction = work.direction if passes == 1 else "backward"
        return with_bytes(replace(work, direction=direction), traffic)

    return model


MODELS: dict[str, Model] = {
    "aten::mm": _mm(),
    "aten::bmm": _mm(),
    "aten::addmm": _ADDMM,
    "aten::addmm_": _ADDMM,
    "aten::_addmm_activation": _ADDMM,
    "aten::baddbmm": _ADDMM,
    "aten::baddbmm_": _ADDMM,
    "aten::addbmm": _addbmm,
    "aten::addbmm_": _addbmm,
    "aten::matmul": _matmul,
    "aten::linear": _linear(),
    "aten::linear_backward": _linear_backward,
    "aten::mkldnn_linear": _linear(),
    "aten::mkldnn_linear_backward": _linear_backward,
    "aten::addmv": _addmv(1, 2, 0, 3),
    "aten::addmv_": _addmv(1, 2, 0, 3),
    "aten::mv": _addmv(0, 1, None, None),
    "aten::dot": _dot,
    "aten::vdot": _dot,
    "aten::_int_mm": _int_mm,
    "aten::_scaled_mm": _scaled_mm,
    "aten::_scaled_mm_v2": _scaled_mm_v2,
    "aten::_grouped_mm": _grouped_mm(2, 3, 4),
    "aten::_scaled_grouped_mm": _grouped_mm(4, 5, 7),
    "aten::_scaled_grouped_mm_v2": _grouped_mm(8, 9, 10),
    "aten::_weight_int8pack_mm": _linear(bias=None),
    "aten::_weight_int4pack_mm": _int4pack,
    "aten::_weight_int4pack_mm_for_cpu": _int4pack,
    "aten::mkldnn_rnn_layer": _recurrent(),
    "aten::mkldnn_rnn_layer_backward": _recurrent(2),
    "mkldnn::_linear_pointwise": _linear_pointwise,
    "mkl::_mkl_linear": _linear(0, 2, 3),
    # Kernels of inference and training libraries, by their public signatures.
    "vllm::rocm_unquantized_gemm": _typed_pair(),
    "aiter::gemm_a16w16": _typed_pair(3),
    "aiter::gemm_a8w8": _pair(),
    "aiter::gemm_a8w8_bpreshuffle": _pair(),
    "aiter::gemm_a8w8_blockscale": _pair(),
    "aiter::gemm_a4w4": _pair(packed=True),
    "_C::cutlass_scaled_mm": _out_first(),
    "_C::cutlass_scaled_fp4_mm": _out_first(packed=True),
    "_rocm_C::wvSplitK": _pair(),
    "_rocm_C::LLMM1": _pair(),
    "sgl_kernel::fp8_scaled_mm": _pair(),
    "sgl_kernel::int8_scaled_mm": _pair(),
    "fbgemm::f8f8bf16_rowwise": _pair(),
    "fbgemm::f8f8bf16_tensorwise": _pair(),
    "fbgemm::f8f8bf16_blockwise": _pair(),
}
