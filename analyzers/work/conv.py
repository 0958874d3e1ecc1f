"""Convolutions, forward and backward, 1 to 3 dimensions, grouped, dilated, transposed.

Each output (for transposed ones: input) position of each sample meets every weight once, so one
pass is 2·N·grid·numel(weight) FLOP, where the weight [C_out, C_in/groups, …kernel] already
carries the groups; each of the two gradients costs the same again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from chopper.analyzers.work.record import Record, Shape, Unknown, Work, with_bytes

Model = Callable[[Record], Work]


@dataclass(frozen=True, slots=True)
class _Forward:
    """Positions of a forward convolution's arguments."""

    stride: int
    padding: int
    dilation: int | None = None
    bias: int | None = 2
    x: int = 0
    weight: int = 1
    transposed: bool | int = False  # an int is the position of the flag
    output_padding: int | None = None
    extra_read: int | None = None

    def __call__(self, record: Record) -> Work:
        x, weight = record.shape(self.x), record.shape(self.weight)
        spatial = len(weight) - 2
        if spatial < 1:
            raise Unknown(f"not a convolution weight: {list(weight)}")
        if len(x) == spatial + 1:  # unbatched
            x = (1, *x)
        if len(x) != spatial + 2:
            raise Unknown(f"input {list(x)} does not fit weight {list(weight)}")
        transposed = self._is_transposed(record)
        channels = weight[0] if transposed else weight[1]
        if channels == 0 or x[1] % channels or (transposed and x[1] != channels):
            raise Unknown(f"channels of input {list(x)} do not fit weight {list(weight)}")
        if transposed:
            grid = x[2:]
        else:
            grid = self._output_grid(record, x[2:], weight)
        flop = 2 * x[0] * prod(grid) * prod(weight)
        work = Work("conv", flop_count=flop, useful_flop_count=flop, dtype=record.dtype(self.x))

        def traffic() -> int:
            result: int
            if transposed:
                result = self._transposed_result(record, x, weight)
            else:
                result = x[0] * weight[0] * prod(grid)
            extras = [i for i in (self.bias, self.extra_read) if i is not None]
            return (
                record.nbytes(self.x)
                + record.nbytes(self.weight)
                + sum(record.nbytes(i) for i in extras)
                + result * record.itemsize(self.x)
            )

        return with_bytes(work, traffic)

    def _is_transposed(self, record: Record) -> bool:
        if isinstance(self.transposed, bool):
            return self.transposed
        flag = record.boolean(self.transposed)
        if flag is None:
            raise Unknown("whether the convolution is transposed was not recorded")
        return flag

    def _output_grid(self, record: Record, size: Shape, weight: Shape) -> Shape:
        channels, kernel = weight[0], weight[2:]
        if record.output_dims is not None and len(record.output_dims) >= len(size):
            if record.output_dims[-len(size) - 1 : -len(size)] not in ((), (channels,)):
                raise Unknown(f"{channels} channels do not fit result {list(record.output_dims)}")
            return record.output_dims[len(record.output_dims) - len(size) :]
        rank = len(size)
        stride = _spatial(record, self.stride, rank)
        padding = _spatial(record, self.padding, rank)
        dilation = (1,) * rank if self.dilation is None else _spatial(record, self.dilation, rank)
        if min(stride, default=1) < 1:
            raise Unknown("a stride below 1")
        return tuple(
            max(0, (n + 2 * p - d * (k - 1) - 1) // s + 1)
            for n, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True)
        )

    def _transposed_result(self, record: Record, x: Shape, weight: Shape) -> int:
        if record.output_dims is not None:
            return prod(record.output_dims)
        rank = len(x) - 2
        stride = _spatial(record, self.stride, rank)
        padding = _spatial(record, self.padding, rank)
        dilation = (1,) * rank if self.dilation is None else _spatial(record, self.dilation, rank)
        extra = (0,) * rank
        if self.output_padding is not None:
            extra = _spatial(record, self.output_padding, rank)
        grid: list[int] = [
            max(0, (n - 1) * s - 2 * p + d * (k - 1) + e + 1)
            for n, k, s, p, d, e in zip(
                x[2:], weight[2:], stride, padding, dilation, extra, strict=True
            )
        ]
        return x[0] * weight[1] * self._groups(record) * prod(grid)

    def _groups(self, record: Record) -> int:
        # Groups always come after the geometry; the number of a transposed convolution's output
        # channels cannot be told from its input and weight alone.
        for index in _GROUPS.get(record.name, ()):
            groups = record.integer(index)
            if groups is not None and groups > 0:
                return groups
        if record.name in _UNGROUPED:
            return 1
        raise Unknown("the number of groups was not recorded")


_GROUPS = {
    "aten::convolution": (8,),
    "aten::_convolution": (8,),
    "aten::convolution_overrideable": (8,),
    "aten::conv_transpose1d": (6,),
    "aten::conv_transpose2d": (6,),
    "aten::conv_transpose3d": (6,),
    "aten::cudnn_convolution_transpose": (6,),
    "aten::miopen_convolution_transpose": (7,),
    "aten::_mps_convolution_transpose": (6,),
    "mkldnn::_convolution_transpose_pointwise": (7,),
}
_UNGROUPED = frozenset({"aten::slow_conv_transpose2d", "aten::slow_conv_transpose3d"})


def _spatial(record: Record, index: int, rank: int) -> Shape:
    """A stride, padding or dilation argument, one value repeated over the dimensions if need be."""
    values = record.integers(index)
    if values is None:
        raise Unknown("stride, padding and dilation were not recorded")
    if len(values) == 1:
        values = values * rank
    if len(values) != rank or min(values, default=0) < 0:
        raise Unknown(f"argument {index} is not {rank} sizes: {values}")
    return tuple(values)


@dataclass(frozen=True, slots=True)
class _Backward:
    """Positions of a backward convolution's arguments; all three tensors are recorded."""

    grad: int
    x: int
    weight: int
    mask: int | None = None
    wants: tuple[bool, bool] | None = None
    transposed: bool | int = False
    counter_groups: bool = False

    def __call__(self, record: Record) -> Work:
        grad, x, weight = record.shape(self.grad), record.shape(self.x), record.shape(self.weight)
        if not len(grad) == len(x) == len(weight) >= 3 or grad[0] != x[0]:
            raise Unknown(f"shapes do not fit: {list(grad)}, {list(x)}, {list(weight)}")
        transposed = self._is_transposed(record, grad, x, weight)
        wide, narrow = (grad, x) if transposed else (x, grad)
        if weight[1] == 0 or wide[1] % weight[1] or narrow[1] != weight[0]:
            raise Unknown(f"channels do not fit: {list(grad)}, {list(x)}, {list(weight)}")
        groups = wide[1] // weight[1]
        wants = self._wants(record)
        one = 2 * x[0] * prod(narrow[2:]) * prod(weight)
        useful = one * (wants[0] + wants[1])
        # torch.utils.flop_counter multiplies all input with all output channels in the weight's
        # gradient; a grouped convolution has only 1/groups of those products.
        counted = one * wants[0] + one * wants[1] * (groups if self.counter_groups else 1)
        work = Work(
            "conv",
            flop_count=counted,
            useful_flop_count=useful,
            dtype=record.dtype(self.grad),
            direction="backward",
        )

        def traffic() -> int:
            read = record.nbytes(self.grad)
            read += wants[0] * record.nbytes(self.weight) + wants[1] * record.nbytes(self.x)
            written = wants[0] * record.nbytes(self.x) + wants[1] * record.nbytes(self.weight)
            bias = grad[1] * record.itemsize(self.grad) if wants[2] else 0
            return read + written + bias

        return with_bytes(work, traffic)

    def _wants(self, record: Record) -> tuple[bool, bool, bool]:
        if self.wants is not None:
            return (*self.wants, False)
        # cuDNN's signature lost and gained arguments before its mask, which has stayed last.
        positions = [self.mask] if self.mask is not None else range(3, len(record))[::-1]
        for index in positions:
            mask = record.booleans(index)
            if mask is not None and len(mask) >= 2:
                return (mask[0], mask[1], len(mask) > 2 and mask[2])
        raise Unknown("which gradients are wanted was not recorded")

    def _is_transposed(self, record: Record, grad: Shape, x: Shape, weight: Shape) -> bool:
        if isinstance(self.transposed, bool):
            return self.transposed
        flag = record.boolean(self.transposed)
        if flag is not None:
            return flag
        fits = (grad[1] == weight[0], x[1] == weight[0])
        if fits[0] != fits[1]:
            return fits[1]
        if grad[2:] == x[2:]:
            return False  # the count is the same either way
        raise Unknown("whether the convolution is transposed was not recorded")


def _gradient(record: Record, grad: Sequence[int], weight: Sequence[int]) -> Work:
    """Work of either factor's gradient: each weight element meets each position of the result."""
    flop = 2 * grad[0] * prod(grad[2:]) * prod(weight)
    return Work(
        "conv",
        flop_count=flop,
        useful_flop_count=flop,
        dtype=record.dtype(1),
        direction="backward",
    )


def _input_gradient(record: Record) -> Work:
    """*_backward_input(input_size, grad_output, weight, …)."""
    grad, weight = record.shape(1), record.shape(2)
    if len(grad) != len(weight) or len(grad) < 3 or grad[1] != weight[0]:
        raise Unknown(f"shapes do not fit: {list(grad)}, {list(weight)}")
    work = _gradient(record, grad, weight)

    def traffic() -> int:
        size = record.output_dims or record.integers(0)
        if size is None:
            raise Unknown("the gradient's shape was not recorded")
        return record.nbytes(1) + record.nbytes(2) + prod(size) * record.itemsize(1)

    return with_bytes(work, traffic)


def _weight_gradient(record: Record) -> Work:
    """*_backward_weight(weight_size, grad_output, input, …)."""
    grad, x = record.shape(1), record.shape(2)
    weight = record.output_dims or record.integers(0)
    if not weight:
        raise Unknown("the weight's shape was not recorded")
    if not len(grad) == len(x) == len(weight) >= 3 or grad[:2] != (x[0], weight[0]):
        raise Unknown(f"shapes do not fit: {list(grad)}, {list(x)}, {list(weight)}")
    work = _gradient(record, grad, weight)
    return with_bytes(
        work,
        lambda: record.nbytes(1) + record.nbytes(2) + prod(weight) * record.itemsize(1),
    )


_CONVOLUTION = _Forward(stride=3, padding=4, dilation=5, transposed=6, output_padding=7)
_CONV = _Forward(stride=3, padding=4, dilation=5)
_CONV_TRANSPOSE = _Forward(stride=3, padding=4, dilation=7, transposed=True, output_padding=5)
_VENDOR = _Forward(stride=4, padding=3, dilation=5)
_SLOW = _Forward(stride=4, padding=5, bias=3)
_SLOW_DILATED = _Forward(stride=4, padding=5, dilation=6, bias=3)
_SLOW_TRANSPOSE = _Forward(
    stride=4, padding=5, dilation=7, bias=3, transposed=True, output_padding=6
)
_FUSED_RELU = _Forward(stride=3, padding=4, dilation=5)
_FUSED_ADD_RELU = _Forward(stride=5, padding=6, dilation=7, bias=4, extra_read=2)
_VENDOR_TRANSPOSE = _Forward(stride=5, padding=3, dilation=6, transposed=True, output_padding=4)
_SELF_GRAD_WEIGHT = _Backward(grad=1, x=0, weight=2)


def _pointwise(record: Record) -> Work:
    """mkldnn::_convolution_pointwise(X, W, …); binary (X, other, W, …); in place (other, X, W)."""
    if record.has(2) and len(record.shape(2)) > 2:
        x, other = (1, 0) if record.name.endswith("_") else (0, 1)
        return _Forward(x=x, weight=2, bias=3, padding=4, stride=5, dilation=6, extra_read=other)(
            record
        )
    return _VENDOR(record)


MODELS: dict[str, Model] = {
    "aten::convolution": _CONVOLUTION,
    "aten::_convolution": _CONVOLUTION,
    "aten::convolution_overrideable": _CONVOLUTION,
    "aten::conv1d": _CONV,
    "aten::conv2d": _CONV,
    "aten::conv3d": _CONV,
    "aten::conv_transpose1d": _CONV_TRANSPOSE,
    "aten::conv_transpose2d": _CONV_TRANSPOSE,
    "aten::conv_transpose3d": _CONV_TRANSPOSE,
    "aten::cudnn_convolution": _Forward(stride=3, padding=2, dilation=4, bias=None),
    "aten::cudnn_convolution_transpose": _Forward(
        stride=4, padding=2, dilation=5, bias=None, transposed=True, output_padding=3
    ),
    "aten::cudnn_convolution_relu": _FUSED_RELU,
    "aten::cudnn_convolution_add_relu": _FUSED_ADD_RELU,
    "aten::miopen_convolution": _VENDOR,
    "aten::miopen_depthwise_convolution": _VENDOR,
    "aten::miopen_convolution_transpose": _VENDOR_TRANSPOSE,
    "aten::miopen_convolution_relu": _FUSED_RELU,
    "aten::miopen_convolution_add_relu": _FUSED_ADD_RELU,
    "aten::mkldnn_convolution": _VENDOR,
    "aten::_mps_convolution": _VENDOR,
    "aten::_mps_convolution_transpose": _Forward(
        stride=4, padding=2, dilation=5, bias=None, transposed=True, output_padding=3
    ),
    "mkldnn::_convolution_pointwise": _pointwise,
    "mkldnn::_convolution_pointwise_": _pointwise,
    "mkldnn::_convolution_transpose_pointwise": _VENDOR_TRANSPOSE,
    "aten::_nnpack_spatial_convolution": _Forward(stride=4, padding=3),
    "aten::thnn_conv2d": _SLOW,
    "aten::_slow_conv2d_forward": _SLOW,
    "aten::slow_conv3d": _SLOW,
    "aten::slow_conv3d_forward": _SLOW,
    "aten::slow_conv_dilated2d": _SLOW_DILATED,
    "aten::slow_conv_dilated3d": _SLOW_DILATED,
    "aten::_conv_depthwise2d": _SLOW_DILATED,
    "aten::conv_depthwise3d": _SLOW_DILATED,
    "aten::slow_conv_transpose2d": _SLOW_TRANSPOSE,
    "aten::slow_conv_transpose3d": _SLOW_TRANSPOSE,
    "aten::convolution_backward": _Backward(
        grad=0, x=1, weight=2, mask=10, transposed=7, counter_groups=True
    ),
    "aten::convolution_backward_overrideable": _Backward(
        grad=0, x=1, weight=2, mask=9, transposed=6
    ),
    "aten::_slow_conv2d_backward": _Backward(grad=0, x=1, weight=2, mask=6),
    "aten::thnn_conv2d_backward": _Backward(grad=0, x=1, weight=2),
    "aten::_conv_depthwise2d_backward": _Backward(grad=0, x=1, weight=2, mask=7),
    "aten::cudnn_convolution_backward": _SELF_GRAD_WEIGHT,
    "aten::miopen_convolution_backward": _SELF_GRAD_WEIGHT,
    "aten::miopen_depthwise_convolution_backward": _SELF_GRAD_WEIGHT,
    "aten::mkldnn_convolution_backward": _SELF_GRAD_WEIGHT,
    "aten::mps_convolution_backward": _SELF_GRAD_WEIGHT,
    "aten::cudnn_convolution_transpose_backward": _Backward(grad=1, x=0, weight=2, transposed=True),
    "aten::miopen_convolution_transpose_backward": _Backward(
        grad=1, x=0, weight=2, transposed=True
    ),
    "aten::mps_convolution_transpose_backward": _Backward(grad=1, x=0, weight=2, transposed=True),
    "aten::cudnn_convolution_backward_input": _input_gradient,
    "aten::miopen_convolution_backward_input": _input_gradient,
    "aten::mkldnn_convolution_backward_input": _input_gradient,
    "aten::cudnn_convolution_backward_weight": _weight_gradient,
    "aten::miopen_convolution_backward_weight": _weight_gradient,
    "aten::mkldnn_convolution_backward_weights": _weight_gradient,
}
