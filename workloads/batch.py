"""The batch of a rank in one step, whoever loaded it: rows of documents, or its slice of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chopper.workloads.mixture import Ints, Sample, Tokens
from chopper.workloads.planning import pack
from chopper.workloads.shards import mark

IGNORED = -100
"""Target where nothing is predicted, as torch's cross entropy has it."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Documents that one data-parallel rank trains on in one step."""

    tokens: NDArray[np.uint16]
    """[rows, width], 0 where nothing is."""
    documents: list[list[int]]
    """Per row, the lengths of the documents that it holds, one after the other from its start."""
    samples: list[Sample]
    step: int
    step_tokens: int
    """Tokens of all ranks together."""

    def marked(self) -> list[tuple[int, int, int]]:
        """Each document's source and index, as asked for, and the mark of what came."""
        marks = [
            mark(part)
            for row, lengths in zip(self.tokens, self.documents, strict=True)
            for part in np.split(row, np.cumsum(lengths))[:-1]
        ]
        return [(*sample, came) for sample, came in zip(self.samples, marks, strict=True)]

    def places(self) -> Ints:
        """[rows, width]: the place of each token in its document."""
        out = np.zeros(self.tokens.shape, np.int64)
        for row, lengths in zip(out, self.documents, strict=True):
            row[: sum(lengths)] = np.concatenate([np.arange(n) for n in lengths])
        return out

    def targets(self) -> Ints:
        """[rows, width]: the token that follows in the same document."""
        out = np.full(self.tokens.shape, IGNORED, np.int64)
        for row, tokens, lengths in zip(out, self.tokens, self.documents, strict=True):
            row[: sum(lengths) - 1] = tokens[1 : sum(lengths)]
            # What follows the last token of a document is another one.
            row[np.cumsum(lengths) - 1] = IGNORED
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A rank's part of a batch that several ranks compute together."""

    tokens: NDArray[np.uint16] | None
    """[rows, width ÷ context ranks]; only the first stage of a pipeline embeds them."""
    places: Ints
    targets: Ints | None
    """Only the last stage has a loss."""
    documents: list[list[int]]
    """Of whole rows: attention crosses slices."""
    step: int
    step_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Ranks that share a batch, innermost first: tensor, context and pipeline parallel ones."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1

    @property
    def ranks(self) -> int:
        """Ranks that share a batch."""
        return self.tensor * self.context * self.pipeline

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """Data-parallel rank, pipeline stage, context and tensor rank."""
        rank, tensor = divmod(rank, self.tensor)
        rank, context = divmod(rank, self.context)
        data, stage = divmod(rank, self.pipeline)
        return data, stage, context, tensor

    def reader(self, rank: int) -> int:
        """The rank that reads for a rank: the first of its tensor-parallel group, which need the
        same.
        """
        return rank - rank % self.tensor

    def slice_of(self, batch: Batch, rank: int) -> Slice:
        """A rank's part of its batch.

        A row is cut into two chunks for each context rank, of which the n-th from the front and the
        n-th from the back are one's: causal attention then costs all the same.
        """
        _, stage, context, _ = self.coordinates(rank)
        width = batch.tokens.shape[1]
        if width % (2 * self.context):
            raise ValueError(
                f"rows of {width} tokens cannot be cut for {self.context} context ranks: expected "
                f"a multiple of {2 * self.context}"
            )
        chunk = width // (2 * self.context)
        back = 2 * self.context - 1 - context

        def cut(array: NDArray[Any]) -> NDArray[Any]:
            if self.context == 1:
                return array
            both = [array[:, at * chunk : (at + 1) * chunk] for at in (context, back)]
            return np.concatenate(both, axis=1)

        return Slice(
            tokens=cut(batch.tokens) if stage == 0 else None,
            places=cut(batch.places()),
            targets=cut(batch.targets()) if stage == self.pipeline - 1 else None,
            documents=batch.documents,
            step=batch.step,
            step_tokens=batch.step_tokens,
        )


def batch_of(
    samples: Sequence[Sample],
    documents: Sequence[Tokens],
    *,
    width: int | None,
    step: int = 0,
    step_tokens: int = 1,
) -> Batch:
    """Pack documents into rows of ``width``; None: a row for each, as long as the longest."""
    lengths = np.array([len(ids) for ids in documents])
    rows = [[d] for d in range(len(documents))] if width is None else pack(lengths, width)
    tokens = np.zeros((len(rows), width or lengths.max(initial=0)), dtype=np.uint16)
    for row, held in zip(tokens, rows, strict=True):
        text = np.concatenate([documents[d] for d in held])
        row[: len(text)] = text
    return Batch(
        tokens=tokens,
        documents=[lengths[held].tolist() for held in rows],
        samples=[samples[d] for held in rows for d in held],
        step=step,
        step_tokens=step_tokens,
    )
