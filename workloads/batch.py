"""The batch of a rank in one step, whoever loaded it: rows of documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chopper.workloads.planning import pack
from chopper.workloads.sources import Ints, Sample, Tokens, mark

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
        """Return the position of each token in its document: [rows, width]."""
        out = np.zeros(self.tokens.shape, np.int64)
        for row, lengths in zip(out, self.documents, strict=True):
            row[: sum(lengths)] = np.concatenate([np.arange(n) for n in lengths])
        return out

    def targets(self) -> Ints:
        """Return the token that follows in the same document: [rows, width]."""
        out = np.full(self.tokens.shape, IGNORED, np.int64)
        for row, tokens, lengths in zip(out, self.tokens, self.documents, strict=True):
            row[: sum(lengths) - 1] = tokens[1 : sum(lengths)]
            # What follows the last token of a document is another one.
            row[np.cumsum(lengths) - 1] = IGNORED
        return out


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
