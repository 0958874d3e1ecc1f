"""Scaled-dot-product attention in all its kernels, dense and variable-length, masked, grouped.

Forward: two products, 2·pairs·(d_qk + d_v) FLOP per query head. Backward: five, since the scores
are computed again: 2·pairs·(3·d_qk + 2·d_v). Softmax is not counted. `pairs` is L_q·L_k when dense
(`flop_count`, as torch.utils.flop_counter has it) and the pairs that the mask keeps for
`useful_flop_count`. Grouped-query attention costs what its query heads cost.

Llama 3 8B, batch 2, sequence 4096, causal, forward: 2·(2·32)·(4096·4097/2)·256 = 2.75e11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from chopper.analyzers.work.record import Record, Shape, Unknown, Work, with_bytes


def kept_pairs(
    queries: int, keys: int, *, left: int | None, right: int | None, offset: int = 0
) -> int:
    """Query-key pairs that a sliding-window mask keeps.

    Query i sees the keys from i + offset - left to i + offset + right (None: no limit on that
    side). Causal is right = 0; offset = keys - queries aligns the last query with the last key.
    """
    ends = queries * keys if right is None else _clipped_sum(offset + right + 1, queries, keys)
    starts = 0 if left is None else _clipped_sum(offset - left, queries, keys)
    return max(0, ends - starts)


def _clipped_sum(first: int, count: int, limit: int) -> int:
    """The sum over i < count of first + i, each clipped to [0, limit]."""
    low = min(count, max(0, -first))  # terms at or below 0
    high = min(count, max(low, limit - first))  # from here on all are `limit`
    ramp = high - low
    return ramp * first + (low + high - 1) * ramp // 2 + (count - high) * limit


@dataclass(frozen=True, slots=True)
class _Sequences:
    """`count` sequences, each of `queries` queries and `keys` keys."""

    count: int
    queries: int
    keys: int


@dataclass(frozen=True, slots=True)
class Attention:
    """Positions of an attention operator's arguments.

    `causal_flag` is the ordinal of the causal flag among the operator's recorded booleans (see
    `Record.boolean_positions`); `mask_type` is the position of an integer 0 (none), 1 (causal
    from the top left), 2 (from the bottom right) instead. `layout` names the dimensions of
    query, key and value. `of_forward`: a backward pass, described by its forward's arguments.
    """

    layout: Literal["bhld", "blhd"]
    causal_flag: int | None = 0
    mask_type: int | None = None
    bottom_right: bool = False
    q: int = 0
    grad: int | None = None
    bias: int | None = None
    saved: Sequence[int] = ()
    lse: bool = False
    lse_flag: int | None = None
    window_after_flag: bool = False
    window: Sequence[int] | None = None
    cu_q: int | None = None
    cu_k: int | None = None
    max_q: int | None = None
    paged: bool = False
    of_forward: bool = False

    def __call__(self, record: Record) -> Work:
        """The work of one call."""
        query, key, value = (record.shape(self.q + i) for i in range(3))
        causal, bottom_right = self._causal(record)
        heads, d_qk, d_v = self._heads(query, key, value), query[-1], value[-1]
        sequences = self._sequences(record, query, key, causal)
        if sequences.count and value[:-1] != key[:-1]:
            raise Unknown(f"key {list(key)} and value {list(value)} differ")
        backward = self.grad is not None or self.of_forward
        per_pair = 2 * (3 * d_qk + 2 * d_v) if backward else 2 * (d_qk + d_v)
        dense = sequences.queries * sequences.keys
        left, right = self._window(record)
        right = 0 if causal else right
        offset = sequences.keys - sequences.queries if bottom_right else 0
        pairs = kept_pairs(sequences.queries, sequences.keys, left=left, right=right, offset=offset)
        work = Work(
            "sdpa",
            flop_count=sequences.count * heads * dense * per_pair,
            useful_flop_count=sequences.count * heads * pairs * per_pair,
            dtype=record.dtype(self.q),
            causal=causal,
            reason=None if causal is not None else "whether the mask is causal was not recorded",
        )
        return with_bytes(work, lambda: self._traffic(record, sequences, heads, key, value))

    def _causal(self, record: Record) -> tuple[bool | None, bool]:
        if self.mask_type is not None:
            kind = record.integer(self.mask_type)
            return (None if kind is None else kind != 0), kind == 2
        at = self._flag_at(record, self.causal_flag)
        return (None if at is None else record.boolean(at)), self.bottom_right

    def _flag_at(self, record: Record, ordinal: int | None) -> int | None:
        """The position of a recorded boolean by its ordinal."""
        flags = record.boolean_positions()
        return flags[ordinal] if ordinal is not None and ordinal < len(flags) else None

    def _window(self, record: Record) -> tuple[int | None, int | None]:
        positions = self.window
        at = self._flag_at(record, self.causal_flag) if self.window_after_flag else None
        if at is not None:
            positions = (at + 1, at + 2)
        if positions is None:
            return None, None
        # Negative sizes mean that there is no bound.
        sizes = (record.integer(i) for i in positions)
        left, right = (None if size is None or size < 0 else size for size in sizes)
        return left, right

    def _heads(self, query: Shape, key: Shape, value: Shape) -> int:
        """Query heads; raises when the shapes do not fit."""
        if len({len(query), len(key), len(value)}) != 1 or len(query) < 2:
            raise Unknown(f"ranks differ: {list(query)}, {list(key)}, {list(value)}")
        if query[-1] != key[-1]:
            raise Unknown(f"head sizes differ: {list(query)}, {list(key)}")
        axis = -2 if self.layout == "blhd" or self.cu_q is not None else -3
        if len(query) < -axis:
            return 1
        if key[axis] == 0 or query[axis] % key[axis]:
            raise Unknown(f"{query[axis]} query heads do not share {key[axis]} key heads")
        return query[axis]

    def _sequences(
        self, record: Record, query: Shape, key: Shape, causal: bool | None
    ) -> _Sequences:
        if self.cu_q is not None and (record.has(self.cu_q) or len(query) == 3):
            return self._ragged(record, query, key, causal)
        if self.layout == "blhd":
            if len(query) != 4 or query[0] != key[0]:
                raise Unknown(f"not a batch of sequences: {list(query)}, {list(key)}")
            return _Sequences(query[0], query[1], key[1])
        if prod(query[:-3]) != prod(key[:-3]):
            raise Unknown(f"batch sizes differ: {list(query)}, {list(key)}")
        return _Sequences(prod(query[:-3]), query[-2], key[-2])

    def _ragged(self, record: Record, query: Shape, key: Shape, causal: bool | None) -> _Sequences:
        """Packed sequences: lengths are data, known only when they must all be the same."""
        if self.cu_q is None or self.cu_k is None or self.max_q is None:
            raise Unknown("the sequences' lengths were not recorded")
        offsets = record.shape(self.cu_q)
        tokens = prod(query) // max(1, prod(query[-2:]))
        count = prod(offsets) - 1
        longest_q, longest_k = record.integer(self.max_q), record.integer(self.max_q + 1)
        if count < 1:
            raise Unknown("no sequences")
        if count == 1:
            queries = tokens
        elif longest_q is not None and tokens == count * longest_q:
            queries = longest_q
        else:
            raise Unknown("the sequences' lengths are data and differ")
        key_tokens = prod(key) // max(1, prod(key[-2:]))
        if self.paged:
            # The key argument is the whole cache. A causal prefill has at least as many keys as
            # queries in each sequence; with equal maxima it has exactly as many.
            if causal and longest_k is not None and longest_k == queries:
                return _Sequences(count, queries, queries)
            if count == 1 and longest_k is not None:
                return _Sequences(1, queries, longest_k)
            raise Unknown("the lengths of the cached sequences are data")
        if count == 1:
            return _Sequences(1, queries, key_tokens)
        if longest_k is not None and key_tokens == count * longest_k:
            return _Sequences(count, queries, longest_k)
        raise Unknown("the sequences' lengths are data and differ")

    def _traffic(
        self,
        record: Record,
        sequences: _Sequences,
        heads: int,
        key: Shape,
        value: Shape,
    ) -> int:
        width = record.itemsize(self.q)
        used = sequences.count * sequences.keys
        kv_heads = key[-2] if self.layout == "blhd" or self.cu_q is not None else prod(key[-3:-2])
        keys = used * kv_heads * key[-1] * record.itemsize(self.q + 1)
        values = used * kv_heads * value[-1] * record.itemsize(self.q + 2)
        rows = sequences.count * heads * sequences.queries
        bias = 0 if self.bias is None else record.nbytes(self.bias)
        read = record.nbytes(self.q) + keys + values + bias
        if self.of_forward:
            # Also the result, its gradient and the row sums; written: three gradients.
            return 2 * read + 2 * rows * value[-1] * width + rows * 4
        if self.grad is None:
            at = self._flag_at(record, self.lse_flag)
            wants_lse = self.lse or (at is not None and record.boolean(at) is True)
            return read + rows * value[-1] * width + (rows * 4 if wants_lse else 0)
        saved = record.nbytes(self.grad) + sum(record.nbytes(i) for i in self.saved)
        return read + saved + record.nbytes(self.q) + keys + values


def unrecorded(record: Record, family: str, reason: str) -> Work:
    """An operator that is known, of a work that its record cannot tell."""
    return Work(family, dtype=record.dtype(0), reason=reason)


def attention(record: Record, *, data_at: Sequence[int] = (), **positions: Any) -> Work:
    """2·pairs·(d_qk + d_v) forward, 2·pairs·(3·d_qk + 2·d_v) backward per query head; pairs that
    the mask keeps.

    `data_at` are arguments with which the sequences' lengths are data; else as :class:`Attention`.
    """
    if any(record.has(index) for index in data_at):
        raise Unknown("the sequences' lengths are data")
    return Attention(**positions)(record)
