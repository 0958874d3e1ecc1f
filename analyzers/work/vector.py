"""Traffic of the memory-bound operators: each input read once, each result written once.

Their arithmetic is not counted (``flop_count`` None): no device limit that matters rests on it.
Expanded inputs (stride 0) are taken at their full size: strides are not among the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from math import prod
from typing import Literal

from chopper.analyzers.work.record import (
    LIST_TYPES,
    Direction,
    Record,
    Shape,
    Unknown,
    Work,
    broadcast,
    documented,
    with_bytes,
)

Model = Callable[[Record], Work]


def vector_work(record: Record, traffic: Callable[[], int], *, dtype_of: int = 0) -> Work:
    """Memory-bound work of this traffic; where `traffic` raises Unknown, with that reason."""
    direction: Direction = "backward" if "backward" in record.name else "forward"
    work = Work("vector", dtype=record.dtype(dtype_of), direction=direction)
    return with_bytes(work, traffic)


def moves(*, dtype_of: int = 0) -> Callable[[Callable[[Record], int]], Model]:
    """Make the model of a memory-bound operator from a function that returns its bytes.

    Args:
        dtype_of: argument whose type is the operator's.
    """

    def decorate(traffic: Callable[[Record], int]) -> Model:
        @wraps(traffic)
        def model(record: Record) -> Work:
            return vector_work(record, lambda: traffic(record), dtype_of=dtype_of)

        return model

    return decorate


class Moves:
    """A memory-bound operator with parameters: subclasses return its bytes as `traffic`."""

    __slots__ = ()

    def __call__(self, record: Record) -> Work:
        """Return the work of one call."""
        return vector_work(record, lambda: self.traffic(record))

    def traffic(self, record: Record) -> int:
        """Return bytes read and written.

        Raises:
            Unknown: the record does not tell.
        """
        raise NotImplementedError


# ---- element-wise -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Elementwise(Moves):
    """`arity` tensor arguments that broadcast into one result; one more tensor is an `out=`."""

    arity: int
    result: Literal["promoted", "bool"] = "promoted"
    in_place: bool = False
    reads_self: bool = True

    def traffic(self, record: Record) -> int:
        """Return bytes read and written."""
        inputs = [i for i in range(self.arity) if record.has(i)]
        if not inputs:
            raise Unknown("no tensor argument was recorded")
        read = sum(record.nbytes(i) for i in inputs if i or self.reads_self)
        if self.in_place:
            return read + record.nbytes(0)
        outs = [i for i in range(self.arity, len(record)) if record.has(i)]
        if outs:
            return read + record.nbytes(outs[-1])
        shape = broadcast([record.shape(i) for i in inputs])
        return read + prod(shape) * self._itemsize(record, inputs)

    def _itemsize(self, record: Record, inputs: Sequence[int]) -> int:
        if self.result == "bool":
            return 1
        # where(condition, a, b), masked_fill(self, mask): a bool never widens the result, nor
        # does a 0-d tensor of the same kind.
        wide = [i for i in inputs if record.shape(i) and record.dtype(i) != "bool"]
        floats = [i for i in wide or inputs if _is_float(record.dtype(i))]
        return max(record.itemsize(i) for i in floats or wide or inputs)


def _is_float(dtype: str | None) -> bool:
    return dtype is not None and dtype.startswith(("fp", "bf", "complex"))


_UNARY = (
    "abs neg exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal square sin cos tan tanh "
    "sigmoid log_sigmoid relu relu6 gelu silu mish elu selu celu leaky_relu hardswish hardsigmoid "
    "hardtanh softplus softsign softshrink erf erfc floor ceil round trunc frac sign sgn clamp_min "
    "clamp_max threshold nan_to_num bitwise_not tril triu flip roll logit asin acos atan sinh cosh "
    "cumsum cumprod logcumsumexp pixel_shuffle native_alpha_dropout log_sigmoid_forward bernoulli "
    "erfinv lgamma digamma sinc i0 angle positive rot90 channel_shuffle"
)
_BINARY = (
    "add sub mul div divide multiply subtract true_divide floor_divide rsub remainder fmod atan2 "
    "maximum minimum fmax fmin pow hypot copysign bitwise_and bitwise_or bitwise_xor masked_fill "
    "xlogy heaviside __and__ __or__ __xor__ gelu_backward silu_backward tanh_backward "
    "sigmoid_backward threshold_backward leaky_relu_backward hardtanh_backward "
    "hardswish_backward elu_backward softplus_backward logit_backward log_sigmoid_backward "
    "prelu _prelu_kernel native_dropout_backward mse_loss smooth_l1_loss huber_loss "
    "soft_margin_loss "
    "logaddexp logaddexp2 nextafter bitwise_left_shift bitwise_right_shift special_xlog1py"
)
_TERNARY = (
    "addcmul addcdiv lerp where clamp mse_loss_backward smooth_l1_loss_backward "
    "huber_loss_backward "
    "soft_margin_loss_backward binary_cross_entropy binary_cross_entropy_backward _s_where"
)
_PREDICATES_1 = "isnan isinf isfinite logical_not signbit"
_PREDICATES_2 = "eq ne lt le gt ge logical_and logical_or logical_xor isclose"


def _elementwise() -> dict[str, Model]:
    table: dict[str, Model] = {}
    groups: list[tuple[str, int, Literal["promoted", "bool"]]] = [
        (_UNARY, 1, "promoted"),
        (_BINARY, 2, "promoted"),
        (_TERNARY, 3, "promoted"),
        (_PREDICATES_1, 1, "bool"),
        (_PREDICATES_2, 2, "bool"),
    ]
    for names, arity, result in groups:
        for name in names.split():
            table[f"aten::{name}"] = Elementwise(arity, result)
            table[f"aten::{name}_"] = Elementwise(arity, result, in_place=True)
    for name in ("fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"):
        table[f"aten::{name}"] = Elementwise(1, in_place=True, reads_self=False)
    table["aten::copy_"] = Elementwise(2, in_place=True, reads_self=False)
    table["aten::clone"] = Elementwise(1)
    return table


@moves()
def _to_copy(record: Record) -> int:
    """Copy with conversion: (self, dtype, …)."""
    return record.nbytes(0) + record.numel(0) * record.scalar_type_bytes(1, record.itemsize(0))


# ---- operators whose results look like some of their arguments --------------------------------


@dataclass(frozen=True, slots=True)
class Like:
    """Reads the arguments `read`, writes results shaped and typed as the arguments `write`."""

    read: tuple[int, ...]
    write: tuple[int, ...]
    dtype_of: int | None = None

    def __call__(self, record: Record) -> Work:
        """The work of one call."""
        required = (*self.read[:1], *self.write[:1])

        def traffic() -> int:
            for index in required:
                record.shape(index)
            return sum(record.nbytes(i) for i in (*self.read, *self.write))

        return vector_work(
            record, traffic, dtype_of=required[0] if self.dtype_of is None else self.dtype_of
        )


@moves()
def _softmax(record: Record) -> int:
    """Softmax and its logarithm: (self, dim, half_to_float), and the out= form."""
    if record.has(3):
        return record.nbytes(0) + record.nbytes(3)
    widened = record.boolean(2)
    if widened is None and record.itemsize(0) != 4:
        raise Unknown("whether the result is widened to float was not recorded")
    return record.nbytes(0) + record.numel(0) * (4 if widened else record.itemsize(0))


@moves()
def _softmax_backward(record: Record) -> int:
    """_softmax_backward_data(grad_output, output, dim, input_dtype) and its out= form."""
    read = record.nbytes(0) + record.nbytes(1)
    if record.has(4):
        return read + record.nbytes(4)
    if record.has(3):  # 2021: the input itself instead of its type
        return read + record.nbytes(3)
    return read + record.numel(0) * record.scalar_type_bytes(3, record.itemsize(0))


@dataclass(frozen=True, slots=True)
class _NormBackward:
    """Backward of a normalisation: gradients as wanted by the mask, which may be unrecorded."""

    grad: int
    x: int
    stats: tuple[int, ...]
    weight: int
    mask: int | None

    def __call__(self, record: Record) -> Work:
        return vector_work(record, lambda: self._traffic(record), dtype_of=self.x)

    def _traffic(self, record: Record) -> int:
        record.shape(self.grad)
        mask = None if self.mask is None else record.booleans(self.mask)
        # Without a mask: what training wants, a gradient for everything that takes part.
        wants = [True, True, True] if mask is None else [*mask, False, False, False]
        read = record.nbytes(self.grad) + record.nbytes(self.x)
        read += sum(record.nbytes(i) for i in (*self.stats, self.weight))
        return (
            read
            + wants[0] * record.nbytes(self.x)
            + (wants[1] + wants[2]) * record.nbytes(self.weight)
        )


@moves()
def _dropout(record: Record) -> int:
    """native_dropout(input, p, train): the result and a bool mask."""
    return 2 * record.nbytes(0) + record.numel(0)


@moves()
def _glu(record: Record) -> int:
    """glu(self, dim): one half gates the other."""
    return record.nbytes(0) + record.nbytes(0) // 2


# ---- creation ---------------------------------------------------------------------------------

_CREATED = {"zeros": 1, "ones": 1, "full": 2, "rand": 1, "randn": 1}


def _creations() -> dict[str, Model]:
    table: dict[str, Model] = {f"aten::{n}": _Created(at) for n, at in _CREATED.items()}
    for name in ("arange", "linspace", "logspace", "eye", "tril_indices", "triu_indices"):
        table[f"aten::{name}"] = _out_argument
    for name in ("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"):
        table[f"aten::{name}"] = _like_first
    return table


@dataclass(frozen=True, slots=True)
class _Created(Moves):
    """zeros(size, dtype, …): written once. `dtype` is the position of the type."""

    dtype: int

    def traffic(self, record: Record) -> int:
        """Return bytes read and written."""
        sizes = record.integers(0)
        if sizes is None or min(sizes, default=0) < 0:
            raise Unknown("the size was not recorded")
        return prod(sizes) * record.scalar_type_bytes(self.dtype, 4)


@moves()
def _out_argument(record: Record) -> int:
    """arange(start, end, step, out=…): the only tensor among the arguments is written."""
    outs = [i for i in range(len(record)) if record.has(i)]
    if not outs:
        raise Unknown("the result's size was not recorded")
    return record.nbytes(outs[-1])


@moves()
def _like_first(record: Record) -> int:
    """zeros_like(self, dtype, …): written once."""
    return record.numel(0) * record.scalar_type_bytes(1, record.itemsize(0))


# ---- losses
# ---------------------------------------------------------------------------------------


@moves()
def _nll_forward(record: Record) -> int:
    """nll_loss_forward(self, target, weight, …): one log-probability per target; a scalar."""
    picked = record.numel(1) * record.itemsize(0)
    return picked + record.nbytes(1) + record.nbytes(2) + 2 * record.itemsize(0)


@moves(dtype_of=1)
def _nll_backward(record: Record) -> int:
    """nll_loss_backward(grad_output, self, target, weight, …): a gradient of self's size."""
    return record.nbytes(0) + record.nbytes(2) + record.nbytes(3) + record.nbytes(1)


# ---- reductions -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reduce:
    """Reads self, writes what is left of it. `dim` is the position of the dimensions.

    Where the reduced dimensions were not recorded (no concrete inputs), only the reading counts:
    what is left is mostly a small part of it.
    """

    dim: int = 1
    result: Literal["same", "sum", "bool", "index", "value_and_index", "two"] = "same"

    def __call__(self, record: Record) -> Work:
        """The work of one call."""
        if self.result == "value_and_index" and record.has(1):  # max(self, other)
            return Elementwise(2)(record)
        return vector_work(record, lambda: self._traffic(record))

    def _traffic(self, record: Record) -> int:
        read = record.nbytes(0)
        record.shape(0)
        try:
            return read + self._result(record)
        except Unknown:
            return read

    def _result(self, record: Record) -> int:
        shape = record.shape(0)
        outs = [i for i in range(1, len(record)) if record.has(i)]
        if outs:
            return sum(record.nbytes(i) for i in outs)
        left = self._left(record, shape)
        size = record.itemsize(0)
        if self.result == "sum" and not _is_float(record.dtype(0)):
            size = 8
        # max() over everything has no index; max(dim) has one per value.
        indexed = size + 8 if len(record) > 1 else size
        widths = {"bool": 1, "index": 8, "value_and_index": indexed, "two": 2 * size}
        width = widths.get(self.result, size)
        return left * width

    def _left(self, record: Record, shape: Shape) -> int:
        if len(record) <= self.dim + 1 and record.integers(self.dim) is None:
            return 1  # sum(self, dtype): everything
        text = record.text(self.dim)
        dims = record.integers(self.dim)
        if dims is None and text:
            one = record.integer(self.dim)
            dims = None if one is None else [one]
            if dims is None:
                raise Unknown("the reduced dimensions were not recorded")
        if dims is None and not record.concrete and self.dim < len(record):
            raise Unknown("the reduced dimensions were not recorded")
        reduced = {d % len(shape) for d in dims} if dims and shape else set(range(len(shape)))
        return prod(size for axis, size in enumerate(shape) if axis not in reduced)


# ---- lists: foreach and fused optimizers, concatenation ---------------------------------------


def elements(record: Record, index: int) -> int:
    """Elements of all tensors in list argument `index`."""
    return sum(prod(shape) for shape in record.shapes(index))


def listed(count: Callable[[], int]) -> Work:
    """Work on tensor lists, whose element types a trace does not record."""
    try:
        elements = count()
    except Unknown as exc:
        return Work("vector", reason=f"bytes: {exc}")
    return Work(
        "vector",
        unsized_element_count=elements,
        reason="bytes: the element types of tensor lists are not recorded",
    )


def _foreach(record: Record) -> Work:
    """Any _foreach_* operator: reads all its lists, writes one like the first."""
    name = record.name
    write_only = name.endswith(("_foreach_zero_", "_foreach_copy_"))

    def count() -> int:
        lists = [i for i in range(len(record)) if record.type_name(i) in LIST_TYPES]
        if not lists:
            raise Unknown("no list argument was recorded")
        sizes = [elements(record, i) for i in lists]
        read = sum(sizes[1:]) if write_only else sum(sizes)
        written = 0 if name.endswith("_foreach_norm") else sizes[0]
        return read + written

    return listed(count)


def _unscale(record: Record) -> Work:
    """_amp_foreach_non_finite_check_and_unscale_(gradients, …): read and written."""
    return listed(lambda: 2 * elements(record, 0))


@documented
def _fused_optimizer(read: tuple[int, ...], written: tuple[int, ...], optional: int) -> Model:
    """_fused_adamw_(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, …) and its like."""

    def model(record: Record) -> Work:
        def count() -> int:
            total = sum(elements(record, i) for i in (*read, *written))
            # AMSGrad's maxima, SGD's momentum: an empty list when unused.
            given = optional < len(record.dims) and record.dims[optional]
            return total + (2 * elements(record, optional) if given else 0)

        return listed(count)

    return model


def _cat(record: Record) -> Work:
    """cat(tensors, dim): everything read and written once; out= tells the type."""
    if record.has(2):
        return vector_work(record, lambda: 2 * record.nbytes(2), dtype_of=2)
    return listed(lambda: 2 * elements(record, 0))


def _all_gather_copy_in(record: Record) -> Work:
    """fsdp::all_gather_copy_in(inputs, output, …): the shards go into their part of the output."""
    work = listed(lambda: 2 * elements(record, 0))
    if work.unsized_element_count is None or not record.has(1):
        return work
    count = work.unsized_element_count
    sized = replace(work, unsized_element_count=None, dtype=record.dtype(1), reason=None)
    return with_bytes(sized, lambda: count * record.itemsize(1))


def _chunk_cat(record: Record) -> Work:
    """fsdp::chunk_cat(tensors, dim, num_chunks, out): pads into out; may also widen."""
    work = listed(lambda: elements(record, 0))
    if not record.has(3):
        return replace(
            work,
            unsized_element_count=None if (n := work.unsized_element_count) is None else 2 * n,
        )
    reason = work.reason
    return replace(with_bytes(work, lambda: record.nbytes(3)), reason=reason)


_BATCH_NORM = Like((0, 1, 2, 3, 4), (0,))
_VENDOR_BATCH_NORM_BACKWARD = _NormBackward(grad=1, x=0, stats=(5, 6), weight=2, mask=None)
_ADAM = _fused_optimizer((0, 1, 2, 3), (0, 2, 3), 4)

MODELS: dict[str, Model] = {
    **_elementwise(),
    "aten::_to_copy": _to_copy,
    "aten::_softmax": _softmax,
    "aten::_safe_softmax": Like((0,), (0,)),
    "aten::_masked_softmax": Like((0, 1), (0,)),
    "aten::_log_softmax": _softmax,
    "aten::_softmax_backward_data": _softmax_backward,
    "aten::_log_softmax_backward_data": _softmax_backward,
    "aten::native_layer_norm": Like((0, 2, 3), (0,)),
    "aten::native_layer_norm_backward": _NormBackward(grad=0, x=1, stats=(3, 4), weight=5, mask=7),
    "aten::rms_norm": Like((0, 2), (0,)),
    "aten::_fused_rms_norm": Like((0, 2), (0,)),
    "aten::_fused_rms_norm_backward": _NormBackward(grad=0, x=1, stats=(3,), weight=4, mask=5),
    "aten::native_group_norm": Like((0, 1, 2), (0,)),
    "aten::native_group_norm_backward": _NormBackward(grad=0, x=1, stats=(2, 3), weight=4, mask=9),
    "aten::native_batch_norm": _BATCH_NORM,
    "aten::_native_batch_norm_legit": _BATCH_NORM,
    "aten::_native_batch_norm_legit_no_training": _BATCH_NORM,
    "aten::_native_batch_norm_legit_functional": _BATCH_NORM,
    "aten::_batch_norm_with_update": _BATCH_NORM,
    "aten::_batch_norm_no_update": _BATCH_NORM,
    # Synchronized batch normalisation, in its parts.
    "aten::batch_norm_stats": Like((0,), ()),
    "aten::batch_norm_elemt": Like((0, 1, 2, 3, 4), (0,)),
    "aten::batch_norm_gather_stats_with_counts": Like((1, 2), ()),
    "aten::batch_norm_backward_reduce": Like((0, 1), ()),
    "aten::batch_norm_backward_elemt": Like((0, 1), (1,)),
    "aten::cudnn_batch_norm": _BATCH_NORM,
    "aten::miopen_batch_norm": _BATCH_NORM,
    "aten::native_batch_norm_backward": _NormBackward(grad=0, x=1, stats=(5, 6), weight=2, mask=9),
    "aten::cudnn_batch_norm_backward": _VENDOR_BATCH_NORM_BACKWARD,
    "aten::miopen_batch_norm_backward": _VENDOR_BATCH_NORM_BACKWARD,
    "aten::native_dropout": _dropout,
    "aten::_fused_dropout": _dropout,
    "aten::glu": _glu,
    "aten::glu_backward": Like((0, 1), (1,)),
    "aten::_weight_norm_interface": Like((0, 1), (0,)),
    "aten::_transform_bias_rescale_qkv": Like((0, 1), (0,)),
    **_creations(),
    "aten::_amp_foreach_non_finite_check_and_unscale_": _unscale,
    "aten::nll_loss_forward": _nll_forward,
    "aten::nll_loss2d_forward": _nll_forward,
    "aten::nll_loss_backward": _nll_backward,
    "aten::nll_loss2d_backward": _nll_backward,
    "aten::sum": Reduce(result="sum"),
    "aten::prod": Reduce(result="sum"),
    "aten::mean": Reduce(),
    "aten::amax": Reduce(),
    "aten::amin": Reduce(),
    "aten::logsumexp": Reduce(),
    "aten::std": Reduce(),
    "aten::var": Reduce(),
    "aten::var_mean": Reduce(result="two"),
    "aten::std_mean": Reduce(result="two"),
    "aten::aminmax": Reduce(result="two"),
    "aten::nansum": Reduce(result="sum"),
    "aten::nanmean": Reduce(),
    "aten::count_nonzero": Reduce(result="index"),
    "aten::linalg_vector_norm": Reduce(dim=2),
    "aten::norm": Reduce(dim=2),
    "aten::any": Reduce(result="bool"),
    "aten::all": Reduce(result="bool"),
    "aten::argmax": Reduce(result="index"),
    "aten::argmin": Reduce(result="index"),
    "aten::max": Reduce(result="value_and_index"),
    "aten::min": Reduce(result="value_and_index"),
    "aten::cat": _cat,
    "aten::_cat": _cat,
    "aten::stack": _cat,
    "aten::_stack": _cat,
    "aten::split_with_sizes_copy": Like((0,), (0,)),
    "aten::_chunk_cat": _chunk_cat,
    "aten::_fused_adam_": _ADAM,
    "aten::_fused_adamw_": _ADAM,
    "aten::_fused_adagrad_": _fused_optimizer((0, 1, 2), (0, 2), 10**6),
    "aten::_fused_sgd_": _fused_optimizer((0, 1), (0,), 2),
    "fsdp::all_gather_copy_in": _all_gather_copy_in,
    "fsdp::split_with_sizes_copy": Like((0,), (0,)),
    "fsdp::chunk_cat": _chunk_cat,
}

_TRITON = ("triton_poi_", "triton_red_", "triton_per_", "triton_spl_", "triton_for_", "triton_mix_")


def compiled_family(name: str) -> str | None:
    """The family of operators known by a prefix: TorchInductor's kernels and `_foreach_*`."""
    return "vector" if name.startswith((*_TRITON, "aten::_foreach_")) else None


def compiled(record: Record) -> Work:
    """Operators known by a prefix."""
    return _foreach(record) if record.name.startswith("aten::_foreach_") else _triton(record)


@moves()
def _triton(record: Record) -> int:
    """A kernel of TorchInductor: every buffer once, each at most as large as the iteration space.

    The last one (pointwise) or two (reductions) numbers are the iteration space; a buffer that
    is larger is only partly touched (a gather). Which buffers are updated in place is not
    recorded: they count once instead of twice.
    """
    buffers = [i for i in range(len(record)) if record.has(i)]
    sizes = [record.integer(i) for i in range(len(record)) if not record.has(i)]
    numbers = [size for size in sizes if size is not None]
    if not buffers or not numbers:
        raise Unknown("the kernel's buffers or iteration space were not recorded")
    space = max(numbers[-1], prod(numbers[-2:]))
    return sum(min(record.numel(i), space) * record.itemsize(i) for i in buffers)
