"""Traffic of operators that pick elements by index: gathers, scatters, sorting, embeddings.

What an index picks is data: the rows taken bound what is read, the table bounds it too. Where the
size of the result is data, only what has to be read is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from chopper.analyzers.work.record import Record, Shape, Unknown, Work, documented
from chopper.analyzers.work.vector import Like, Model, Moves, moves, vector_work

_INDEX_BYTES = 8


def _dimension(record: Record, index: int, shape: Shape) -> int:
    dim = record.integer(index)
    if dim is None or not -len(shape) <= dim < len(shape):
        raise Unknown("the dimension was not recorded")
    return dim % len(shape)


@moves()
def _embedding(record: Record) -> int:
    """embedding(weight, indices, …): one row per index, read from the table and written.

    A row that many indices share may be read once: the table's size bounds what is read.
    """
    rows = record.numel(1) * prod(record.shape(0)[1:]) * record.itemsize(0)
    return record.nbytes(1) + min(rows, record.nbytes(0)) + rows


@moves()
def _embedding_backward(record: Record) -> int:
    """embedding_dense_backward(grad_output, indices, num_weights, …): a table of gradients."""
    rows, grad = record.integer(2), record.shape(0)
    if rows is None or rows < 0 or not grad:
        raise Unknown("the number of embeddings was not recorded")
    return record.nbytes(0) + record.nbytes(1) + rows * grad[-1] * record.itemsize(0)


@moves()
def _index_select(record: Record) -> int:
    """index_select(self, dim, index)."""
    shape = record.shape(0)
    dim = _dimension(record, 1, shape)
    taken = prod(shape[:dim]) * prod(shape[dim + 1 :])
    out = taken * record.numel(2) * record.itemsize(0)
    return record.nbytes(2) + min(out, record.nbytes(0)) + out


@dataclass(frozen=True, slots=True)
class _Gather(Moves):
    """gather(self, dim, index), take_along_dim(self, index, dim): a result as the index's shape."""

    index: int

    def traffic(self, record: Record) -> int:
        """Return bytes read and written."""
        out = record.numel(self.index) * record.itemsize(0)
        return record.nbytes(self.index) + min(out, record.nbytes(0)) + out


@dataclass(frozen=True, slots=True)
class _Scatter(Moves):
    """scatter(self, dim, index, source or value): as many elements as there are indices.

    `reads_target`: adding to what is there. A result that is not self is a copy of self first.
    """

    index: int
    source: int
    reads_target: bool

    def traffic(self, record: Record) -> int:
        """Return bytes read and written."""
        places = min(record.numel(self.index) * record.itemsize(0), record.nbytes(0))
        read = record.nbytes(self.index) + record.nbytes(self.source)
        if not record.name.endswith("_"):
            return read + 2 * record.nbytes(0)
        return read + places + (places if self.reads_target else 0)


@dataclass(frozen=True, slots=True)
class _IndexRows(Moves):
    """index_add_(self, dim, index, source), index_copy_, index_fill_(self, dim, index, value)."""

    reads_target: bool

    def traffic(self, record: Record) -> int:
        """Return bytes read and written."""
        if record.has(3) and record.shape(3):
            rows, read = record.nbytes(3), record.nbytes(3)
        else:
            shape = record.shape(0)
            row = record.nbytes(0) // max(1, shape[_dimension(record, 1, shape)])
            rows, read = row * record.numel(2), 0
        places = min(rows, record.nbytes(0))
        read += record.nbytes(2)
        if not record.name.endswith("_"):
            return read + 2 * record.nbytes(0)
        return read + places + (places if self.reads_target else 0)


@moves()
def _index_put(record: Record) -> int:
    """index_put_(self, indices, values, accumulate): the values go to as many places.

    The indices are a list of optional tensors, of which a trace records nothing.
    """
    if record.numel(2) <= 1:
        raise Unknown("which elements are written was not recorded")
    values = record.nbytes(2)
    if not record.name.endswith("_"):
        return values + 2 * record.nbytes(0)
    return values * (3 if record.boolean(3) else 2)


@moves()
def _index(record: Record) -> int:
    """index(self, indices): the indices are a list of optional tensors; recorded in some traces."""
    try:
        indices = record.shapes(1)
    except Unknown as exc:
        raise Unknown("which elements are taken was not recorded") from exc
    if len(indices) != 1 or not record.shape(0):
        raise Unknown("which elements are taken was not recorded")
    count = prod(indices[0])
    out = count * prod(record.shape(0)[1:]) * record.itemsize(0)
    return count * _INDEX_BYTES + min(out, record.nbytes(0)) + out


@moves()
def _topk(record: Record) -> int:
    """topk(self, k, dim, …), sort(self, …): values and their places."""
    shape, kept = record.shape(0), record.numel(0)
    if record.name == "aten::topk":
        k = record.integer(1)
        if k is None or k < 0 or not shape:
            raise Unknown("how many are kept was not recorded")
        kept = kept // max(1, shape[_dimension(record, 2, shape)]) * k
    values = 0 if record.name == "aten::argsort" else kept * record.itemsize(0)
    return record.nbytes(0) + values + kept * _INDEX_BYTES


@documented
def _inputs_only(*inputs: int) -> Model:
    """The result's size is data: only the inputs are counted."""

    def model(record: Record) -> Work:
        def traffic() -> int:
            record.shape(inputs[0])
            return sum(record.nbytes(i) for i in inputs)

        return vector_work(record, traffic)

    return model


@documented
def _search(values: int, edges: int) -> Model:
    """bucketize(values, edges, out_int32), searchsorted(edges, values, out_int32)."""

    def model(record: Record) -> Work:
        def traffic() -> int:
            width = 4 if record.boolean(2) else _INDEX_BYTES
            return record.nbytes(values) + record.nbytes(edges) + record.numel(values) * width

        return vector_work(record, traffic, dtype_of=values)

    return model


@moves()
def _embedding_bag(record: Record) -> int:
    """Bags: (weight, indices, offsets, …, include_last_offset, …) to one row per bag."""
    table, bags = record.shape(0), record.numel(2)
    bags -= record.boolean(7) is True
    rows = record.numel(1) * prod(table[1:]) * record.itemsize(0)
    out = max(0, bags) * prod(table[1:]) * record.itemsize(0)
    indices = record.nbytes(1) + record.nbytes(2) + record.nbytes(6)
    return indices + min(rows, record.nbytes(0)) + out


@moves()
def _embedding_bag_backward(record: Record) -> int:
    """_embedding_bag_dense_backward(grad, indices, offset2bag, …, num_weights, …)."""
    rows, grad = record.integer(5), record.shape(0)
    if rows is None or rows < 0 or not grad:
        raise Unknown("the number of embeddings was not recorded")
    read = record.nbytes(0) + record.nbytes(1) + record.nbytes(2)
    return read + rows * grad[-1] * record.itemsize(0)


@moves()
def _embedding_bag_any_backward(record: Record) -> int:
    """_embedding_bag_backward(grad, indices, offsets, offset2bag, …, num_weights, …), dense or
    sparse.
    """
    rows, sparse, grad = record.integer(6), record.boolean(9), record.shape(0)
    if rows is None or rows < 0 or sparse is None or not grad:
        raise Unknown("the number of embeddings was not recorded")
    written = record.numel(1) if sparse else rows
    read = record.nbytes(0) + record.nbytes(1) + record.nbytes(2)
    return read + written * grad[-1] * record.itemsize(0)


@dataclass(frozen=True, slots=True)
class _Lookup(Moves):
    """FBGEMM's lookup in many tables: a row per index, read once at most per table, and the sums.

    The widths of the tables are data: known where their sum says that all are the widest one's.
    Tables outside of the device's memory bound nothing.

    Attributes:
        weights, widths: the tables and the offsets of their columns; after those come the sum of
            the widths and the largest one.
        indices: after them the offsets of the bags, and the pooling mode (2: none).
    """

    weights: int
    widths: int
    indices: int

    def traffic(self, record: Record) -> int:
        """Return bytes read and written."""
        tables, total, widest = (
            record.numel(self.widths) - 1,
            record.integer(self.widths + 1),
            record.integer(self.widths + 2),
        )
        if total is None or widest is None:
            raise Unknown("the tables' row widths are not recorded")
        if tables < 1 or total != tables * widest:
            raise Unknown("the tables' rows differ in width")
        picked = record.numel(self.indices)
        row = widest * record.itemsize(self.weights)
        bags = record.numel(self.indices + 1) - 1
        written = picked if record.integer(self.indices + 2) == 2 else bags
        read = min(picked * row, record.nbytes(self.weights) or picked * row)
        return record.nbytes(self.indices) + record.nbytes(self.indices + 1) + read + written * row


_OPTIMIZERS = (
    *("adagrad", "approx_sgd", "sgd", "adam", "partial_rowwise_adam", "lamb", "lars_sgd", "none"),
    *("partial_rowwise_lamb", "rowwise_adagrad", "approx_rowwise_adagrad"),
    *(
        "rowwise_adagrad_with_counter",
        "rowwise_weighted_adagrad",
        "rowwise_adagrad_with_weight_decay",
    ),
)
_SCATTER = {"scatter": False, "scatter_add": True, "scatter_reduce": True}
_ROWS = {"index_add": True, "index_copy": False, "index_fill": False, "index_reduce": True}

MODELS: dict[str, Model] = {
    "aten::embedding": _embedding,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::_embedding_bag": _embedding_bag,
    "aten::_embedding_bag_forward_only": _embedding_bag,
    "aten::_embedding_bag_dense_backward": _embedding_bag_backward,
    "aten::_embedding_bag_backward": _embedding_bag_any_backward,
    "aten::index": _index,
    "aten::index_select": _index_select,
    "aten::gather": _Gather(2),
    "aten::take_along_dim": _Gather(1),
    "aten::take": _Gather(1),
    **{f"aten::{n}{s}": _Scatter(2, 3, r) for n, r in _SCATTER.items() for s in ("", "_")},
    **{f"aten::{n}{s}": _IndexRows(r) for n, r in _ROWS.items() for s in ("", "_")},
    "aten::index_put": _index_put,
    "aten::index_put_": _index_put,
    "aten::_index_put_impl_": _index_put,
    "aten::masked_scatter_": _inputs_only(0, 1),
    "aten::masked_select": _inputs_only(0, 1),
    "aten::nonzero": _inputs_only(0),
    "aten::unique_dim": _inputs_only(0),
    "aten::_unique": _inputs_only(0),
    "aten::_unique2": _inputs_only(0),
    "aten::unique_consecutive": _inputs_only(0),
    "aten::bincount": _inputs_only(0),
    "aten::histc": _inputs_only(0),
    "aten::multinomial": _inputs_only(0),
    "aten::topk": _topk,
    "aten::sort": _topk,
    "aten::argsort": _topk,
    "aten::kthvalue": _inputs_only(0),
    "aten::median": _inputs_only(0),
    "aten::mode": _inputs_only(0),
    "aten::cummax": _topk,
    "aten::cummin": _topk,
    "aten::bucketize": _search(0, 1),
    "aten::searchsorted": _search(1, 0),
    # FBGEMM, for recommendation models.
    "fbgemm::permute_2D_sparse_data": Like((1, 0, 2, 3), (1, 2, 3)),
    "fbgemm::permute_1D_sparse_data": Like((1, 0, 2, 3), (1, 2, 3)),
    "fbgemm::permute_sparse_features": Like((1, 0, 2, 3), (1, 2, 3)),
    "fbgemm::permute_pooled_embs": Like((0,), (0,)),
    "fbgemm::permute_pooled_embs_auto_grad": Like((0,), (0,)),
    "fbgemm::asynchronous_complete_cumsum": Like((0,), (0,)),
    "fbgemm::asynchronous_exclusive_cumsum": Like((0,), (0,)),
    "fbgemm::bounds_check_indices": _inputs_only(1, 2),
    "fbgemm::dense_embedding_codegen_lookup_function": _Lookup(0, 2, 7),
    **{
        f"fbgemm::split_embedding_codegen_lookup_{name}_function": _Lookup(1, 6, 11)
        for name in _OPTIMIZERS
    },
}
