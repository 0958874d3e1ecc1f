"""Traffic of the memory-bound operators: each input read once, each result written once.

Their arithmetic is not counted (``flop_count`` None): no device limit that matters rests on it.
Expanded inputs (stride 0) are taken at their full size: strides are not among the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from math import prod
from typing import Any, Literal

from chopper.analyzers.work.record import (
    LIST_TYPES,
    Record,
    Shape,
    Unknown,
    Work,
    broadcast,
    moves,
    with_bytes,
)

# ---- element-wise -----------------------------------------------------------------------------


def elementwise_bytes(
    record: Record,
    arity: int,
    *,
    predicate: bool = False,
    in_place: bool = False,
    reads_self: bool = True,
) -> int:
    """`arity` tensor arguments that broadcast into one result; one more tensor is an `out=`."""
    inputs = [i for i in range(arity) if record.has(i)]
    if not inputs:
        raise Unknown("no tensor argument was recorded")
    read = sum(record.nbytes(i) for i in inputs if i or reads_self)
    if in_place:
        return read + record.nbytes(0)
    outs = [i for i in range(arity, len(record)) if record.has(i)]
    if outs:
        return read + record.nbytes(outs[-1])
    shape = broadcast([record.shape(i) for i in inputs])
    return read + prod(shape) * (1 if predicate else _promoted_bytes(record, inputs))


elementwise = moves(elementwise_bytes)


def _promoted_bytes(record: Record, inputs: Sequence[int]) -> int:
    # where(condition, a, b), masked_fill(self, mask): a bool never widens the result, nor does a
    # 0-d tensor of the same kind.
    wide = [i for i in inputs if record.shape(i) and record.dtype(i) != "bool"]
    floats = [i for i in wide or inputs if _is_float(record.dtype(i))]
    return max(record.itemsize(i) for i in floats or wide or inputs)


def _is_float(dtype: str | None) -> bool:
    return dtype is not None and dtype.startswith(("fp", "bf", "complex"))


@moves
def to_copy(record: Record) -> int:
    """Copy with conversion: (self, dtype, …)."""
    return record.nbytes(0) + record.numel(0) * record.scalar_type_bytes(1, record.itemsize(0))


# ---- operators whose results look like some of their arguments --------------------------------


@moves
def like(record: Record, read: Sequence[int], write: Sequence[int]) -> int:
    """Reads the arguments `read`, writes results shaped and typed as the arguments `write`."""
    for index in (*read[:1], *write[:1]):
        record.shape(index)
    return sum(record.nbytes(i) for i in (*read, *write))


@moves
def of_first_size(record: Record, times: int) -> int:
    """`times` tensors of the first one's size."""
    return times * record.nbytes(0)


@moves
def softmax(record: Record) -> int:
    """Softmax and its logarithm: (self, dim, half_to_float), and the out= form."""
    if record.has(3):
        return record.nbytes(0) + record.nbytes(3)
    widened = record.boolean(2)
    if widened is None and record.itemsize(0) != 4:
        raise Unknown("whether the result is widened to float was not recorded")
    return record.nbytes(0) + record.numel(0) * (4 if widened else record.itemsize(0))


@moves
def softmax_backward(record: Record) -> int:
    """_softmax_backward_data(grad_output, output, dim, input_dtype) and its out= form."""
    read = record.nbytes(0) + record.nbytes(1)
    if record.has(4):
        return read + record.nbytes(4)
    if record.has(3):  # 2021: the input itself instead of its type
        return read + record.nbytes(3)
    return read + record.numel(0) * record.scalar_type_bytes(3, record.itemsize(0))


@moves
def norm_backward(
    record: Record, grad: int, x: int, stats: Sequence[int], weight: int, mask: int | None = None
) -> int:
    """Backward of a normalisation: gradients as wanted by the mask, which may be unrecorded."""
    record.shape(grad)
    recorded = None if mask is None else record.booleans(mask)
    # Without a mask: what training wants, a gradient for everything that takes part.
    wants = [True, True, True] if recorded is None else [*recorded, False, False, False]
    read = sum(record.nbytes(i) for i in (grad, x, *stats, weight))
    return read + wants[0] * record.nbytes(x) + (wants[1] + wants[2]) * record.nbytes(weight)


@moves
def dropout(record: Record) -> int:
    """native_dropout(input, p, train): the result and a bool mask."""
    return 2 * record.nbytes(0) + record.numel(0)


@moves
def glu(record: Record) -> int:
    """(self, dim): one half gates the other."""
    return record.nbytes(0) + record.nbytes(0) // 2


@moves
def rotary(record: Record) -> int:
    """rotary_embedding(positions, query, key, head_size, cos_sin_cache, …), in place."""
    tokens, cache = record.numel(0), record.shape(4)
    rows = min(tokens, cache[0]) * prod(cache[1:]) if cache else 0
    angles = rows * record.itemsize(4)
    return record.nbytes(0) + 2 * (record.nbytes(1) + record.nbytes(2)) + angles


# ---- creation ---------------------------------------------------------------------------------


@moves
def created(record: Record, dtype: int) -> int:
    """zeros(size, dtype, …): written once. `dtype` is the position of the type."""
    sizes = record.integers(0)
    if sizes is None or min(sizes, default=0) < 0:
        raise Unknown("the size was not recorded")
    return prod(sizes) * record.scalar_type_bytes(dtype, 4)


@moves
def out_argument(record: Record) -> int:
    """arange(start, end, step, out=…): the only tensor among the arguments is written."""
    outs = [i for i in range(len(record)) if record.has(i)]
    if not outs:
        raise Unknown("the result's size was not recorded")
    return record.nbytes(outs[-1])


@moves
def like_first(record: Record) -> int:
    """zeros_like(self, dtype, …): written once."""
    return record.numel(0) * record.scalar_type_bytes(1, record.itemsize(0))


# ---- losses -----------------------------------------------------------------------------------


@moves
def nll_forward(record: Record) -> int:
    """nll_loss_forward(self, target, weight, …): one log-probability per target; a scalar."""
    picked = record.numel(1) * record.itemsize(0)
    return picked + record.nbytes(1) + record.nbytes(2) + 2 * record.itemsize(0)


@moves
def nll_backward(record: Record) -> int:
    """nll_loss_backward(grad_output, self, target, weight, …): a gradient of self's size."""
    return sum(record.nbytes(i) for i in range(4))


# ---- reductions -------------------------------------------------------------------------------


@moves
def reduce(
    record: Record,
    dim: int = 1,
    result: Literal["same", "sum", "bool", "index", "value_and_index", "two"] = "same",
) -> int:
    """Reads self, writes the remaining elements. `dim` is the position of the dimensions.

    Where the reduced dimensions were not recorded (no concrete inputs), only the reading counts:
    what is left is mostly a small part of it.
    """
    if result == "value_and_index" and record.has(1):  # max(self, other)
        return elementwise_bytes(record, 2)
    record.shape(0)
    try:
        return record.nbytes(0) + _reduced_bytes(record, dim, result)
    except Unknown:
        return record.nbytes(0)


def _reduced_bytes(record: Record, dim: int, result: str) -> int:
    outs = [i for i in range(1, len(record)) if record.has(i)]
    if outs:
        return sum(record.nbytes(i) for i in outs)
    remaining = _left_count(record, dim, record.shape(0))
    size = record.itemsize(0)
    if result == "sum" and not _is_float(record.dtype(0)):
        size = 8
    # max() over everything has no index; max(dim) has one per value.
    indexed = size + 8 if len(record) > 1 else size
    return remaining * {"bool": 1, "index": 8, "value_and_index": indexed, "two": 2 * size}.get(
        result, size
    )


def _left_count(record: Record, dim: int, shape: Shape) -> int:
    dims = record.integers(dim)
    if len(record) <= dim + 1 and dims is None:
        return 1  # sum(self, dtype): everything
    if dims is None and (record.text(dim) or (not record.concrete and dim < len(record))):
        one = record.integer(dim)
        if one is None:
            raise Unknown("the reduced dimensions were not recorded")
        dims = [one]
    reduced = {d % len(shape) for d in dims} if dims and shape else set(range(len(shape)))
    return prod(size for axis, size in enumerate(shape) if axis not in reduced)


# ---- lists: foreach and fused optimizers, concatenation ---------------------------------------


def _elements(record: Record, index: int) -> int:
    return sum(prod(shape) for shape in record.shapes(index))


def _listed(count: Callable[..., int]) -> Callable[..., Work]:
    """Make the model of tensor lists, whose element types a trace does not record."""

    @wraps(count)
    def vector(record: Record, **positions: Any) -> Work:
        try:
            elements = count(record, **positions)
        except Unknown as exc:
            return Work("vector", reason=f"bytes: {exc}")
        reason = "bytes: the element types of tensor lists are not recorded"
        return Work("vector", unsized_element_count=elements, reason=reason)

    return vector


@_listed
def foreach(record: Record) -> int:
    """Any _foreach_* operator: reads all its lists, writes one like the first."""
    lists = [i for i in range(len(record)) if record.type_name(i) in LIST_TYPES]
    if not lists:
        raise Unknown("no list argument was recorded")
    sizes = [_elements(record, i) for i in lists]
    written = 0 if record.name.endswith("_foreach_norm") else sizes[0]
    write_only = record.name.endswith(("_foreach_zero_", "_foreach_copy_"))
    return sum(sizes[write_only:]) + written


@_listed
def unscale(record: Record, times: int = 2) -> int:
    """_amp_foreach_non_finite_check_and_unscale_(gradients, …): read and written."""
    return times * _elements(record, 0)


@_listed
def fused_optimizer(
    record: Record, read: Sequence[int], written: Sequence[int], optional: int | None = None
) -> int:
    """_fused_adamw_(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, …) and its like."""
    total = sum(_elements(record, i) for i in (*read, *written))
    # AMSGrad's maxima, SGD's momentum: an empty list when unused.
    if optional is not None and optional < len(record.dims) and record.dims[optional]:
        total += 2 * _elements(record, optional)
    return total


def cat(record: Record) -> Work:
    """(tensors, dim): everything read and written once; out= tells the type."""
    if record.has(2):
        return like(record, read=(2,), write=(2,), dtype_of=2)
    return unscale(record)


def all_gather_copy_in(record: Record) -> Work:
    """fsdp::all_gather_copy_in(inputs, output, …): the shards go into their part of the output."""
    work = unscale(record)
    count = work.unsized_element_count
    if count is None or not record.has(1):
        return work
    sized = replace(work, unsized_element_count=None, dtype=record.dtype(1), reason=None)
    return with_bytes(sized, lambda: count * record.itemsize(1))


def chunk_cat(record: Record) -> Work:
    """fsdp::chunk_cat(tensors, dim, num_chunks, out): pads into out; may also widen."""
    if not record.has(3):
        return unscale(record)
    work = unscale(record, times=1)
    return replace(with_bytes(work, lambda: record.nbytes(3)), reason=work.reason)


@moves
def triton(record: Record) -> int:
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
