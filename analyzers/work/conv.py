"""Convolutions, forward and backward, 1 to 3 dimensions, grouped, dilated, transposed.

Each output (for transposed ones: input) position of each sample meets every weight once, so one
pass is 2·N·grid·numel(weight) FLOP, where the weight [C_out, C_in/groups, …kernel] already
carries the groups; each of the two gradients costs the same again.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from chopper.analyzers.work.indexing import INDEX_BYTES
from chopper.analyzers.work.record import Record, Shape, Unknown, Work, moves, with_bytes


def convolution(
    record: Record,
    *,
    stride: int,
    padding: int,
    dilation: int | None = None,
    bias: int | None = 2,
    x: int = 0,
    weight: int = 1,
    transposed: bool | int = False,
    output_padding: int | None = None,
    groups: int | None = None,
    extra_read: int | None = None,
) -> Work:
    """2·N·grid·|weight|, grid the output's positions (transposed: the input's).

    Positions of the arguments; `transposed` is the position of the flag, or what holds always.
    """
    shape, weights = record.shape(x), record.shape(weight)
    rank = len(weights) - 2
    if rank < 1:
        raise Unknown(f"not a convolution weight: {list(weights)}")
    if len(shape) == rank + 1:  # unbatched
        shape = (1, *shape)
    if len(shape) != rank + 2:
        raise Unknown(f"input {list(shape)} does not fit weight {list(weights)}")
    is_transposed = transposed if isinstance(transposed, bool) else record.boolean(transposed)
    if is_transposed is None:
        raise Unknown("whether the convolution is transposed was not recorded")
    channels = weights[0] if is_transposed else weights[1]
    if channels == 0 or shape[1] % channels or (is_transposed and shape[1] != channels):
        raise Unknown(f"channels of input {list(shape)} do not fit weight {list(weights)}")
    geometry = (stride, padding, dilation)
    if is_transposed:
        grid = shape[2:]
    else:
        grid = _output_grid(record, shape[2:], weights, geometry)
    flop = 2 * shape[0] * prod(grid) * prod(weights)
    work = Work("conv", flop_count=flop, useful_flop_count=flop, dtype=record.dtype(x))

    def traffic() -> int:
        if is_transposed:
            result = _transposed_result(record, shape, weights, geometry, output_padding, groups)
        else:
            result = shape[0] * weights[0] * prod(grid)
        read = [i for i in (x, weight, bias, extra_read) if i is not None]
        return sum(record.nbytes(i) for i in read) + result * record.itemsize(x)

    return with_bytes(work, traffic)


_Geometry = tuple[int, int, int | None]
"""Positions of stride, padding and dilation."""


def _output_grid(record: Record, size: Shape, weight: Shape, geometry: _Geometry) -> Shape:
    out, rank = record.output_dims, len(size)
    if out is not None and len(out) >= rank:
        if out[-rank - 1 : -rank] not in ((), weight[:1]):
            raise Unknown(f"{weight[0]} channels do not fit result {list(out)}")
        return out[len(out) - rank :]
    stride, padding, dilation = (_spatial(record, i, rank) for i in geometry)
    if min(stride, default=1) < 1:
        raise Unknown("a stride below 1")
    return tuple(
        max(0, (n + 2 * p - d * (k - 1) - 1) // s + 1)
        for n, k, s, p, d in zip(size, weight[2:], stride, padding, dilation, strict=True)
    )


def _transposed_result(
    record: Record,
    x: Shape,
    weight: Shape,
    geometry: _Geometry,
    output_padding: int | None,
    groups: int | None,
) -> int:
    if record.output_dims is not None:
        return prod(record.output_dims)
    rank = len(x) - 2
    stride, padding, dilation = (_spatial(record, i, rank) for i in geometry)
    extra = (0,) * rank if output_padding is None else _spatial(record, output_padding, rank)
    grid: list[int] = [
        max(0, (n - 1) * s - 2 * p + d * (k - 1) + e + 1)
        for n, k, s, p, d, e in zip(
            x[2:], weight[2:], stride, padding, dilation, extra, strict=True
        )
    ]
    # The number of output channels cannot be told from input and weight alone.
    count = 1 if groups is None else record.integer(groups)
    if count is None or count < 1:
        raise Unknown("the number of groups was not recorded")
    return x[0] * weight[1] * count * prod(grid)


def _spatial(record: Record, index: int | None, rank: int) -> Shape:
    """A stride, padding or dilation argument; there may be no dilation."""
    return (1,) * rank if index is None else record.sizes(index, rank)


def convolution_pointwise(record: Record) -> Work:
    """mkldnn::_convolution_pointwise(X, W, …); binary (X, other, W, …); in place (other, X, W)."""
    if record.has(2) and len(record.shape(2)) > 2:
        x, other = (1, 0) if record.name.endswith("_") else (0, 1)
        positions = {"x": x, "weight": 2, "bias": 3, "padding": 4, "stride": 5, "dilation": 6}
        return convolution(record, **positions, extra_read=other)
    return convolution(record, padding=3, stride=4, dilation=5)


def convolution_backward(
    record: Record,
    *,
    grad: int,
    x: int,
    weight: int,
    mask: int | None = None,
    transposed: bool | int = False,
    counter_groups: bool = False,
) -> Work:
    """The same once per wanted gradient.

    Positions of the arguments; all three tensors are recorded.
    """
    shapes = [record.shape(i) for i in (grad, x, weight)]
    of_grad, of_x, of_weight = shapes
    texts = ", ".join(str(list(shape)) for shape in shapes)
    if not len(of_grad) == len(of_x) == len(of_weight) >= 3 or of_grad[0] != of_x[0]:
        raise Unknown(f"shapes do not fit: {texts}")
    wide, narrow = of_x, of_grad
    if _is_transposed(record, transposed, of_grad, of_x, of_weight):
        wide, narrow = of_grad, of_x
    if of_weight[1] == 0 or wide[1] % of_weight[1] or narrow[1] != of_weight[0]:
        raise Unknown(f"channels do not fit: {texts}")
    wants = _wants(record, mask)
    one = 2 * of_x[0] * prod(narrow[2:]) * prod(of_weight)
    # torch.utils.flop_counter multiplies all input with all output channels in the weight's
    # gradient; a grouped convolution has only 1/groups of those products.
    times = wide[1] // of_weight[1] if counter_groups else 1
    work = Work(
        "conv",
        flop_count=one * wants[0] + one * wants[1] * times,
        useful_flop_count=one * (wants[0] + wants[1]),
        dtype=record.dtype(grad),
    )

    def traffic() -> int:
        either = (wants[0] + wants[1]) * (record.nbytes(weight) + record.nbytes(x))
        bias = of_grad[1] * record.itemsize(grad) if wants[2] else 0
        return record.nbytes(grad) + either + bias

    return with_bytes(work, traffic)


def _wants(record: Record, position: int | None) -> tuple[bool, bool, bool]:
    # cuDNN's signature lost and gained arguments before its mask, which has stayed last.
    positions = range(3, len(record))[::-1] if position is None else [position]
    for index in positions:
        mask = record.booleans(index)
        if mask is not None and len(mask) >= 2:
            return (mask[0], mask[1], len(mask) > 2 and mask[2])
    raise Unknown("the requested gradients were not recorded")


def _is_transposed(
    record: Record, transposed: bool | int, grad: Shape, x: Shape, weight: Shape
) -> bool:
    if isinstance(transposed, bool):
        return transposed
    flag = record.boolean(transposed)
    if flag is not None:
        return flag
    fits = (grad[1] == weight[0], x[1] == weight[0])
    if fits[0] != fits[1]:
        return fits[1]
    if grad[2:] == x[2:]:
        return False  # the count is the same either way
    raise Unknown("whether the convolution is transposed was not recorded")


def _gradient(
    record: Record, grad: Sequence[int], weight: Sequence[int], result: Sequence[int] | None
) -> Work:
    """Work of either factor's gradient: each weight element meets each position of the result."""
    flop = 2 * grad[0] * prod(grad[2:]) * prod(weight)
    work = Work("conv", flop, flop, dtype=record.dtype(1))

    def traffic() -> int:
        if result is None:
            raise Unknown("the gradient's shape was not recorded")
        return record.nbytes(1) + record.nbytes(2) + prod(result) * record.itemsize(1)

    return with_bytes(work, traffic)


def input_gradient(record: Record) -> Work:
    """*_backward_input(input_size, grad_output, weight, …)."""
    grad, weight = record.shape(1), record.shape(2)
    if len(grad) != len(weight) or len(grad) < 3 or grad[1] != weight[0]:
        raise Unknown(f"shapes do not fit: {list(grad)}, {list(weight)}")
    return _gradient(record, grad, weight, record.output_dims or record.integers(0))


def weight_gradient(record: Record) -> Work:
    """*_backward_weight(weight_size, grad_output, input, …)."""
    grad, x = record.shape(1), record.shape(2)
    weight = record.output_dims or record.integers(0)
    if not weight:
        raise Unknown("the weight's shape was not recorded")
    if not len(grad) == len(x) == len(weight) >= 3 or grad[:2] != (x[0], weight[0]):
        raise Unknown(f"shapes do not fit: {list(grad)}, {list(x)}, {list(weight)}")
    return _gradient(record, grad, weight, weight)


def _with_output(record: Record, shape: Shape, *, indices: bool = False) -> int:
    """Bytes of the input and of a result of this shape."""
    width = record.itemsize(0) + (INDEX_BYTES if indices else 0)
    return record.nbytes(0) + prod(shape) * width


@moves
def window(
    record: Record, spatial: int, ceil: int, dilation: int | None = None, *, indices: bool = False
) -> int:
    """max_pool*, avg_pool*(self, kernel_size, stride, padding, …, ceil_mode, …)."""
    shape = record.shape(0)
    if len(shape) < spatial:
        raise Unknown(f"not an input of {spatial} dimensions: {list(shape)}")
    kernel = record.sizes(1, spatial)
    stride = record.sizes(2, spatial, kernel)
    padding = record.sizes(3, spatial, (0,) * spatial)
    spread = (1,) * spatial
    if dilation is not None:
        spread = record.sizes(dilation, spatial, spread)
    if min(stride) < 1:
        raise Unknown("a stride below 1")
    up = record.boolean(ceil) is True
    grid = []
    for n, k, s, p, d in zip(shape[-spatial:], kernel, stride, padding, spread, strict=True):
        span = n + 2 * p - d * (k - 1) - 1
        steps = -(-span // s) if up else span // s
        # A window that would start in the padding on the right is dropped.
        steps -= up and steps * s >= n + p
        grid.append(max(0, steps + 1))
    return _with_output(record, (*shape[:-spatial], *grid), indices=indices)


@moves
def resized(record: Record, *, indices: bool = False) -> int:
    """(self, output_size, …), or factors at the end: the input is read, the result written."""
    shape = record.shape(0)
    sizes = record.integers(1)
    if sizes is None:
        factors = next((f for i in range(2, len(record)) if (f := _floats(record.text(i)))), None)
        if not factors or len(factors) > len(shape):
            raise Unknown("the result's size was not recorded")
        sizes = [int(n * f) for n, f in zip(shape[-len(factors) :], factors, strict=True)]
    if len(sizes) > len(shape) or min(sizes, default=0) < 0:
        raise Unknown(f"a result of {sizes} from {list(shape)}")
    result = (*shape[: len(shape) - len(sizes)], *sizes)
    return _with_output(record, result, indices=indices)


def _floats(text: str) -> list[float] | None:
    if not (text.startswith("[") and text.endswith("]") and len(text) > 2):
        return None
    try:
        values = [float(item) for item in text[1:-1].split(",")]
    except ValueError:
        return None
    return values if all(0 < value < 1e6 for value in values) else None


@moves
def gradient_of_size(record: Record) -> int:
    """(grad_output, output_size, input_size, …): one gradient is read, the other written."""
    sizes = record.integers(2)
    if not sizes or min(sizes) < 0:
        raise Unknown("the input's size was not recorded")
    return _with_output(record, tuple(sizes))


@moves
def padded(record: Record) -> int:
    """constant_pad_nd(self, pad, value): pairs from the last dimension backwards."""
    shape, pad = list(record.shape(0)), record.integers(1)
    if pad is None or len(pad) % 2 or len(pad) > 2 * len(shape):
        raise Unknown("the padding was not recorded")
    for i in range(len(pad) // 2):
        shape[-1 - i] = max(0, shape[-1 - i] + pad[2 * i] + pad[2 * i + 1])
    return _with_output(record, tuple(shape))


@moves
def grid_sampled(record: Record) -> int:
    """grid_sampler(self, grid, …): a value per channel and place."""
    x, grid = record.shape(0), record.shape(1)
    return record.nbytes(1) + _with_output(record, (*x[:2], *grid[1:-1]))


@moves
def real_to_complex(record: Record) -> int:
    """_fft_r2c(self, dims, normalization, onesided): half of the last of the dimensions."""
    shape, dims = record.shape(0), record.integers(1)
    if not dims or not shape:
        raise Unknown("the dimensions were not recorded")
    last = shape[dims[-1] % len(shape)]
    width = last // 2 + 1 if record.boolean(3) else last
    out = record.numel(0) // max(1, last) * width
    return record.nbytes(0) + out * 2 * record.itemsize(0)
