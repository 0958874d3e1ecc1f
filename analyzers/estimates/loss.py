"""Head, cross-entropy and their backward on the ledger: the logits, and their copies."""

from __future__ import annotations

from chopper.analyzers.estimates.tape import Buffer, Ledger
from chopper.analyzers.estimates.training import Training, widths

_CHUNKS = 8


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
