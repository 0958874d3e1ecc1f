"""Operators of a transformer block and of the loss, with what eager PyTorch keeps for backward.

Sizes are bytes of one rank. Checked operator by operator against what autograd saves.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from chopper.analyzers.estimates.tape import Op
from chopper.architectures import Architecture


class Layout(msgspec.Struct, kw_only=True, frozen=True):
    """What decides the size of a block's tensors on one rank."""

    tokens_count: int
    """batch × sequence."""
    sequence_count: int
    batch_count: int
    element_bytes: int = 2
    """Of what products read and write."""
    stream_bytes: int = 2
    """Of the residual stream; 4 under autocast."""
    autocast: bool = False
    tensor_parallel_count: int = 1
    sequence_parallel: bool = False
    kernels: Literal["gpu", "cpu"] = "gpu"
    """On a CPU an RMSNorm is several operators that keep two float32 copies, and dropout's mask has
    the type of its elements."""
    attention: Literal["flash", "math"] = "flash"
    """Math: the matrix of scores is kept."""


def _share(count: int, parts: int) -> int:
    return -(-count // parts)


def block(a: Architecture, of: Layout) -> tuple[Op, ...]:
    """One layer: x → out. Attention, then feed-forward, each added to the residual stream."""
    t, e, r = of.tokens_count, of.element_bytes, of.stream_bytes
    tp = of.tensor_parallel_count
    # Outside of the parallel regions, sequence parallelism holds a part of the tokens.
    outside = _share(t, tp) if of.sequence_parallel else t
    h = outside * a.width
    gathered = t * a.width
    q = t * _share(a.q_width, tp)
    # With more ranks than key heads, ranks share a head and each holds it.
    kv_width = a.head_width * _share(a.kv_heads_count, tp)
    kv = t * kv_width
    f = t * _share(a.ffn_width, tp)
    heads = _share(a.heads_count, tp)
    ops: list[Op] = []

    def norm(x: str, out: str, stream: bool = False) -> None:
        size = h * (r if stream or of.autocast else e)
        if of.kernels == "gpu" or a.norm == "layer":
            statistics = outside * 4 * (2 if a.norm == "layer" else 1)
            ops.append(
                Op(
                    name="norm",
                    reads=(x,),
                    writes=out,
                    size_bytes=size,
                    keeps=(x,),
                    keeps_extra_bytes=statistics,
                    weights_count=a.norm_count,
                )
            )
        else:
            # The input as float32, the normalized as float32, and the inverse root.
            wide = h * 4 * (2 if r < 4 else 1)
            ops.append(
                Op(
                    name="norm",
                    reads=(x,),
                    writes=out,
                    size_bytes=size,
                    keeps=(x,) if r == 4 else (),
                    keeps_extra_bytes=wide + outside * 4,
                    weights_count=a.norm_count,
                    forward_bytes=h * 4,
                    backward_bytes=3 * h * 4,
                )
            )

    def linear(x: str, out: str, size: int, weights: int, *, saved: bool = True) -> None:
        """A product; under autocast each makes a copy of its own in the narrower type."""
        wide = of.autocast and x in ("n1", "n2", "n")
        source = x
        if wide:
            source = f"{x}.{out}"
            ops.append(Op(name="cast", reads=(x,), writes=source, size_bytes=gathered * e))
        elif of.sequence_parallel and x in ("n1", "n2") and tp > 1:
            source = f"{x}.gathered"
            if not any(op.writes == source for op in ops):
                ops.append(Op(name="gather", reads=(x,), writes=source, size_bytes=gathered * e))
        ops.append(
            Op(
                name="linear",
                reads=(source,),
                writes=out,
                size_bytes=size * e,
                keeps=(source,),
                weights_count=_share(weights, tp),
                saved=saved,
            )
        )

    norm("x", "n1")
    w = a.width
    linear("n1", "q0", q, w * a.q_width + a.q_width * a.qkv_bias)
    kv_weights = tp * kv_width * (w + a.qkv_bias)
    linear("n1", "k0", kv, kv_weights, saved=False)
    linear("n1", "v", kv, kv_weights)
    if a.qk_norm:
        for x in ("q0", "k0"):
            size = q if x == "q0" else kv
            ops.append(
                Op(
                    name="norm",
                    reads=(x,),
                    writes=x[0] + "1",
                    size_bytes=size * e,
                    keeps=(x,),
                    keeps_extra_bytes=4 * size // a.head_width,
                    weights_count=a.head_width,
                    saved=False,
                )
            )
    after = "1" if a.qk_norm else "0"
    if a.positions_count:
        queries, keys = "q" + after, "k" + after
    else:
        queries, keys = "q", "k"
        for out, size in (("q", q), ("k", kv)):
            ops.append(
                Op(
                    name="rotate",
                    reads=(out + after,),
                    writes=out,
                    size_bytes=size * e,
                    forward_bytes=2 * size * e,
                    backward_bytes=2 * size * e,
                    saved=False,
                )
            )
    scores = of.batch_count * heads * of.sequence_count**2
    extra = of.tokens_count * heads * 4
    if of.attention == "math":
        # Softmax's output, and with dropout its mask and its result (5as/h of arXiv 2205.05198).
        extra = scores * (e + (1 + e if a.dropout else 0))
    ops.append(
        Op(
            name="attention",
            reads=(queries, keys, "v"),
            writes="o",
            size_bytes=q * e,
            keeps=(queries, keys, "v") + (("o",) if of.attention == "flash" else ()),
            keeps_extra_bytes=extra,
            backward_bytes=scores * e * 2 if of.attention == "math" else 0,
        )
    )
    linear("o", "a0", h, a.q_width * w + w * a.output_bias, saved=False)
    added = "a0"
    if a.dropout:
        ops.append(_dropout("a0", "a1", h, of))
        added = "a1"
    if a.norms_per_layer_count == 4:
        norm(added, "a2", stream=True)
        added = "a2"
    ops.append(Op(name="add", reads=("x", added), writes="y", size_bytes=h * r, passes=True))
    norm("y", "n2")
    up = w * a.ffn_width + a.ffn_width * a.mlp_bias
    linear("n2", "g", f, up)
    activation = Op(
        name="activation", reads=("g",), writes="s", size_bytes=f * e, keeps=("g",), saved=False
    )
    if a.gated:
        ops.append(activation)
        linear("n2", "u", f, up, saved=False)
        ops.append(
            Op(
                name="multiply",
                reads=("s", "u"),
                writes="p",
                size_bytes=f * e,
                keeps=("s", "u"),
                saved=False,
            )
        )
        linear("p", "d0", h, a.ffn_width * w + w * a.mlp_bias)
    else:
        ops.append(activation)
        linear("s", "d0", h, a.ffn_width * w + w * a.mlp_bias)
    added = "d0"
    if a.dropout:
        ops.append(_dropout("d0", "d1", h, of))
        added = "d1"
    if a.norms_per_layer_count == 4:
        norm(added, "d2", stream=True)
        added = "d2"
    ops.append(Op(name="add", reads=("y", added), writes="out", size_bytes=h * r, passes=True))
    return tuple(ops)


def _dropout(x: str, out: str, elements: int, of: Layout) -> Op:
    return Op(
        name="dropout",
        reads=(x,),
        writes=out,
        size_bytes=elements * of.element_bytes,
        keeps_extra_bytes=elements * (1 if of.kernels == "gpu" else of.element_bytes),
        saved=False,
    )


def head(a: Architecture, of: Layout) -> tuple[Op, ...]:
    """The last norm: x → n. The product with the vocabulary is counted with the loss."""
    t = (
        _share(of.tokens_count, of.tensor_parallel_count)
        if of.sequence_parallel
        else of.tokens_count
    )
    fused = of.kernels == "gpu" or a.norm == "layer"
    wide = t * a.width * 4 * (2 if of.stream_bytes < 4 else 1)
    size = t * a.width * (of.stream_bytes if of.autocast else of.element_bytes)
    last = Op(
        name="norm",
        reads=("x",),
        writes="n",
        size_bytes=size,
        keeps=("x",) if fused or of.stream_bytes == 4 else (),
        keeps_extra_bytes=t * 4 + (0 if fused else wide),
        weights_count=a.norm_count,
        backward_bytes=0 if fused else 3 * t * a.width * 4,
    )
    if not of.autocast and not of.sequence_parallel:
        return (last,)
    # What the product reads: in its narrower type, and all tokens.
    name = "cast" if of.autocast else "gather"
    size = of.tokens_count * a.width * of.element_bytes
    return (last, Op(name=name, reads=("n",), writes="m", size_bytes=size))
