"""Matrix multiplications: 2·M·N·K per matrix pair, as `torch.utils.flop_counter` counts them.

Transformer Engine and Megatron work in autograd functions: a trace has them under the function's
name, and their backward as a node that recorded nothing but the gradient. Such a node is modelled
by the arguments of its forward call, which its sequence number finds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import isqrt, prod

from chopper.analyzers.work.record import Record, Shape, Unknown, Work, broadcast, with_bytes


def _product(
    record: Record,
    flop: int,
    read: Iterable[int],
    out: int = 0,
    *,
    a: int = 0,
    out_type: int | None = None,
    result_bytes: int | None = None,
    times: int = 1,
) -> Work:
    """Work of a product in the type of argument `a`, all of whose operands are read `times`.

    Its result has `out` elements of that type, of the one that argument `out_type` tells, or of
    `result_bytes`.
    """

    def traffic() -> int:
        width = result_bytes or record.itemsize(a)
        if out_type is not None:
            width = record.scalar_type_bytes(out_type, width)
        return times * (sum(record.nbytes(i) for i in read) + out * width)

    return with_bytes(Work("gemm", flop, flop, dtype=record.dtype(a)), traffic)


def _same(left: int, right: int) -> int:
    if left != right:
        raise Unknown(f"inner dimensions differ: {left} and {right}")
    return left


def _rank(shape: Shape, *ranks: int) -> Shape:
    if len(shape) not in ranks:
        raise Unknown(f"expected {' or '.join(map(str, ranks))} dimensions, found {list(shape)}")
    return shape


def matmul(
    record: Record,
    first: int = 0,
    *,
    ranks: Sequence[int] = (),
    summed: bool = False,
    result_bytes: int | None = None,
) -> Work:
    """[B,] M×K times [B,] K×N by torch.matmul's rules: 1-d operands are padded, the leading
    dimensions broadcast.

    With `first` = 1 argument 0 is an addend that broadcasts to the result and argument 3 its
    factor. `ranks`: dimensions that both must have, and nothing broadcasts. `summed`: the batch is
    summed, so the result has one matrix.
    """
    left, right = record.shape(first), record.shape(first + 1)
    if not left or not right:
        raise Unknown("matmul of a scalar")
    if ranks:
        _rank(left, ranks[0])
        _rank(right, ranks[1])
        if left[:-2] != right[:-2]:
            raise Unknown(f"batch sizes differ: {list(left)} and {list(right)}")
    rows = left[-2:-1] if len(left) > 1 else ()
    columns = right[-1:] if len(right) > 1 else ()
    k = _same(left[-1], right[-2] if len(right) > 1 else right[0])
    batch = broadcast([left[:-2], right[:-2]])
    pairs = prod((*batch, *rows, *columns))
    out = prod((*rows, *columns)) if summed else pairs
    # BLAS: with a factor of 0 the addend is not read (torch's mv passes an uninitialised one).
    added = first and record.text(3) not in ("0", "0.")
    read = range(0 if added else first, first + 2)
    return _product(record, 2 * pairs * k, read, out, a=first, result_bytes=result_bytes)


def linear(record: Record, weight: int = 1, bias: int | None = 2) -> Work:
    """x[..., K] times weight[N, K] transposed."""
    left, right = record.shape(0), _rank(record.shape(weight), 1, 2)
    if not left:
        raise Unknown("linear of a scalar")
    k = _same(left[-1], right[-1])
    out = prod(left[:-1]) * prod(right[:-1])
    read = (0, weight) if bias is None else (0, weight, bias)
    return _product(record, 2 * out * k, read, out)


def linear_pointwise(record: Record) -> Work:
    """mkldnn::_linear_pointwise(X, W, B, …) and its binary form (X, other, W, B, …)."""
    binary = record.has(2) and len(record.shape(2)) == 2
    return linear(record, weight=2, bias=3) if binary else linear(record)


def linear_backward(record: Record) -> Work:
    """(self, grad_output, weight, output_mask): one product per wanted gradient."""
    x, grad, weight = record.shape(0), record.shape(1), _rank(record.shape(2), 2)
    mask = record.booleans(3)
    if mask is None or len(mask) < 2:
        raise Unknown("the requested gradients were not recorded")
    _same(grad[-1] if grad else 0, weight[0])
    if prod(x) != prod(grad[:-1]) * weight[1]:
        raise Unknown("input and gradient shapes do not fit")
    count = mask[0] + mask[1]
    # Each gradient reads one of both and has the size of the other.
    read = (1, *(0, 2) * count)
    return _product(record, 2 * prod(grad) * weight[1] * count, read, a=1)


def pair(record: Record, first: int = 0, *, packed: bool = False) -> Work:
    """Custom kernels: a[M, K] with b either [K, N] or [N, K].

    Both orders give the same count where both fit (then b is square). `packed`: 4-bit values,
    two per recorded element, so K is twice the recorded size.
    """
    left, right = record.shape(first), _rank(record.shape(first + 1), 2)
    if not left:
        raise Unknown("product of a scalar")
    k = left[-1]
    if k not in right:
        raise Unknown(f"inner dimensions differ: {list(left)} and {list(right)}")
    flop = 2 * prod(left[:-1]) * prod(right) * (2 if packed else 1)
    reason = "bytes: the result's type was not recorded"
    dtype = "fp4" if packed else record.dtype(first)
    return Work("gemm", flop, flop, dtype=dtype, reason=reason)


def typed_pair(record: Record, out_type: int | None = None) -> Work:
    """Unquantized custom linear (x[..., K], weight, bias?): a result of x's type or `out_type`."""
    flop = pair(record).flop_count or 0
    left, right = record.shape(0), record.shape(1)
    n = right[0] if right[1] == left[-1] else right[1]
    return _product(record, flop, range(3), prod(left[:-1]) * n, out_type=out_type)


def out_first(record: Record, *, packed: bool = False) -> Work:
    """Custom kernels whose first argument is the result: (out[M, N], a, b, …)."""
    out = _rank(record.shape(0), 2)
    work = pair(record, 1, packed=packed)
    right = record.shape(2)
    if out[1] not in right:
        raise Unknown(f"result {list(out)} does not fit operand {list(right)}")
    return with_bytes(work, lambda: sum(record.nbytes(i) for i in range(3)))


def _inner(record: Record, left: Shape, right: Shape) -> int:
    """K of a product whose 4-bit operands are stored two to an element along it."""
    return _same(left[-1], right[-2]) * (2 if record.dtype(0) == "fp4" else 1)


def scaled_mm(record: Record, out_type: int, read: Sequence[int]) -> Work:
    """Scaled product: (self, mat2, scale_a, scale_b, bias, scale_result, out_dtype, …), or in its
    newer form with several scales.
    """
    left, right = _rank(record.shape(0), 2), _rank(record.shape(1), 2)
    out = left[0] * right[1]
    flop = 2 * out * _inner(record, left, right)
    return _product(record, flop, read, out, out_type=out_type)


def grouped_mm(record: Record, offsets: int, bias: int, out_type: int) -> Work:
    """Grouped products: 2d×3d, 3d×2d, 2d×2d (K cut into groups) and 3d×3d.

    Where the group sizes are data (``offs``), rows past the last offset are counted too: their
    number is not in the trace.
    """
    left, right = _rank(record.shape(0), 2, 3), _rank(record.shape(1), 2, 3)
    k = _inner(record, left, right)
    pairs = out = left[-2] * right[-1]
    if len(left) == len(right) == 3:
        pairs = out = out * _same(left[0], right[0])
    elif len(left) == len(right):
        out *= _rank(record.shape(offsets), 1)[0]
    return _product(record, 2 * pairs * k, (0, 1, bias), out, out_type=out_type)


def int4pack(record: Record) -> Work:
    """_weight_int4pack_mm(self, mat2, qGroupSize, qScaleAndZeros[K/group, N, 2]).

    mat2's packed layout differs per device; N stands in the scales. Arithmetic is in self's type.
    """
    (rows, k), scales = _rank(record.shape(0), 2), _rank(record.shape(3), 3)
    n = scales[1]

    def traffic() -> int:
        return record.nbytes(0) + k * n // 2 + record.nbytes(3) + rows * n * record.itemsize(0)

    work = Work("gemm", 2 * rows * k * n, 2 * rows * k * n, dtype=record.dtype(0))
    return with_bytes(work, traffic)


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
        return Work("gemm", 0, 0, dtype=record.dtype(a))
    square = record.numel(a) * record.numel(b) * record.numel(out)
    flop = 2 * isqrt(square // batch)
    if square % batch or (flop // 2) ** 2 * batch != square:
        raise Unknown(f"sizes do not fit a product: {list(left)}, {list(right)}")
    return _product(record, flop, buffers, a=a)


def _convolved(record: Record, x: int, weight: int, out: int) -> Work:
    """A convolution from a template: each value of the result meets one filter."""
    filters, result = record.shape(weight), record.shape(out)
    if len(result) != len(filters) or not filters[0] or result[1] != filters[0]:
        raise Unknown(f"result {list(result)} does not fit filters {list(filters)}")
    flop = 2 * prod(result) * prod(filters[1:])
    return replace(_product(record, flop, (x, weight, out), a=x), family="conv")


def recurrent(record: Record, passes: int = 1) -> Work:
    """One recurrent layer in one direction, (x[T, B, i], W[g·h, i], U[g·h, h], two biases, h, c,
    …): 2·T·B·g·h·(i + h), g gates (LSTM 4, GRU 3, tanh 1); backward twice that.
    """
    x, w, u = (_rank(record.shape(i), n) for i, n in ((0, 3), (1, 2), (2, 2)))
    _same(x[2], w[1])
    _same(w[0], u[0])
    steps, hidden = x[0] * x[1], u[1]
    flop = passes * 2 * steps * (prod(w) + prod(u))
    # Backward also reads the result and its gradient, and writes a gradient of each input.
    return _product(record, flop, range(7), steps * hidden, times=passes)


def _matrices(record: Record) -> list[tuple[int, Shape]]:
    inputs = [(i, record.shape(i)) for i in range(len(record)) if record.has(i)]
    return [(i, shape) for i, shape in inputs if len(shape) > 1 and all(shape)]


def function_product(record: Record, passes: int = 1) -> Work:
    """x[..., K] and a weight [N, K] in either order, the first and last that share their K.

    Copies of the weight in other types stand between them in some versions. `passes` products:
    one forward, two backward (the gradients of x and of the weight).
    """
    matrices = _matrices(record)
    if not matrices:
        raise Unknown("no matrices were recorded")
    i, left = matrices[0]
    j, right = next(((j, s) for j, s in matrices[:0:-1] if s[-1] == left[-1]), (i, ()))
    if not right:
        raise Unknown(f"no second matrix with {left[-1]} columns was recorded")
    out = prod(left[:-1]) * prod(right[:-1])
    return _product(record, 2 * out * left[-1] * passes, (i, j), out, a=i, times=passes)


def function_mlp(record: Record, passes: int = 1) -> Work:
    """_LayerNormMLP(x, …, fc1_weight[F, H], …, fc2_weight[H, F'], …)."""
    matrices = _matrices(record)
    if len(matrices) < 3:
        raise Unknown("the weights were not recorded")
    (i, x), (_, first), (_, last) = matrices[0], matrices[1], matrices[-1]
    if first[-1] != x[-1] or last[0] != x[-1]:
        raise Unknown(f"weights {list(first)} and {list(last)} do not fit {list(x)}")
    flop = 2 * prod(x[:-1]) * (prod(first) + prod(last)) * passes
    reason = "bytes: what is kept between the two products was not recorded"
    return Work("gemm", flop, flop, dtype=record.dtype(i), reason=reason)


def experts(record: Record) -> Work:
    """fused_experts(hidden[T, H], w1[E, F, H], w2[E, H, F'], topk_weights, topk_ids[T, k], …).

    Each token meets k experts, whichever they are; experts that no token can reach are not read.
    """
    hidden, first, second = record.shape(0), record.shape(1), record.shape(2)
    routes = record.numel(4)
    ranks = (len(hidden), len(first), len(second))
    if ranks != (2, 3, 3) or not first[2] == second[1] == hidden[1]:
        raise Unknown(f"shapes do not fit: {list(hidden)}, {list(first)}, {list(second)}")
    flop = 2 * routes * (prod(first[1:]) + prod(second[1:]))

    def traffic() -> int:
        reached = min(first[0], routes)
        weights = (record.nbytes(1) + record.nbytes(2)) // max(1, first[0]) * reached
        return 2 * record.nbytes(0) + weights + record.nbytes(3) + record.nbytes(4)

    return with_bytes(Work("moe", flop, flop, dtype=record.dtype(1)), traffic)
