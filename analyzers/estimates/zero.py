"""DeepSpeed's gradients: from autograd through the bucket into a rank's part, and its update.

Lifetimes of tensors as in DeepSpeed 0.19: runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py
and, for stage 1 with float32 gradients, runtime/bf16_optimizer.py.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from chopper.analyzers.estimates.tape import Buffer, Ledger

_SUB_GROUP_COUNT = 10**9
"""Elements that stage 3 updates at once (`sub_group_size`)."""


class Parts:
    """All parameters in one row, cut into equal parts over ranks wherever their borders lie."""

    def __init__(self, counts: Sequence[int], ranks_count: int) -> None:
        self.ends = list(itertools.accumulate(counts))
        self.counts = list(counts)
        self.ranks_count = ranks_count
        # Aligned to two elements of each rank (`nccl_start_alignment_factor`).
        self.part_count = -(-self.ends[-1] // (2 * ranks_count)) * 2

    def owners(self, index: int) -> tuple[int, int]:
        """First and last rank that own a part of a parameter."""
        start = self.ends[index] - self.counts[index]
        return start // self.part_count, (self.ends[index] - 1) // self.part_count

    def touched_count(self, rank: int) -> int:
        """Elements of all parameters that a rank owns something of, each as a whole."""
        start = rank * self.part_count
        if start >= self.ends[-1]:
            return 0
        first = bisect_right(self.ends, start)
        last = min(bisect_left(self.ends, start + self.part_count), len(self.ends) - 1)
        return self.ends[last] - (self.ends[first] - self.counts[first])

    def extremes(self) -> set[int]:
        """Ranks of which one needs the most: the one whose part is full first, and the largest."""
        near = {rank for i in range(len(self.counts)) for rank in self.owners(i)}
        near |= {min(rank + 1, self.ranks_count - 1) for rank in near}
        return {max(near), max(near, key=self.touched_count)}


@dataclass
class Reduction:
    """Gradients of one rank in stages 1 to 3, from their making to the update."""

    ledger: Ledger
    parts: Parts
    _: KW_ONLY
    stage: int
    """1, 2 or 3."""
    rank: int
    """Whose memory it is."""
    bucket_count: int
    """Elements of the bucket (`reduce_bucket_size`)."""
    width: int
    """Bytes of one gradient as autograd makes it."""
    wide: bool
    """Narrow gradients are added up in float32 (`grad_accum_dtype`)."""
    updated_width: int
    """Bytes of one weight as the optimizer updates it."""
    on_host: bool
    """The optimizer is offloaded, and gradients with it."""

    def __post_init__(self) -> None:
        self.wide = self.wide and self.width < 4
        self.whole = self.stage == 1 and self.wide and not self.on_host
        """BF16_Optimizer's way: float32 gradients of everything, which stay."""
        self.bucket: Buffer | None = None
        self.waiting: list[tuple[int, Buffer | None]] = []
        self.waiting_count = 0
        self.held: list[tuple[int, Buffer]] = []
        """Gradients that stay as autograd made them until the end of the backward."""
        self.part: Buffer | None = None

    def owns(self, index: int) -> bool:
        """Return whether this rank owns a part of a parameter."""
        first, last = self.parts.owners(index)
        return first <= self.rank <= last

    def before(self) -> None:
        """Allocate the buffers that live from the first step to the last."""
        if self.stage == 3:
            self.bucket = self.ledger.take("communication", self.bucket_count * self.width)
            if not self.on_host:
                width = 4 if self.wide else self.width
                self.part = self.ledger.take("gradients", self.parts.part_count * width)
        elif self.whole:
            self.part = self.ledger.take("gradients", self.parts.ends[-1] * 4)
        if self.on_host and self.stage < 3:
            # `temp_grad_buffer_for_gpu_offload`: the largest parameter.
            self.ledger.take("communication", max(self.parts.counts) * self.width)

    def arrived(self, index: int, gradient: Buffer) -> None:
        """Autograd has made the gradient of a parameter; it is taken over."""
        if self.whole:
            self.held.append((index, gradient))
            return
        if self.bucket is None:
            # `setup_buckets`: as large as it may be, whatever the model.
            width = 4 if self.stage == 1 and self.wide else self.width
            self.bucket = self.ledger.take("communication", self.bucket_count * width)
        if self.stage == 1:
            # Nothing is reduced before the end (`process_gradients`).
            self.held.append((index, self.accumulated(gradient)))
        else:
            self.put(index, gradient)

    def accumulated(self, gradient: Buffer) -> Buffer:
        """In float32, where gradients are added up in it (`_fill_param_grad_accum_attribute`)."""
        if not self.wide:
            return gradient
        return self.ledger.turn(gradient, "gradients", gradient.size_bytes // self.width * 4)

    def put(self, index: int, gradient: Buffer) -> None:
        """Into the bucket, or in line after it where it is too large for it."""
        count = self.parts.counts[index]
        if self.waiting and self.waiting_count + count > self.bucket_count:
            self.reduce()
        fits = count <= self.bucket_count
        if fits:
            self.ledger.drop(gradient)
        self.waiting.append((index, None if fits else gradient))
        self.waiting_count += count

    def reduce(self) -> None:
        """Reduce what waits: own parts are kept, others freed."""
        self.copy(4 if self.stage == 1 and self.wide else self.width)
        for index, gradient in self.waiting:
            if self.stage < 3 and self.owns(index) and not self.on_host:
                self.keep(index, gradient)
            elif gradient is not None and self.stage == 1 and not self.on_host:
                self.held.append((index, gradient))
            else:
                self.ledger.drop(gradient)
        self.waiting.clear()
        self.waiting_count = 0

    def keep(self, index: int, gradient: Buffer | None) -> None:
        """An own gradient goes into this rank's part, made with the first one."""
        if self.wide:
            # `_build_compact_grad_partition_buffer`; a large narrow one stays until the end.
            if self.part is None:
                self.part = self.ledger.take("gradients", self.parts.part_count * 4)
            if gradient is not None:
                self.held.append((index, gradient))
            return
        if self.part is None:
            # `grads_in_partition`: parameters on the border are in it as a whole.
            touched = self.parts.touched_count(self.rank)
            self.part = self.ledger.take("gradients", touched * self.width)
        self.ledger.drop(gradient)

    def copy(self, width: int) -> None:
        """Copy tensors that are sent together into one piece, unless they are in one already."""
        if self.stage == 3:
            # `reduce_scatter_coalesced`: a single gradient that divides is sent as it is.
            single = len(self.waiting) == 1 and self.waiting_count % self.parts.ranks_count == 0
            sent = 0 if single else self.waiting_count
        else:
            sent = self.sent_count()
        self.ledger.spike("communication", sent * width)

    def sent_count(self) -> int:
        """Most elements of several slices that are sent together; 0 where each goes alone.

        `allreduce_and_scatter`: slices by owner, sent as soon as they are more than a bucket.
        """
        largest_count = many = count = 0
        for size, times in self.slices():
            while times:
                wanted = (self.bucket_count - count) // size + 1
                taken = min(wanted, times)
                # Further pieces of so many alike are no larger.
                times = (times - taken) % wanted if not many else times - taken
                many, count = many + taken, count + taken * size
                if count > self.bucket_count:
                    largest_count = max(largest_count, count if many > 1 else 0)
                    many = count = 0
        return max(largest_count, count if many > 1 else 0)

    def slices(self) -> list[tuple[int, int]]:
        """Elements that wait, cut by their owner; neighbours of one owner are one.

        Returns:
            (elements, how many slices of as many follow each other).
        """
        cut: list[tuple[int, int]] = []
        size, last = self.parts.part_count, -1
        for index, _ in self.waiting:
            end = self.parts.ends[index]
            start = end - self.parts.counts[index]
            while start < end:
                owner = start // size
                times = (end - start) // size if start % size == 0 else 0
                stop = start + times * size if times else min(end, (owner + 1) * size)
                # With a float32 part, own ones stay apart: each is added on its own.
                if last == owner and not (self.wide and owner == self.rank):
                    cut[-1] = (cut[-1][0] + stop - start, 1)
                else:
                    cut.append((size, times) if times else (stop - start, 1))
                last = (stop - 1) // size
                start = stop
        return cut

    def finish(self) -> None:
        """Reduce the remaining gradients after the backward, and free all but this rank's part."""
        ledger = self.ledger
        if self.whole:
            for index, _ in self.held:
                ledger.spike("temporary", self.parts.counts[index] * 4)
            return
        if self.stage == 1:
            held, self.held = sorted(self.held, key=lambda pair: pair[0]), []
            for index, gradient in held:
                self.put(index, gradient)
        if self.waiting:
            self.reduce()
        self.after()
        if self.stage < 3:
            ledger.drop(self.bucket)
            self.bucket = None

    def updated_count(self) -> int:
        """Elements that are updated at once."""
        count = self.parts.part_count
        return min(count, _SUB_GROUP_COUNT) if self.stage == 3 else count

    def gradient(self) -> Buffer | None:
        """Make the tensor that the update reads, as wide as the updated weight; free its source.

        Returns:
            The gradient to be freed after the update; null: it is a part of what stays.
        """
        ledger = self.ledger
        if self.whole or self.part is None:
            return None
        count = self.updated_count()
        if self.wide and self.stage == 2:
            free_part, self.part = self.part, None
            return free_part
        width = 4 if self.wide else self.width
        flat = ledger.take("gradients", count * width)
        if width < self.updated_width:
            flat = ledger.turn(flat, "gradients", count * self.updated_width)
        if self.stage < 3:
            ledger.drop(self.part)
            self.part = None
        return flat

    def after(self) -> None:
        """The update is over: narrow gradients beside float32 ones go with `zero_grad`."""
        self.ledger.drop(*(gradient for _, gradient in self.held))
        self.held.clear()
