"""Scaled-dot-product attention in all its kernels, dense and variable-length, masked, grouped.

Forward: two products, 2·pairs·(d_qk + d_v) FLOP per query head. Backward: five, since the scores
are computed again: 2·pairs·(3·d_qk + 2·d_v). Softmax is not counted. `pairs` is L_q·L_k when dense
(`flop_count`, as torch.utils.flop_counter has it) and the pairs that the mask keeps for
`useful_flop_count`. Grouped-query attention costs what its query heads cost.

Llama 3 8B, batch 2, sequence 4096, causal, forward: 2·(2·32)·(4096·4097/2)·256 = 2.75e11.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Literal

from chopper.analyzers.work.record import Record, Shape, Unknown, Work, documented, with_bytes

Model = Callable[[Record], Work]


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


def _counted(size: int | None) -> int | None:
    """A size of a window; negative ones mean that there is no bound."""
    return None if size is None or size < 0 else size


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
    saved: tuple[int, ...] = ()
    lse: bool = False
    lse_flag: int | None = None
    window_after_flag: bool = False
    window: tuple[int, int] | None = None
    cu_q: int | None = None
    cu_k: int | None = None
    max_q: int | None = None
    paged: bool = False
    of_forward: bool = False

    def __call__(self, record: Record) -> Work:
        """The work of one call."""
        query, key, value = (record.shape(self.q + i) for i in range(3))
        causal, bottom_right = self._causal(record)
        heads, dims = self._heads(query, key, value)
        sequences = self._sequences(record, query, key, causal)
        if sequences.count and value[:-1] != key[:-1]:
            raise Unknown(f"key {list(key)} and value {list(value)} differ")
        per_pair = self._per_pair(*dims)
        dense = sequences.queries * sequences.keys
        left, right = self._window(record)
        right = 0 if causal else right
        offset = sequences.keys - sequences.queries if bottom_right else 0
        kept = kept_pairs(sequences.queries, sequences.keys, left=left, right=right, offset=offset)
        work = Work(
            "sdpa",
            flop_count=sequences.count * heads * dense * per_pair,
            useful_flop_count=sequences.count * heads * kept * per_pair,
            dtype=record.dtype(self.q),
            direction="backward" if self._is_backward else "forward",
            causal=causal,
            reason=None if causal is not None else "whether the mask is causal was not recorded",
        )
        return with_bytes(work, lambda: self._traffic(record, sequences, heads, key, value))

    @property
    def _is_backward(self) -> bool:
        return self.grad is not None or self.of_forward

    def _per_pair(self, d_qk: int, d_v: int) -> int:
        return 2 * (3 * d_qk + 2 * d_v) if self._is_backward else 2 * (d_qk + d_v)

    def _causal(self, record: Record) -> tuple[bool | None, bool]:
        if self.mask_type is not None:
            kind = record.integer(self.mask_type)
            return (None if kind is None else kind != 0), kind == 2
        flags = record.boolean_positions()
        if self.causal_flag is None or self.causal_flag >= len(flags):
            return None, self.bottom_right
        return record.boolean(flags[self.causal_flag]), self.bottom_right

    def _window(self, record: Record) -> tuple[int | None, int | None]:
        positions = self.window
        if self.window_after_flag and self.causal_flag is not None:
            flags = record.boolean_positions()
            if self.causal_flag < len(flags):
                after = flags[self.causal_flag] + 1
                positions = (after, after + 1)
        if positions is None:
            return None, None
        left, right = (_counted(record.integer(i)) for i in positions)
        return left, right

    def _heads(self, query: Shape, key: Shape, value: Shape) -> tuple[int, tuple[int, int]]:
        """Query heads, and the head sizes of query and value; raises when they do not fit."""
        if len({len(query), len(key), len(value)}) != 1 or len(query) < 2:
            raise Unknown(f"ranks differ: {list(query)}, {list(key)}, {list(value)}")
        if query[-1] != key[-1]:
            raise Unknown(f"head sizes differ: {list(query)}, {list(key)}")
        axis = -2 if self.layout == "blhd" or self.cu_q is not None else -3
        if len(query) < -axis:
            return 1, (query[-1], value[-1])
        if key[axis] == 0 or query[axis] % key[axis]:
            raise Unknown(f"{query[axis]} query heads do not share {key[axis]} key heads")
        return query[axis], (query[-1], value[-1])

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
            flags = record.boolean_positions()
            wants_lse = self.lse or (
                self.lse_flag is not None
                and self.lse_flag < len(flags)
                and record.boolean(flags[self.lse_flag]) is True
            )
            return read + rows * value[-1] * width + (rows * 4 if wants_lse else 0)
        saved = record.nbytes(self.grad) + sum(record.nbytes(i) for i in self.saved)
        return read + saved + record.nbytes(self.q) + keys + values


@documented
def unrecorded(family: str, reason: str) -> Model:
    """An operator that is known, of a work that its record cannot tell."""

    def model(record: Record) -> Work:
        return Work(family, dtype=record.dtype(0), reason=reason)

    return model


def _flash(record: Record) -> Work:
    """aten::_flash_attention_forward: [B, L, H, D], or packed [T, H, D] with offsets.

    torch.utils.flop_counter reads this operator's dimensions as [B, H, L, D], a count that
    contradicts its own for the enclosing _scaled_dot_product_flash_attention, which is right.
    """
    packed = record.has(3)
    return (_FLASH_PACKED if packed else _FLASH_DENSE)(record)


def _flash_backward(record: Record) -> Work:
    """aten::_flash_attention_backward: five products, dense or packed."""
    packed = record.has(6)
    return (_FLASH_BACKWARD_PACKED if packed else _FLASH_BACKWARD_DENSE)(record)


def _efficient(record: Record) -> Work:
    """Memory-efficient attention, [B, L, H, D]; packed lengths are data."""
    if record.has(4):
        raise Unknown("the sequences' lengths are data")
    return _EFFICIENT(record)


def _efficient_backward(record: Record) -> Work:
    """Backward of memory-efficient attention."""
    if record.has(6):
        raise Unknown("the sequences' lengths are data")
    return _EFFICIENT_BACKWARD(record)


def _flash3(record: Record) -> Work:
    """FlashAttention 3's fwd(q, k, v, k_new, v_new, qv, out, cu_q, cu_k, …, page_table, …)."""
    if record.has(3) or record.has(14):
        raise Unknown("the lengths of the cached sequences are data")
    return (_FLASH3_PACKED if record.has(7) else _DAO_FORWARD)(record)


def _flash3_backward(record: Record) -> Work:
    """FlashAttention 3's bwd, dense or packed."""
    return (_FLASH3_BACKWARD_PACKED if record.has(9) else _DAO_BACKWARD)(record)


_FLASH_DENSE = Attention("blhd", bottom_right=True, lse=True, window=(11, 12))
_FLASH_PACKED = Attention(
    "blhd", bottom_right=True, lse=True, window=(11, 12), cu_q=3, cu_k=4, max_q=5
)
_FLASH_BACKWARD_DENSE = Attention(
    "blhd", bottom_right=True, q=1, grad=0, saved=(4, 5), window=(15, 16)
)
_FLASH_BACKWARD_PACKED = Attention(
    "blhd",
    bottom_right=True,
    q=1,
    grad=0,
    saved=(4, 5),
    window=(15, 16),
    cu_q=6,
    cu_k=7,
    max_q=8,
)
_EFFICIENT = Attention("blhd", causal_flag=None, mask_type=9, bias=3)
_EFFICIENT_BACKWARD = Attention(
    "blhd", causal_flag=None, mask_type=14, q=1, grad=0, bias=4, saved=(5, 10)
)
_DAO_FORWARD = Attention("blhd", bottom_right=True, lse=True, window_after_flag=True)
_DAO_BACKWARD = Attention(
    "blhd", bottom_right=True, q=1, grad=0, saved=(4, 5), window_after_flag=True
)
_DAO_VARLEN = Attention(
    "blhd", bottom_right=True, lse=True, window_after_flag=True, cu_q=3, cu_k=4, max_q=5
)
_DAO_VARLEN_BACKWARD = Attention(
    "blhd",
    bottom_right=True,
    q=1,
    grad=0,
    saved=(4, 5),
    window_after_flag=True,
    cu_q=9,
    cu_k=10,
    max_q=11,
)
_FLASH3_PACKED = Attention(
    "blhd", bottom_right=True, lse=True, window_after_flag=True, cu_q=7, cu_k=8, max_q=12
)
_FLASH3_BACKWARD_PACKED = Attention(
    "blhd",
    bottom_right=True,
    q=1,
    grad=0,
    saved=(4, 5),
    window_after_flag=True,
    cu_q=9,
    cu_k=10,
    max_q=13,
)
# aiter's packed operators have `zero_tensors` before `is_causal`.
_AITER_FORWARD = Attention("blhd", bottom_right=True, window_after_flag=True)
_AITER_VARLEN = Attention(
    "blhd",
    causal_flag=1,
    bottom_right=True,
    window_after_flag=True,
    cu_q=3,
    cu_k=4,
    max_q=5,
)
_AITER_VARLEN_BACKWARD = Attention(
    "blhd",
    causal_flag=1,
    bottom_right=True,
    q=1,
    grad=0,
    saved=(4, 5),
    window_after_flag=True,
    cu_q=6,
    cu_k=7,
    max_q=8,
)

MODELS: dict[str, Model] = {
    "aten::scaled_dot_product_attention": Attention("bhld", bias=3),
    "aten::_scaled_dot_product_attention_math": Attention("bhld", bias=3),
    "aten::_scaled_dot_product_attention_math_for_mps": Attention("bhld", bias=3),
    "aten::_scaled_dot_product_flash_attention": Attention("bhld", lse=True),
    "aten::_scaled_dot_product_flash_attention_backward": Attention(
        "bhld", q=1, grad=0, saved=(4, 5)
    ),
    "aten::_scaled_dot_product_flash_attention_for_cpu": Attention("bhld", bias=5, lse=True),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": Attention(
        "bhld", q=1, grad=0, saved=(4, 5), bias=8
    ),
    "aten::_scaled_dot_product_efficient_attention": Attention(
        "bhld", causal_flag=1, bias=3, lse_flag=0
    ),
    "aten::_scaled_dot_product_efficient_attention_backward": Attention(
        "bhld", q=1, grad=0, bias=4, saved=(5, 6)
    ),
    "aten::_scaled_dot_product_cudnn_attention": Attention(
        "bhld", causal_flag=1, bias=3, lse_flag=0
    ),
    "aten::_scaled_dot_product_cudnn_attention_backward": Attention(
        "bhld", q=1, grad=0, bias=8, saved=(4, 5)
    ),
    "aten::_scaled_dot_product_fused_attention_overrideable": Attention("bhld", bias=3, lse=True),
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": Attention(
        "bhld", q=1, grad=0, bias=4, saved=(6, 7)
    ),
    "aten::_flash_attention_forward": _flash,
    "aten::_flash_attention_backward": _flash_backward,
    "aten::_efficient_attention_forward": _efficient,
    "aten::_efficient_attention_backward": _efficient_backward,
    # flash-attn (Dao-AILab): torch custom operators since 2.7 (before: see libraries).
    "flash_attn::_flash_attn_forward": _DAO_FORWARD,
    "flash_attn::_flash_attn_backward": _DAO_BACKWARD,
    "flash_attn::_flash_attn_varlen_forward": _DAO_VARLEN,
    "flash_attn::_flash_attn_varlen_backward": _DAO_VARLEN_BACKWARD,
    "flash_attn_3::fwd": _flash3,
    "flash_attn_3::bwd": _flash3_backward,
    # AITER (ROCm).
    "aiter::mha_fwd": _AITER_FORWARD,
    "aiter::fmha_v3_fwd": _AITER_FORWARD,
    "aiter::_flash_attn_forward": _AITER_FORWARD,
    "aiter::mha_bwd": _DAO_BACKWARD,
    "aiter::fmha_v3_bwd": _DAO_BACKWARD,
    "aiter::_flash_attn_backward": _DAO_BACKWARD,
    "aiter::mha_varlen_fwd": _AITER_VARLEN,
    "aiter::fmha_v3_varlen_fwd": _AITER_VARLEN,
    "aiter::mha_varlen_bwd": _AITER_VARLEN_BACKWARD,
    "aiter::fmha_v3_varlen_bwd": _AITER_VARLEN_BACKWARD,
    "aiter::mha_batch_prefill": Attention(
        "blhd",
        causal_flag=1,
        bottom_right=True,
        window_after_flag=True,
        cu_q=3,
        cu_k=4,
        max_q=6,
        paged=True,
    ),
}
