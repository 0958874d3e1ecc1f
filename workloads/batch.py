"""Rows of documents: what a rank trains on in one step, whoever loaded it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chopper.workloads.mixture import mark


@dataclass(frozen=True, slots=True)
class Batch:
    """Documents that one rank trains on in one step."""

    step: int
    tokens: NDArray[np.uint16]
    """[rows, width], 0 where nothing is."""
    documents: list[list[int]]
    """Per row, the lengths of the documents that it holds, one after the other from its start."""
    samples: list[tuple[int, int]]
    """(source, index) of each document, in the order of the rows."""
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


def packed(
    step: int,
    rows: list[list[NDArray[np.uint16]]],
    samples: list[tuple[int, int]],
    *,
    width: int,
    step_tokens: int,
) -> Batch:
    """Rows of documents as one array, padded at their ends."""
    tokens = np.zeros((len(rows), width), dtype=np.uint16)
    for row, documents in zip(tokens, rows, strict=True):
        text = np.concatenate(documents)
        row[: len(text)] = text
    return Batch(step, tokens, [[len(d) for d in row] for row in rows], samples, step_tokens)
