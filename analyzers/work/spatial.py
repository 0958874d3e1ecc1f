"""Traffic of pooling, resampling, padding and Fourier transforms: the input and the result once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from chopper.analyzers.work.record import Record, Shape, Unknown, Work, documented
from chopper.analyzers.work.vector import Like, Model, Moves, moves, vector_work

_INDEX_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Window(Moves):
    """max_pool*, avg_pool*(self, kernel_size, stride, padding, …, ceil_mode, …)."""

    spatial: int
    ceil: int
    dilation: int | None = None
    indices: bool = False

    def traffic(self, record: Record) -> int:
        """Return bytes read and written."""
        out = prod(self._result(record))
        width = record.itemsize(0) + (_INDEX_BYTES if self.indices else 0)
        return record.nbytes(0) + out * width

    def _result(self, record: Record) -> Shape:
        shape = record.shape(0)
        if len(shape) < self.spatial:
            raise Unknown(f"not an input of {self.spatial} dimensions: {list(shape)}")
        kernel = self._sizes(record, 1, None)
        stride = self._sizes(record, 2, kernel)
        padding = self._sizes(record, 3, (0,) * self.spatial)
        dilation = (1,) * self.spatial
        if self.dilation is not None:
            dilation = self._sizes(record, self.dilation, dilation)
        up = record.boolean(self.ceil) is True
        grid = []
        for n, k, s, p, d in zip(
            shape[-self.spatial :], kernel, stride, padding, dilation, strict=True
        ):
            span = n + 2 * p - d * (k - 1) - 1
            steps = -(-span // s) if up else span // s
            # A window that would start in the padding on the right is dropped.
            steps -= up and steps * s >= n + p
            grid.append(max(0, steps + 1))
        return (*shape[: -self.spatial], *grid)

    def _sizes(self, record: Record, index: int, default: Shape | None) -> Shape:
        values = record.integers(index)
        if values is None:
            raise Unknown("kernel, stride and padding were not recorded")
        if not values and default is not None:
            return default
        if len(values) == 1:
            values = values * self.spatial
        if len(values) != self.spatial or min(values) < 0 or (index == 2 and min(values) < 1):
            raise Unknown(f"argument {index} is not {self.spatial} sizes: {values}")
        return tuple(values)


@documented
def _with_output(size: Callable[[Record], Shape], *, indices: bool = False) -> Model:
    """The input is read, the result written; its size is in the arguments."""

    def model(record: Record) -> Work:
        def traffic() -> int:
            width = record.itemsize(0) + (_INDEX_BYTES if indices else 0)
            return record.nbytes(0) + prod(size(record)) * width

        return vector_work(record, traffic)

    return model


def _resized(record: Record) -> Shape:
    """(self, output_size, …); newer forms leave that out and give factors at the end."""
    shape = record.shape(0)
    sizes = record.integers(1)
    if sizes is None:
        factors = next((f for i in range(2, len(record)) if (f := _floats(record.text(i)))), None)
        if not factors or len(factors) > len(shape):
            raise Unknown("the result's size was not recorded")
        sizes = [int(n * f) for n, f in zip(shape[-len(factors) :], factors, strict=True)]
    if len(sizes) > len(shape) or min(sizes, default=0) < 0:
        raise Unknown(f"a result of {sizes} from {list(shape)}")
    return (*shape[: len(shape) - len(sizes)], *sizes)


def _floats(text: str) -> list[float] | None:
    if not (text.startswith("[") and text.endswith("]") and len(text) > 2):
        return None
    try:
        values = [float(item) for item in text[1:-1].split(",")]
    except ValueError:
        return None
    return values if all(0 < value < 1e6 for value in values) else None


def _gradient_of_size(record: Record) -> Shape:
    """(grad_output, output_size, input_size, …)."""
    sizes = record.integers(2)
    if not sizes or min(sizes) < 0:
        raise Unknown("the input's size was not recorded")
    return tuple(sizes)


def _padded(record: Record) -> Shape:
    """constant_pad_nd(self, pad, value): pairs from the last dimension backwards."""
    shape, pad = list(record.shape(0)), record.integers(1)
    if pad is None or len(pad) % 2 or len(pad) > 2 * len(shape):
        raise Unknown("the padding was not recorded")
    for i in range(len(pad) // 2):
        shape[-1 - i] = max(0, shape[-1 - i] + pad[2 * i] + pad[2 * i + 1])
    return tuple(shape)


@moves()
def _grid_sampled(record: Record) -> int:
    """grid_sampler(self, grid, …): a value per channel and place."""
    x, grid = record.shape(0), record.shape(1)
    out = prod(x[:2]) * prod(grid[1:-1]) * record.itemsize(0)
    return record.nbytes(0) + record.nbytes(1) + out


@moves()
def _real_to_complex(record: Record) -> int:
    """_fft_r2c(self, dims, normalization, onesided): half of the last of the dimensions."""
    shape, dims = record.shape(0), record.integers(1)
    if not dims or not shape:
        raise Unknown("the dimensions were not recorded")
    last = shape[dims[-1] % len(shape)]
    kept = last // 2 + 1 if record.boolean(3) else last
    out = record.numel(0) // max(1, last) * kept
    return record.nbytes(0) + out * 2 * record.itemsize(0)


_UPSAMPLED = (
    "nearest1d nearest2d nearest3d linear1d bilinear2d bicubic2d trilinear3d _nearest_exact2d "
    "_bilinear2d_aa _bicubic2d_aa"
)
_MAX_BACKWARD = Like((0, 7), (1,))
_FROM_GRADIENT = Like((0,), (1,))


def _upsampling() -> dict[str, Model]:
    table: dict[str, Model] = {}
    for kind in _UPSAMPLED.split():
        name = f"aten::_upsample{kind}" if kind.startswith("_") else f"aten::upsample_{kind}"
        table[name] = _with_output(_resized)
        table[f"{name}_backward"] = _with_output(_gradient_of_size)
    return table


MODELS: dict[str, Model] = {
    "aten::max_pool2d_with_indices": _Window(2, ceil=5, dilation=4, indices=True),
    "aten::max_pool3d_with_indices": _Window(3, ceil=5, dilation=4, indices=True),
    "aten::mkldnn_max_pool2d": _Window(2, ceil=5, dilation=4),
    "aten::max_pool2d_with_indices_backward": _MAX_BACKWARD,
    "aten::max_pool3d_with_indices_backward": _MAX_BACKWARD,
    "aten::avg_pool2d": _Window(2, ceil=4),
    "aten::avg_pool3d": _Window(3, ceil=4),
    "aten::avg_pool2d_backward": _FROM_GRADIENT,
    "aten::avg_pool3d_backward": _FROM_GRADIENT,
    "aten::_adaptive_avg_pool2d": _with_output(_resized),
    "aten::_adaptive_avg_pool3d": _with_output(_resized),
    "aten::adaptive_max_pool2d": _with_output(_resized, indices=True),
    "aten::_adaptive_avg_pool2d_backward": _FROM_GRADIENT,
    "aten::_adaptive_avg_pool3d_backward": _FROM_GRADIENT,
    "aten::adaptive_max_pool2d_backward": Like((0, 2), (1,)),
    **_upsampling(),
    "aten::constant_pad_nd": _with_output(_padded),
    "aten::reflection_pad1d": _with_output(_padded),
    "aten::reflection_pad2d": _with_output(_padded),
    "aten::replication_pad1d": _with_output(_padded),
    "aten::replication_pad2d": _with_output(_padded),
    "aten::grid_sampler_2d": _grid_sampled,
    "aten::grid_sampler_3d": _grid_sampled,
    "aten::_fft_r2c": _real_to_complex,
    "aten::_fft_c2c": Like((0,), (0,)),
}
