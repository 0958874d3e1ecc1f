"""Operators of a transformer block and of the loss, with what eager PyTorch keeps for backward.

Sizes are bytes of one rank. Checked operator by operator against what autograd saves.
"""

from __future__ import annotations

import math
from typing import Any

from chopper.analyzers.estimates.tape import Buffer, Ledger, Op
from chopper.analyzers.estimates.training import Training, widths
from chopper.models.architectures import Experts, Latent


def _share(count: int, parts: int) -> int:
    return -(-count // parts)


class _Block:
    """One layer's operators as they are put in a row: x → out."""

    def __init__(self, of: Training) -> None:
        self.a = a = of.architecture
        self.of = of
        self.ops: list[Op] = []
        self.tokens = of.tokens_count
        self.tp = of.tensor_parallel_count
        self.e = widths(of).compute
        self.stream_bytes = 4 if of.autocast else self.e
        # Outside of the parallel regions, sequence parallelism holds a part of the tokens.
        self.outside = _share(self.tokens, self.tp) if of.sequence_parallel else self.tokens
        self.h = self.outside * a.width
        self.inputs: set[str] = set()
        """Inputs of attention and feed-forward network, gathered under sequence parallelism."""

    def add(self, name: str, reads: tuple[str, ...], writes: str, size: int, **rest: Any) -> str:
        self.ops.append(Op(name=name, reads=reads, writes=writes, size_bytes=size, **rest))
        return writes

    def view(self, x: str, out: str, size: int) -> str:
        return self.add("view", (x,), out, size, view=True)

    def norm(self, x: str, out: str, *, stream: bool = False) -> str:
        """Normalize over the width; `stream`: the result goes into the residual stream."""
        of, a = self.of, self.a
        width = self.stream_bytes if stream or of.autocast else self.e
        return self.normalize(x, out, self.h, self.outside, a.norm_count, width)

    def normalize(
        self, x: str, out: str, elements: int, rows: int, weights: int, width: int
    ) -> str:
        of, layer = self.of, self.a.norm == "layer"
        if of.kernels == "gpu" or layer:
            saved: dict[str, Any] = {"keeps": (x,), "keeps_extra_bytes": rows * 4 * (1 + layer)}
        else:
            # The input as float32, the normalized as float32, and the inverse root.
            wide = elements * 4 * (2 if self.stream_bytes < 4 else 1)
            saved = {
                "keeps": (x,) if self.stream_bytes == 4 else (),
                "keeps_extra_bytes": wide + rows * 4,
                "forward_bytes": elements * 4,
                "backward_bytes": 3 * elements * 4,
            }
        return self.add("norm", (x,), out, elements * width, weights_count=weights, **saved)

    def linear(
        self, x: str, out: str, columns: int, weights: int, *, saved: bool = True, cut: bool = True
    ) -> str:
        """A product; under autocast each makes a copy of its own in the narrower type."""
        of, e = self.of, self.e
        source = x
        gathered = self.tokens * self.a.width * e
        if of.autocast and x in self.inputs:
            source = self.add("cast", (x,), f"{x}.{out}", gathered)
        elif of.sequence_parallel and x in self.inputs and self.tp > 1:
            source = self.gathered(x)
        rows = self.outside if out in ("a0", "d0", "sd") else self.tokens
        return self.add(
            "linear",
            (source,),
            out,
            rows * columns * e,
            keeps=(source,),
            weights_count=_share(weights, self.tp) if cut else weights,
            saved=saved,
        )

    def gathered(self, x: str) -> str:
        """Gather all tokens of a tensor that sequence parallelism cuts."""
        source = f"{x}.gathered"
        if self.of.sequence_parallel and self.tp > 1:
            if not any(op.writes == source for op in self.ops):
                self.add("gather", (x,), source, self.tokens * self.a.width * self.e)
            return source
        return x

    def rotate(self, x: str, out: str, size: int) -> str:
        both = 2 * size
        return self.add("rotate", (x,), out, size, forward_bytes=both, backward_bytes=both)

    def dropped(self, x: str) -> str:
        if not self.a.dropout:
            return x
        e = self.e
        mask = self.h * (1 if self.of.kernels == "gpu" else e)
        size = self.h * e
        return self.add("dropout", (x,), f"{x}.dropped", size, keeps_extra_bytes=mask)

    def onto(self, x: str, added: str, out: str) -> str:
        """Into the residual stream."""
        return self.add("add", (x, added), out, self.h * self.stream_bytes, passes=True)

    def attention(self, x: str) -> str:
        """From x to a0."""
        a, of, e = self.a, self.of, self.e
        heads = _share(a.heads_count, self.tp)
        if a.latent is None:
            queries, keys, value_width = *self.projected(x), a.head_width
        else:
            queries, keys, value_width = *self.from_latent(x, a.latent), a.latent.value_width
        scores = of.batch_count * heads * of.sequence_count**2
        extra = self.tokens * heads * 4
        if of.attention == "math":
            # Softmax's output, and with dropout its mask and its result (5as/h of arXiv
            # 2205.05198).
            extra = scores * (e + (1 + e if a.dropout else 0))
        output = self.tokens * heads * value_width
        self.add(
            "attention",
            (queries, keys, "v"),
            "o",
            output * e,
            keeps=(queries, keys, "v") + (("o",) if of.attention == "flash" else ()),
            keeps_extra_bytes=extra,
            backward_bytes=scores * e * 2 if of.attention == "math" else 0,
            weights_count=heads * a.sinks,
            saved=True,
        )
        weights = a.heads_count * value_width * a.width + a.width * a.output_bias
        rows = "o"
        if a.rotates_a_part or a.latent is not None:
            rows = self.add("copy", ("o",), "o1", output * e)
        return self.linear(rows, "a0", a.width, weights, saved=False)

    def projected(self, x: str) -> tuple[str, str]:
        """Queries, keys and values, each by a product or all by one; values are v."""
        a, w, e = self.a, self.a.width, self.e
        q_width = _share(a.q_width, self.tp)
        # With more ranks than key heads, ranks share a head and each holds it.
        kv_width = a.head_width * _share(a.kv_heads_count, self.tp)
        q, kv = self.tokens * q_width * e, self.tokens * kv_width * e
        q_weights = a.q_width * (w + a.qkv_bias)
        kv_weights = self.tp * kv_width * (w + a.qkv_bias)
        if a.fused_qkv:
            self.linear(x, "qkv", q_width + 2 * kv_width, q_weights + 2 * kv_weights)
            self.view("qkv", "q0", q)
            self.view("qkv", "k0", kv)
            self.view("qkv", "v", kv)
        else:
            self.linear(x, "q0", q_width, q_weights)
            self.linear(x, "k0", kv_width, kv_weights, saved=False)
            self.linear(x, "v", kv_width, kv_weights)
        queries, keys = "q0", "k0"
        if a.qk_norm:
            queries = self.of_heads("q0", "q1", q, _share(a.heads_count, self.tp))
            keys = self.of_heads("k0", "k1", kv, _share(a.kv_heads_count, self.tp))
        if a.positions_count:
            return queries, keys
        return self.rotate(queries, "q", q), self.rotate(keys, "k", kv)

    def of_heads(self, x: str, out: str, size: int, heads: int) -> str:
        """Queries or keys normalized."""
        a, over_width = self.a, self.a.qk_norm_whole
        rows = self.tokens * (1 if over_width and a.norm == "rms" else heads)
        weights = a.head_width * (heads if over_width else 1)
        elements = size // self.e
        return self.normalize(x, out, elements, rows, weights, self.e)

    def from_latent(self, x: str, of: Latent) -> tuple[str, str]:
        """Queries from a narrow product or the input; keys and values from a narrow one."""
        a, w, t, e = self.a, self.a.width, self.tokens, self.e
        heads = _share(a.heads_count, self.tp)
        q_width, source, q_weights = heads * a.head_width, x, w * a.q_width
        if of.q_rank:
            self.linear(x, "qa", of.q_rank, w * of.q_rank + of.q_rank * a.qkv_bias, cut=False)
            source = self.normalize("qa", "qn", t * of.q_rank, t, of.q_rank, e)
            q_weights = of.q_rank * a.q_width
        self.linear(source, "q0", q_width, q_weights, saved=False)
        queries = self.rotate("q0", "q", t * q_width * e)
        narrow = of.kv_rank + of.rope_width
        self.linear(x, "c", narrow, narrow * (w + a.qkv_bias), cut=False)
        self.view("c", "c0", t * of.kv_rank * e)
        self.view("c", "r0", t * of.rope_width * e)
        self.normalize("c0", "c1", t * of.kv_rank, t, of.kv_rank, e)
        nope = a.head_width - of.rope_width
        kv_width = nope + of.value_width
        self.linear(
            "c1", "kv", heads * kv_width, of.kv_rank * a.heads_count * kv_width, saved=False
        )
        self.view("kv", "k0", t * heads * nope * e)
        self.view("kv", "v", t * heads * of.value_width * e)
        self.rotate("r0", "r", t * of.rope_width * e)
        self.add("join", ("k0", "r"), "k", t * heads * a.head_width * e)
        return queries, "k"

    def activation(self, x: str, out: str, size: int) -> str:
        """Apply SiLU, GELU or a variant of ReLU."""
        kind = self.a.activation
        if kind in ("smooth", "tanh"):
            # x/2, the tanh, and one more than it; in backward the gradients of both factors.
            extra, back = (3 * size, 2 * size) if kind == "tanh" else (0, 0)
            saved = {"keeps": (x,), "keeps_extra_bytes": extra, "backward_bytes": back}
            return self.add("activation", (x,), out, size, **saved)
        first = f"{out}.relu" if kind == "relu2" else out
        self.add("activation", (x,), first, size, keeps=(first,))
        if kind == "relu2":
            # Its backward, operator by operator: g · (2 · x¹).
            self.add("square", (first,), out, size, keeps=(first,), backward_bytes=3 * size)
        return out

    def gated(self, gate: str, up: str, prefix: str, size: int) -> str:
        """The activation of one half times the other: gate, up → the product."""
        self.activation(gate, f"{prefix}s", size)
        return self.multiply(f"{prefix}s", up, f"{prefix}p", size)

    def multiply(self, x: str, y: str, out: str, size: int) -> str:
        return self.add("multiply", (x, y), out, size, keeps=(x, y))

    def network(self, x: str, width: int, out: str, *, bias: bool, prefix: str = "") -> str:
        """A plain feed-forward network."""
        a, w = self.a, self.a.width
        share = _share(width, self.tp)
        f = self.tokens * share * self.e
        up = width * (w + bias)
        g, u = f"{prefix}g", f"{prefix}u"
        if a.gated and a.fused_up:
            self.linear(x, f"{prefix}gu", 2 * share, 2 * up)
            self.view(f"{prefix}gu", g, f)
            activated = self.gated(g, self.view(f"{prefix}gu", u, f), prefix, f)
        elif a.gated:
            # The activation comes before the second product.
            self.linear(x, g, share, up)
            self.activation(g, f"{prefix}s", f)
            self.linear(x, u, share, up, saved=False)
            activated = self.multiply(f"{prefix}s", u, f"{prefix}p", f)
        else:
            self.linear(x, g, share, up)
            activated = self.activation(g, f"{prefix}s", f)
        return self.linear(activated, out, w, width * w + w * bias)

    def mixture(self, x: str, of: Experts) -> str:
        """Router, dispatch, the experts' networks as grouped products, and their sum: x → d0.

        As transformers' ``grouped_mm_experts_forward``: tokens are sorted by expert into tokens ×
        chosen rows, and weighted after the last product. With expert parallelism the rows go to the
        ranks that have their experts, and back.
        """
        lay, w, e = self.of, self.a.width, self.e
        t, rows = self.tokens, self.tokens * of.chosen_count
        x = self.gathered(x)
        self.router(x, of)
        # Three permutations in int64, which indexing keeps.
        sent = "xs" if lay.expert_parallel_count > 1 else "xe"
        category = "communication" if sent == "xs" else ""
        extra = 24 * rows
        self.add("dispatch", (x,), sent, rows * w * e, keeps_extra_bytes=extra, category=category)
        routed = rows
        if sent == "xs":
            routed = math.ceil(rows * lay.imbalance_ratio)
            self.add("all-to-all", ("xs",), "xe", routed * w * e)
        share = _share(of.width, self.tp)
        f = routed * share * e
        experts = _share(of.count, lay.expert_parallel_count)
        self.grouped("xe", "egu", routed * 2 * share, 2 * share * experts * (w + of.bias), of)
        self.view("egu", "eg", f)
        self.view("egu", "eu", f)
        if of.clamped:
            # Clamping keeps what it reads; the sigmoid and both factors are kept.
            self.add("clamp", ("eg",), "egc", f, keeps=("eg",))
            self.add("clamp", ("eu",), "eu1", f, keeps=("eu",), forward_bytes=f)
            self.add("sigmoid", ("egc",), "esig", f, keeps=("esig",), forward_bytes=f)
            activated = self.multiply("eu1", self.multiply("egc", "esig", "es", f), "ep", f)
        else:
            activated = self.gated("eg", "eu", "e", f)
        down = experts * (share * w + w * of.bias)
        received = self.grouped(activated, "ye", routed * w, down, of)
        if sent == "xs":
            received = self.add("all-to-all", ("ye",), "yr", rows * w * e)
        # A router in float32 gives weights in it, and so do the sums of what they weigh.
        wide = 4 if of.router_in_float32 else e
        size = rows * w * wide
        back = 2 * size + (rows * w * e if wide > e else 0)
        weighted = received, "w"
        self.add("multiply", weighted, "yw", size, keeps=weighted, backward_bytes=back)
        self.add("reorder", ("yw",), "yo", size)
        self.add("sum", ("yo",), "d0", self.h * e, passes=True)
        if not of.shared_width:
            return "d0"
        shared = self.network(x, of.shared_width, "sd", bias=False, prefix="s")
        if of.shared_gate:
            self.linear(x, "sw", 1, w, cut=False)
            shared = self.multiply("sw", shared, "sdw", t * w * e)
        return self.add("add", ("d0", shared), "d1", self.h * e, passes=True)

    def grouped(self, x: str, out: str, elements: int, weights: int, of: Experts) -> str:
        """One product for all experts of this rank, its rows by expert."""
        size = elements * self.e
        extra = {"weights_count": weights, "expert": True, "forward_bytes": size * of.bias}
        return self.add("grouped", (x,), out, size, keeps=(x,), **extra)

    def router(self, x: str, of: Experts) -> None:
        """From x to w: probabilities in float32, the chosen ones' and which they are."""
        e, t, w = self.e, self.tokens, self.a.width
        source = x
        if of.router_in_float32 and e < 4:
            source, e = self.add("cast", (x,), "xw", t * w * 4), 4
        weights, size = of.count * (w + of.router_bias), t * of.count * e
        self.add("linear", (source,), "r0", size, keeps=(source,), weights_count=weights)
        chosen = t * of.chosen_count
        self.add("softmax", ("r0",), "r1", t * of.count * 4, keeps=("r1",))
        self.add("choose", ("r1",), "w", chosen * 4, keeps_extra_bytes=chosen * 8)


def block(of: Training, *, mixture: bool = False) -> tuple[Op, ...]:
    """One layer: x → out. Attention and feed-forward network, each added to the residual stream.

    With `mixture` it is a layer with experts.
    """
    a, builder = of.architecture, _Block(of)
    before = not a.norms_after
    first = builder.norm("x", "n1") if before else "x"
    builder.inputs = {"n1", "n2"} if before else {"x", "y"}
    added = builder.dropped(builder.attention(first))
    if a.norms_per_layer_count == 4 or a.norms_after:
        added = builder.norm(added, "a2", stream=True)
    if a.parallel:
        second = builder.norm("x", "n2") if a.norms_per_layer_count == 2 else first
        stream = "x"
    else:
        stream = builder.onto("x", added, "y")
        second = builder.norm("y", "n2") if before else "y"
    if mixture and a.experts is not None:
        other = builder.mixture(second, a.experts)
    else:
        other = builder.network(second, a.ffn_width, "d0", bias=a.mlp_bias)
    other = builder.dropped(other)
    if a.norms_per_layer_count == 4 or a.norms_after:
        other = builder.norm(other, "d2", stream=True)
    if a.parallel:
        stream = builder.onto(stream, added, "y")
    builder.onto(stream, other, "out")
    return tuple(builder.ops)


def head(of: Training) -> tuple[Op, ...]:
    """The last norm: x → n. The product with the vocabulary is counted with the loss."""
    a, builder = of.architecture, _Block(of)
    fused = of.kernels == "gpu" or a.norm == "layer"
    wide = builder.h * 4 * (2 if builder.stream_bytes < 4 else 1)
    builder.add(
        "norm",
        ("x",),
        "n",
        builder.h * (builder.stream_bytes if of.autocast else builder.e),
        keeps=("x",) if fused or builder.stream_bytes == 4 else (),
        keeps_extra_bytes=builder.outside * 4 + (0 if fused else wide),
        weights_count=a.norm_count,
        backward_bytes=0 if fused else 3 * builder.h * 4,
    )
    if of.autocast or of.sequence_parallel:
        # What the product reads: in its narrower type, and all tokens.
        name = "cast" if of.autocast else "gather"
        builder.add(name, ("n",), "m", of.tokens_count * a.width * builder.e)
    return tuple(builder.ops)


_CHUNKS = 8
"""Parts of a chunked loss."""


def loss(
    ledger: Ledger,
    of: Training,
    n: Buffer,
    *,
    gradient_bytes: int,
    cached: list[Buffer],
    gathered_bytes: int = 0,
) -> tuple[Buffer, Buffer]:
    """Return the gradients of what the head reads, n, which is taken over, and of its weight.

    `gradient_bytes` is the width of a parameter's gradient; `cached` are autocast's narrow copies
    of weights, emptied where its context ends; `gathered_bytes` are those of the head's weight
    where it is gathered for each use and released after it.
    """
    tp = of.tensor_parallel_count
    a = of.architecture
    t, share = of.tokens_count, -(-a.vocabulary_count // tp)
    parallel = tp > 1 and not of.gathers_logits
    v = share if parallel else a.vocabulary_count
    e = widths(of).compute
    chunks = _CHUNKS if of.loss == "chunked" else 1
    size = -(-t // chunks) * v
    # Autocast runs the cross-entropy in float32 whatever the program asks for.
    wide = (of.loss != "native" or of.autocast) and e < 4
    cast = ledger.take("parameters", share * a.width * e) if of.autocast else None
    weight = ledger.take("parameters", gathered_bytes)
    logits = ledger.take("logits", size * e)
    ledger.drop(weight)
    if tp > 1 and not parallel:
        # The own part and all parts one after another, then side by side: `all_gather_tensor` of
        # torch's distributed/_functional_collectives.py.
        ledger.spike("logits", -(-size // tp) * e + size * e)
    if parallel:
        keeps = of.keeps_logits
        softmax = _parallel_log_softmax(ledger, logits, size, e, wide=wide, keeps_logits=keeps)
    elif wide:
        copy = ledger.take("logits", size * 4)
        if not of.keeps_logits:
            ledger.drop(logits)
        softmax = ledger.turn(copy, "logits", size * 4)
    else:
        softmax = ledger.take("logits", size * e)
        if not of.keeps_logits:
            ledger.drop(logits)
    # The autocast context ends here, and with it its cache.
    ledger.drop(*cached)
    cached.clear()
    ledger.at = "backward of the loss"
    width = 4 if wide else e
    first = ledger.take("logits", size * width)
    if parallel:
        # `(grad_input + exp(x)) * grad_output` in `_nll_loss_and_log_softmax_backward` of torch's
        # distributed/tensor/parallel/loss.py: `grad_input` lives to the end, beside the sum and
        # the exponential or the product.
        exponential = ledger.take("logits", size * width)
        added = ledger.turn(exponential, "logits", size * width)
        of_logits = ledger.turn(added, "logits", size * width)
        ledger.drop(first)
    else:
        of_logits = ledger.turn(first, "logits", size * width)
    ledger.drop(softmax)
    if wide:
        of_logits = ledger.turn(of_logits, "logits", size * e)
    weight = ledger.take("parameters", gathered_bytes)
    gradient = ledger.take("temporary", t * a.width * e)
    of_head = ledger.take("gradients", share * a.width * gradient_bytes)
    ledger.drop(of_logits, cast, weight, n)
    return gradient, of_head


def _parallel_log_softmax(
    ledger: Ledger, logits: Buffer, size: int, e: int, *, wide: bool, keeps_logits: bool
) -> Buffer:
    """Take log-softmax of this rank's logits in float32, as torch.distributed.tensor.parallel does.

    As `_log_softmax` of its loss.py: `shifted`, then its exponential, then `result`.
    """
    computed = ledger.take("logits", size * 4) if e < 4 else None
    shifted = ledger.take("logits", size * 4)
    ledger.spike("logits", size * 4)
    result = ledger.take("logits", size * 4)
    ledger.drop(shifted)
    if e < 4 and not wide:
        result = ledger.turn(result, "logits", size * e)
    ledger.drop(computed, None if keeps_logits else logits)
    return result
