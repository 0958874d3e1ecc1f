"""Forward and backward of a Llama-like model, operator by operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chopper.validation.model.host import BF16, US
from chopper.validation.model.sharded import FFN, HIDDEN, Sharded

if TYPE_CHECKING:
    from chopper.validation.model.engine import Program

HEADS, VOCABULARY, TOKENS = 32, 16_000, 4096
_HEAD = HIDDEN // HEADS


class Layers(Sharded):
    """The model."""

    def forward(self) -> Program:
        """Embedding, layers, head."""
        yield from self.busy(10 * US, "python")
        key = "embedding"
        yield from self.op(
            "aten::embedding",
            key,
            [self.vector(key, 8 * TOKENS + 4.0 * TOKENS * HIDDEN, "index_select_kernel")],
            dims=[[VOCABULARY, HIDDEN], [1, TOKENS], [], [], []],
            types=[BF16, "long int", "Scalar", "Scalar", "Scalar"],
            concrete=["", "", "-1", "False", "False"],
            node=key,
        )
        for layer in range(self.plan.layers):
            key = f"forward/{layer}"
            yield from self.extras(key)
            ahead = (layer + 1, f"forward/{layer + 1}") if layer + 1 < self.plan.layers else None
            yield from self.unshard(layer, key, ahead)
            if self.plan.graph:
                yield from self.replay(layer, key)
            else:
                yield from self.layer(layer, key)
        yield from self.head()

    def replay(self, layer: int, key: str) -> Program:
        """A layer's forward from a graph: one launch for all its kernels."""
        self.graph_tasks = []
        yield from self.layer(layer, key)
        tasks, self.graph_tasks = self.graph_tasks, None
        start = self.now
        self.correlation += 1
        length = self.around(30 * US, key + "/graph")
        self.graphs += 1
        for i, task in enumerate(tasks):
            task.correlation = self.correlation
            task.launch_ns, task.returned_ns = start, start + length
            task.available_ns = start + round(0.8 * length)
            task.account = "compute.unmodelled"
            task.call = self.node.prefix + "GraphLaunch"
            task.graph = (self.graphs, i + 1)
            self.device.stream(task.stream).push(task)
        yield from self.busy(length, tasks[0])
        self.span(
            self.node.prefix + "GraphLaunch",
            "cuda_runtime",
            start,
            correlation=tasks[0].correlation,
        )

    def layer(self, layer: int, key: str, *, again: bool = False) -> Program:
        """Forward of one layer; ``again`` in backward."""
        start = self.now
        size = 2.0 * TOKENS * HIDDEN
        wide = 2.0 * TOKENS * FFN
        x, h = [1, TOKENS, HIDDEN], [1, TOKENS, FFN]
        account = "compute.recompute" if again else "vector"
        node = None if again else key

        def place(name: str) -> str | None:
            # Recomputed operators take sequence numbers of their own.
            return f"{key}/{name}" if node is None else f"{node}/{name}"

        def linear(name: str, k: int, n: int) -> Program:
            task = self.gemm(f"{key}/{name}", TOKENS, k, n)
            if again:
                task.account = account
            return self.op(
                "aten::mm",
                f"{key}/{name}",
                [task],
                dims=[[TOKENS, k], [k, n]],
                node=place(name),
                around="aten::linear",
            )

        def vector(
            operator: str, name: str, bytes_count: float, what: str, dims: list[Any], **told: Any
        ) -> Program:
            task = self.vector(f"{key}/{name}", bytes_count, what, account=account)
            return self.op(operator, f"{key}/{name}", [task], dims=dims, node=place(name), **told)

        def norm(name: str) -> Program:
            return vector(
                "aten::_fused_rms_norm",
                name,
                2 * size + 2 * HIDDEN,
                "vectorized_layer_norm_kernel",
                [x, [], [HIDDEN], []],
                types=[BF16, "ScalarList", BF16, "Scalar"],
                concrete=["", f"[{HIDDEN}]", "", "1e-05"],
            )

        yield from norm("norm1")
        for name in "qkv":
            yield from linear(name, HIDDEN, HIDDEN)
        for name in ("rope_q", "rope_k"):
            yield from vector("aten::mul", name, 3 * size, "MulFunctor<float>", [x, x])
        yield from self.attention(key, again)
        yield from linear("o", HIDDEN, HIDDEN)
        yield from vector(
            "aten::add",
            "residual1",
            3 * size,
            "CUDAFunctor_add<c10::BFloat16>",
            [x, x, []],
            types=[BF16, BF16, "Scalar"],
            concrete=["", "", "1"],
        )
        yield from norm("norm2")
        yield from linear("gate", HIDDEN, FFN)
        yield from linear("up", HIDDEN, FFN)
        yield from vector("aten::silu", "silu", 2 * wide, "silu_kernel", [h])
        yield from vector("aten::mul", "gated", 3 * wide, "MulFunctor<float>", [h, h])
        yield from linear("down", FFN, HIDDEN)
        yield from vector(
            "aten::add",
            "residual2",
            3 * size,
            "CUDAFunctor_add<c10::BFloat16>",
            [x, x, []],
            types=[BF16, BF16, "Scalar"],
            concrete=["", "", "1"],
        )
        if self.graph_tasks is None:
            kind = "recompute" if again else "layer"
            self.span(f"chopper::{kind}::layers.{layer}", "cpu_op", start, **{"External id": 0})

    def attention(self, key: str, again: bool) -> Program:
        """Causal attention of one layer."""
        pairs = TOKENS * (TOKENS + 1) / 2
        size = 2.0 * TOKENS * HIDDEN
        task = self.math(
            f"{key}/attention",
            4.0 * HEADS * _HEAD * pairs,
            4 * size + 4 * HEADS * TOKENS,
            name=self.node.flash_forward,
        )
        if again:
            task.account = "compute.recompute"
        q = [1, HEADS, TOKENS, _HEAD]
        return self.op(
            "aten::_scaled_dot_product_flash_attention",
            f"{key}/attention",
            [task],
            dims=[q, q, q, [], [], [], []],
            types=[BF16, BF16, BF16, "Scalar", "Scalar", "Scalar", ""],
            concrete=["", "", "", "0.", "True", "False", ""],
            node=f"{key}/attention",
            around="aten::scaled_dot_product_attention",
        )

    def head(self) -> Program:
        """Logits and loss."""
        yield from self.op(
            "aten::mm",
            "head/mm",
            [self.gemm("head/mm", TOKENS, HIDDEN, VOCABULARY)],
            dims=[[TOKENS, HIDDEN], [HIDDEN, VOCABULARY]],
            node="head/mm",
            around="aten::linear",
        )
        logits = 2.0 * TOKENS * VOCABULARY
        task = self.vector("head/softmax", 2 * logits, "cunn_SoftMaxForward")
        yield from self.op(
            "aten::_log_softmax",
            "head/softmax",
            [task],
            dims=[[TOKENS, VOCABULARY], [], []],
            types=[BF16, "Scalar", "Scalar"],
            concrete=["", "1", "False"],
            node="head/softmax",
        )
        self.forward_done = task.done

    def backward(self) -> Program:
        """On autograd's own thread."""
        yield from self.busy(12 * US, "python")
        self.tid = self.main_tid + 77
        yield from self.backward_head()
        for layer in reversed(range(self.plan.layers)):
            yield from self.backward_layer(layer)
        key = "backward/embedding"
        task = self.vector(
            key,
            2.0 * TOKENS * HIDDEN + 8 * TOKENS + 2.0 * VOCABULARY * HIDDEN,
            "embedding_backward_feature_kernel",
        )
        yield from self.autograd(
            "EmbeddingBackward0",
            "embedding",
            self.op(
                "aten::embedding_dense_backward",
                key,
                [task],
                dims=[[1, TOKENS, HIDDEN], [1, TOKENS], [], [], []],
                types=[BF16, "long int", "Scalar", "Scalar", "Scalar"],
                concrete=["", "", str(VOCABULARY), "-1", "False"],
                recorded=False,
            ),
        )
        self.tid = self.main_tid
        yield from self.busy(14 * US, "python")

    def product_backward(self, key: str, m: int, k: int, n: int) -> Program:
        """Both gradients of a matrix product."""
        for name, dims in (("dx", (m, n, k)), ("dw", (k, m, n))):
            a, b, c = dims
            yield from self.op(
                "aten::mm",
                f"{key}/{name}",
                [self.gemm(f"{key}/{name}", a, b, c)],
                dims=[[a, b], [b, c]],
                recorded=False,
            )

    def backward_head(self) -> Program:
        """Backward of logits and loss."""
        logits = 2.0 * TOKENS * VOCABULARY
        key = "backward/head"
        yield from self.autograd(
            "LogSoftmaxBackward0",
            "head/softmax",
            self.op(
                "aten::_log_softmax_backward_data",
                key + "/softmax",
                [self.vector(key + "/softmax", 3 * logits, "cunn_SoftMaxBackward")],
                dims=[[TOKENS, VOCABULARY], [TOKENS, VOCABULARY], [], []],
                types=[BF16, BF16, "Scalar", "Scalar"],
                concrete=["", "", "1", "15"],
                recorded=False,
            ),
        )
        yield from self.autograd(
            "MmBackward0",
            "head/mm",
            self.product_backward(key + "/mm", TOKENS, HIDDEN, VOCABULARY),
        )

    def backward_layer(self, layer: int) -> Program:
        """Backward of one layer, its gradients reduced."""
        key, forward = f"backward/{layer}", f"forward/{layer}"
        size = 2.0 * TOKENS * HIDDEN
        wide = 2.0 * TOKENS * FFN
        x, h = [1, TOKENS, HIDDEN], [1, TOKENS, FFN]
        ahead = (layer - 1, f"backward/{layer - 1}") if layer else None
        yield from self.extras(key)
        yield from self.unshard(layer, key, ahead)

        def vector(operator: str, name: str, bytes_count: float, what: str, dims: Any) -> Program:
            return self.op(
                operator,
                f"{key}/{name}",
                [self.vector(f"{key}/{name}", bytes_count, what)],
                dims=dims,
                recorded=False,
            )

        def linear(name: str, k: int, n: int) -> Program:
            return self.autograd(
                "MmBackward0",
                f"{forward}/{name}",
                self.product_backward(f"{key}/{name}", TOKENS, k, n),
            )

        def norm(name: str) -> Program:
            task = self.vector(
                f"{key}/{name}",
                3 * size + 4 * TOKENS + 4 * HIDDEN,
                "layer_norm_grad_input_kernel",
            )
            return self.autograd(
                "FusedRmsNormBackward0",
                f"{forward}/{name}",
                self.op(
                    "aten::_fused_rms_norm_backward",
                    f"{key}/{name}",
                    [task],
                    dims=[x, x, [], [1, TOKENS, 1], [HIDDEN], []],
                    types=[BF16, BF16, "ScalarList", "float", BF16, ""],
                    concrete=["", "", f"[{HIDDEN}]", "", "", "[True, True]"],
                    recorded=False,
                ),
            )

        def first() -> Program:
            if layer < self.plan.recompute.at(self.rank, self.step):
                yield from self.layer(layer, f"again/{layer}", again=True)
            yield from self.product_backward(f"{key}/down", TOKENS, FFN, HIDDEN)

        yield from self.autograd("MmBackward0", f"{forward}/down", first())
        both = self.sequence_of(
            vector("aten::mul", "gated1", 3 * wide, "MulFunctor<float>", [h, h]),
            vector("aten::mul", "gated2", 3 * wide, "MulFunctor<float>", [h, h]),
        )
        yield from self.autograd("MulBackward0", f"{forward}/gated", both)
        yield from self.autograd(
            "SiluBackward0",
            f"{forward}/silu",
            vector("aten::silu_backward", "silu", 3 * wide, "silu_backward_kernel", [h, h]),
        )
        yield from linear("up", HIDDEN, FFN)
        yield from linear("gate", HIDDEN, FFN)
        yield from norm("norm2")
        yield from linear("o", HIDDEN, HIDDEN)
        yield from self.attention_backward(key, forward)
        for name in ("rope_q", "rope_k"):
            yield from self.autograd(
                "MulBackward0",
                f"{forward}/{name}",
                vector("aten::mul", name, 3 * size, "MulFunctor<float>", [x, x]),
            )
        for name in "vkq":
            yield from linear(name, HIDDEN, HIDDEN)
        yield from norm("norm1")
        yield from self.reduce(layer, key + "/reduce")

    def sequence_of(self, *programs: Program) -> Program:
        """One after the other."""
        for program in programs:
            yield from program

    def attention_backward(self, key: str, forward: str) -> Program:
        """Backward of causal attention."""
        pairs = TOKENS * (TOKENS + 1) / 2
        size = 2.0 * TOKENS * HIDDEN
        task = self.math(
            f"{key}/attention",
            10.0 * HEADS * _HEAD * pairs,
            8 * size + 4 * HEADS * TOKENS,
            name=self.node.flash_backward,
        )
        q = [1, HEADS, TOKENS, _HEAD]
        inner = self.op(
            "aten::_scaled_dot_product_flash_attention_backward",
            f"{key}/attention",
            [task],
            dims=[q, q, q, q, q, [1, HEADS, TOKENS], *[[]] * 9],
            types=[BF16] * 5
            + ["float", "", "", "Scalar", "Scalar", "Scalar", "Scalar"]
            + ["unsigned long", "unsigned long", "Scalar"],
            concrete=[""] * 8 + [str(TOKENS), str(TOKENS), "0.", "True", "", "", "0.088"],
            recorded=False,
        )
        return self.autograd(
            "ScaledDotProductFlashAttentionBackward0", f"{forward}/attention", inner
        )
