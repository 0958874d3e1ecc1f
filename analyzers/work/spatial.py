"""Traffic of pooling, resampling, padding and Fourier transforms: the input and the result once."""

from __future__ import annotations

from math import prod

from chopper.analyzers.work.indexing import INDEX_BYTES
from chopper.analyzers.work.record import Record, Shape, Unknown, moves


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
