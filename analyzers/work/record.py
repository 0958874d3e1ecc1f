"""A recorded operator, decoded from a trace, and the result of modelling it.

Kineto stores three parallel lists per operator (``record_shapes=True``): ``Input Dims``,
``Input type`` and, since PyTorch 2.1, ``Concrete Inputs``. Position i is the i-th argument of
the operator's schema. A tensor has a dtype name ("float", "c10::BFloat16"), a list of tensors
"TensorList" (its dims are nested and its element types are *not* recorded), a number or bool
"Scalar" with its value as text in the concrete inputs, an absent optional "".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from importlib.resources import files
from math import prod
from typing import Any

import msgspec

from chopper.errors import JSON_ERRORS

Shape = tuple[int, ...]


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Operators of one model with the same positions of arguments."""

    family: str
    model: str
    arguments: dict[str, Any] = msgspec.field(name="with")
    operators: tuple[str, ...]


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Types by their C++ name: peak key, bytes per element and c10::ScalarType; operators.

    Which integer name means 64 bits depends on the compiler. A 4-bit type holds two values per
    element: its last dimension is half of the logical one.
    """

    schema: str
    types: dict[str, tuple[str, int, int | None]]
    operators: tuple[_Row, ...]


OPERATORS = msgspec.json.decode(
    files("chopper").joinpath("data", "operators.json").read_bytes(), type=_Table
)
_DTYPES = OPERATORS.types
_SCALAR_BYTES = {entry[2]: entry[1] for entry in _DTYPES.values()}
LIST_TYPES = frozenset({"TensorList", "GenericList", "OptionalTensorList"})


_TRUTHS = {"True": True, "False": False}


class Unknown(Exception):
    """The record is incomplete; the text names the missing value. Never leaves the package."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one operator, from its recorded shapes and types.

    ``flop_count`` follows ``torch.utils.flop_counter``: a multiply-add is 2, bias, softmax and
    element-wise arithmetic are not counted, attention is dense, and so is each group of a grouped
    convolution's weight gradient (where that counter overcounts by the number of groups).
    ``useful_flop_count`` is what the mathematics needs: causal and windowed attention count only
    the query-key pairs that the mask keeps (L(L+1)/2 of L² for a causal square), grouped
    convolutions only their own group. **Ideal times rest on ``useful_flop_count``**; the two are
    equal everywhere else.

    ``bytes_count`` is the least traffic with device memory: each input read once, each result
    written once, nothing that could stay in registers or caches. Row statistics that
    normalisation layers also store are left out (< 1 %).

    ``unsized_element_count`` counts elements of tensor lists whose type a trace does not record
    (``_foreach_*``, fused optimizers, ``cat``), reads plus writes: a caller that knows the
    parameters' width w gets the traffic as ``(bytes_count or 0) + w * unsized_element_count``.

    ``dtype`` is the key of the device peak that applies ("fp64", "fp32", "fp16", "bf16", "fp8",
    "int8", "fp4"; fp32 may run as TF32: see `matmul_dtype`), or another type's name, for which
    no device has a peak. ``causal`` is None for operators that have no such notion or whose
    record lacks it. ``reason`` says why something is None.
    """

    family: str
    flop_count: int | None = None
    useful_flop_count: int | None = None
    bytes_count: int | None = None
    dtype: str | None = None
    causal: bool | None = None
    unsized_element_count: int | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One operator's recorded arguments, by position in its schema."""

    name: str
    dims: Sequence[Any]
    types: Sequence[Any]
    concrete: Sequence[Any]
    output_dims: Shape | None = None
    element_bytes: int | None = None

    def __len__(self) -> int:
        return max(len(self.dims), len(self.types), len(self.concrete))

    def type_name(self, index: int) -> str:
        """The recorded type of argument `index`, "" when absent or not recorded."""
        value = self.types[index] if index < len(self.types) else ""
        return value if isinstance(value, str) else ""

    def has(self, index: int) -> bool:
        """True when argument `index` is a tensor."""
        if self.types:
            return self.type_name(index).lower() in _DTYPES
        # 2021's traces may lack types: there a scalar and a 0-d tensor look alike.
        return index < len(self.dims) and _is_shape(self.dims[index]) and self.dims[index] != []

    def shape(self, index: int) -> Shape:
        """The sizes of tensor argument `index`; raises Unknown when it is not one."""
        if not self.has(index) or index >= len(self.dims):
            raise Unknown(f"argument {index} is not a tensor of recorded shape and type")
        value = self.dims[index]
        return _usable(value, f"argument {index}")

    def shapes(self, index: int) -> list[Shape]:
        """The sizes of the tensors in list argument `index`."""
        value = self.dims[index] if index < len(self.dims) else None
        if self.type_name(index) not in LIST_TYPES or not isinstance(value, list) or not value:
            raise Unknown(f"the shapes of list argument {index} were not recorded")
        return [_usable(item, f"list argument {index}") for item in value]

    def numel(self, index: int) -> int:
        """Elements of tensor argument `index`."""
        return prod(self.shape(index))

    def dtype(self, index: int) -> str | None:
        """Peak key of the tensor's type; None when the trace has no type for it."""
        entry = _DTYPES.get(self.type_name(index).lower())
        return entry[0] if entry else None

    def itemsize(self, index: int) -> int:
        """Bytes per element of tensor argument `index`."""
        entry = _DTYPES.get(self.type_name(index).lower())
        if entry is not None:
            return entry[1]
        if self.types or self.element_bytes is None:
            raise Unknown("element types were not recorded")
        return self.element_bytes

    def nbytes(self, index: int) -> int:
        """Bytes of tensor argument `index`, 0 when it is an absent optional."""
        return self.numel(index) * self.itemsize(index) if self.has(index) else 0

    def text(self, index: int) -> str:
        """The recorded value of a non-tensor argument, "" when there is none."""
        value = self.concrete[index] if index < len(self.concrete) else ""
        return value if isinstance(value, str) else ""

    def integer(self, index: int) -> int | None:
        """The recorded integer value of argument `index`, None when not recorded."""
        return _integer(self.text(index))

    def integers(self, index: int) -> list[int] | None:
        """The recorded list of integers of argument `index`, None when not recorded."""
        return _integers(self.text(index))

    def sizes(self, index: int, rank: int, default: Shape | None = None) -> Shape:
        """A kernel, stride, padding or dilation: one value may apply to all dimensions.

        `default` is what an empty list means.
        """
        values = self.integers(index)
        if values is None:
            raise Unknown("stride, padding and dilation were not recorded")
        if not values and default is not None:
            return default
        if len(values) == 1:
            values = values * rank
        if len(values) != rank or min(values, default=0) < 0:
            raise Unknown(f"argument {index} is not {rank} sizes: {values}")
        return tuple(values)

    def boolean(self, index: int) -> bool | None:
        """The recorded truth value of argument `index`, None when not recorded."""
        return _TRUTHS.get(self.text(index))

    def booleans(self, index: int) -> list[bool] | None:
        """The recorded list of truth values (an output mask), None when not recorded."""
        text = self.text(index)
        if not (text.startswith("[") and text.endswith("]")):
            return None
        values = [_TRUTHS.get(item.strip()) for item in text[1:-1].split(",")]
        return None if None in values else [bool(value) for value in values]

    def boolean_positions(self) -> list[int]:
        """Positions of all recorded truth values, in order.

        Schemas grow arguments between versions; the order of their booleans has stayed.
        """
        return [i for i in range(len(self.concrete)) if self.boolean(i) is not None]

    def scalar_type_bytes(self, index: int, default: int) -> int:
        """Bytes per element of a `dtype` argument; `default` when it is None."""
        if not self.concrete:
            raise Unknown("the result's type was not recorded")
        code = self.integer(index)
        if code is None:
            return default
        if code not in _SCALAR_BYTES:
            raise Unknown(f"the result's type {code} is not known")
        return _SCALAR_BYTES[code]


def _usable(value: Any, what: str) -> Shape:
    if not _is_shape(value):
        raise Unknown(f"{what} has no usable shape")
    if prod(value) >= 1 << 63:
        raise Unknown(f"{what} is larger than any memory")
    return tuple(value)


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _integer(text: str) -> int | None:
    body = text[1:] if text[:1] == "-" else text
    return int(text) if body.isascii() and body.isdigit() and len(body) <= 19 else None


def _integers(text: str) -> list[int] | None:
    if not (text.startswith("[") and text.endswith("]")):
        return None
    if not text[1:-1].strip():
        return []
    values = [_integer(item.strip()) for item in text[1:-1].split(",")]
    return None if None in values else [value for value in values if value is not None]


def decode(
    name: str,
    input_dims: str | None,
    input_types: str | None,
    concrete_inputs: str | None,
    output_dims: Shape | None,
    element_bytes: int | None = None,
) -> Record:
    """Decode the three JSON texts; raises Unknown when the shapes are absent or malformed."""
    if input_dims is None:
        raise Unknown("shapes were not recorded")
    texts = {"Input Dims": input_dims, "Input type": input_types}
    lists: list[list[Any]] = []
    for field, text in {**texts, "Concrete Inputs": concrete_inputs}.items():
        try:
            value = [] if text is None else msgspec.json.decode(text)
        except JSON_ERRORS as exc:
            raise Unknown(f"{field} is not valid JSON") from exc
        if not isinstance(value, list):
            raise Unknown(f"{field} is not a list")
        lists.append(value)
    return Record(name, lists[0], lists[1], lists[2], output_dims, element_bytes)


def moves(traffic: Callable[..., int]) -> Callable[..., Work]:
    """Make the model of a memory-bound operator from a function that returns its bytes.

    `dtype_of` is the argument whose type is the operator's.
    """

    @wraps(traffic)
    def vector(record: Record, *, dtype_of: int = 0, **positions: Any) -> Work:
        return with_bytes(
            Work("vector", dtype=record.dtype(dtype_of)), lambda: traffic(record, **positions)
        )

    return vector


def with_bytes(work: Work, traffic: Callable[[], int]) -> Work:
    """`work` with its traffic, or with the reason why that is not known."""
    reason = None if work.reason is not None and work.reason.startswith("bytes: ") else work.reason
    try:
        return replace(work, bytes_count=traffic(), reason=reason)
    except Unknown as exc:
        return replace(work, reason=f"bytes: {exc}")


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """Return the common shape under NumPy's broadcasting; raises Unknown when there is none."""
    rank = max((len(shape) for shape in shapes), default=0)
    result = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, start=rank - len(shape)):
            if size != 1 and result[axis] not in (1, size):
                raise Unknown(f"shapes do not broadcast: {list(shapes)}")
            result[axis] = size if size != 1 else result[axis]
    return tuple(result)
