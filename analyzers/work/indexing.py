"""Traffic of operators that pick elements by index: gathers, scatters, sorting, embeddings.

What an index picks is data: the rows taken bound what is read, the table bounds it too. Where the
size of the result is data, only what has to be read is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from chopper.analyzers.work.record import Record, Shape, Unknown, moves

INDEX_BYTES = 8


def _dimension(record: Record, index: int, shape: Shape) -> int:
    dim = record.integer(index)
    if dim is None or not -len(shape) <= dim < len(shape):
        raise Unknown("the dimension was not recorded")
    return dim % len(shape)


def _picked_bytes(record: Record, elements: int) -> int:
    """Bytes of that many elements of the first argument: read, once at most, and written."""
    out = elements * record.itemsize(0)
    return min(out, record.nbytes(0)) + out


@moves
def embedding(record: Record) -> int:
    """(weight, indices, …): one row per index, read from the table and written.

    A row that many indices share may be read once: the table's size bounds what is read.
    """
    rows = record.numel(1) * prod(record.shape(0)[1:])
    return record.nbytes(1) + _picked_bytes(record, rows)


@moves
def index_select(record: Record) -> int:
    """(self, dim, index): a row of self per index."""
    shape = record.shape(0)
    dim = _dimension(record, 1, shape)
    taken = prod(shape[:dim]) * prod(shape[dim + 1 :])
    return record.nbytes(2) + _picked_bytes(record, taken * record.numel(2))


@moves
def gather(record: Record, index: int) -> int:
    """(self, dim, index) or (self, index, dim): a result as the index's shape."""
    return record.nbytes(index) + _picked_bytes(record, record.numel(index))


def _written_bytes(record: Record, places: int, *, reads_target: bool) -> int:
    """Bytes of a result that is self, changed in places, or a copy of self first."""
    if not record.name.endswith("_"):
        return 2 * record.nbytes(0)
    return min(places, record.nbytes(0)) * (2 if reads_target else 1)


@moves
def scatter(record: Record, *, reads_target: bool) -> int:
    """(self, dim, index, source or value): as many elements as there are indices.

    `reads_target`: adding to what is there. A result that is not self is a copy of self first.
    """
    places = record.numel(2) * record.itemsize(0)
    written = _written_bytes(record, places, reads_target=reads_target)
    return record.nbytes(2) + record.nbytes(3) + written


@moves
def index_rows(record: Record, *, reads_target: bool) -> int:
    """index_add_(self, dim, index, source), index_copy_, index_fill_(self, dim, index, value)."""
    if record.has(3) and record.shape(3):
        rows = read = record.nbytes(3)
    else:
        shape = record.shape(0)
        row = record.nbytes(0) // max(1, shape[_dimension(record, 1, shape)])
        rows, read = row * record.numel(2), 0
    return read + record.nbytes(2) + _written_bytes(record, rows, reads_target=reads_target)


@moves
def index_put(record: Record) -> int:
    """index_put_(self, indices, values, accumulate): the values go to as many places.

    The indices are a list of optional tensors, of which a trace records nothing.
    """
    if record.numel(2) <= 1:
        raise Unknown("which elements are written was not recorded")
    values = record.nbytes(2)
    if not record.name.endswith("_"):
        return values + 2 * record.nbytes(0)
    return values * (3 if record.boolean(3) else 2)


@moves
def index(record: Record) -> int:
    """(self, indices): the indices are a list of optional tensors; recorded in some traces."""
    try:
        indices = record.shapes(1)
    except Unknown as exc:
        raise Unknown("which elements are taken was not recorded") from exc
    if len(indices) != 1 or not record.shape(0):
        raise Unknown("which elements are taken was not recorded")
    count = prod(indices[0])
    return count * INDEX_BYTES + _picked_bytes(record, count * prod(record.shape(0)[1:]))


@moves
def topk(record: Record) -> int:
    """(self, k, dim, …) or (self, …): values and their places."""
    shape, count = record.shape(0), record.numel(0)
    if record.name == "aten::topk":
        k = record.integer(1)
        if k is None or k < 0 or not shape:
            raise Unknown("how many are kept was not recorded")
        count = count // max(1, shape[_dimension(record, 2, shape)]) * k
    values = 0 if record.name == "aten::argsort" else count * record.itemsize(0)
    return record.nbytes(0) + values + count * INDEX_BYTES


@moves
def inputs_only(record: Record, inputs: Sequence[int]) -> int:
    """The result's size is data: only the inputs are counted."""
    record.shape(inputs[0])
    return sum(record.nbytes(i) for i in inputs)


@moves
def search(record: Record, values: int, edges: int) -> int:
    """bucketize(values, edges, out_int32), searchsorted(edges, values, out_int32)."""
    width = 4 if record.boolean(2) else INDEX_BYTES
    return record.nbytes(values) + record.nbytes(edges) + record.numel(values) * width


@moves
def embedding_bag(record: Record) -> int:
    """Bags: (weight, indices, offsets, …, include_last_offset, …) to one row per bag."""
    table, bags = record.shape(0), record.numel(2)
    bags -= record.boolean(7) is True
    row = prod(table[1:]) * record.itemsize(0)
    indices = record.nbytes(1) + record.nbytes(2) + record.nbytes(6)
    return indices + min(record.numel(1) * row, record.nbytes(0)) + max(0, bags) * row


@moves
def embedding_backward(
    record: Record, rows: int, offsets: bool = False, sparse: int | None = None
) -> int:
    """Gradients of an embedding's or of bags' table: (grad, indices, …, num_weights, …).

    `offsets`: argument 2 is read, too. `sparse` is the position of the flag for a gradient of as
    many rows as there are indices.
    """
    count, grad = record.integer(rows), record.shape(0)
    by_index = False if sparse is None else record.boolean(sparse)
    if count is None or count < 0 or by_index is None or not grad:
        raise Unknown("the number of embeddings was not recorded")
    written = record.numel(1) if by_index else count
    read = record.nbytes(0) + record.nbytes(1) + (record.nbytes(2) if offsets else 0)
    return read + written * grad[-1] * record.itemsize(0)


@moves
def lookup(record: Record, weights: int, widths: int, indices: int) -> int:
    """FBGEMM's lookup in many tables: a row per index, read once at most per table, and the sums.

    The widths of the tables are data: known where their sum says that all are the widest one's.
    Tables outside of the device's memory bound nothing. `weights` and `widths` are the tables and
    the offsets of their columns; after those come the sum of the widths and the largest one. After
    `indices` come the offsets of the bags, and the pooling mode (2: none).
    """
    tables = record.numel(widths) - 1
    total, widest = record.integer(widths + 1), record.integer(widths + 2)
    if total is None or widest is None:
        raise Unknown("the tables' row widths are not recorded")
    if tables < 1 or total != tables * widest:
        raise Unknown("the tables' rows differ in width")
    picked = record.numel(indices)
    row = widest * record.itemsize(weights)
    bags = record.numel(indices + 1) - 1
    written = picked if record.integer(indices + 2) == 2 else bags
    read = min(picked * row, record.nbytes(weights) or picked * row)
    return record.nbytes(indices) + record.nbytes(indices + 1) + read + written * row
