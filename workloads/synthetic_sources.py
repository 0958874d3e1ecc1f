"""Synthetic sources, written for a run: real Parquet shards and images, as different as real ones.

Their text is random bytes and their images are noise; what is drawn how often, how long documents
are and how far the storage is differs by source, as in mixtures that are trained on.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from chopper.workloads.sources import PATCH, Ints, Modality, SourceSpec

_KINDS = ("web", "code", "books", "chat", "papers", "forum", "news", "math")
_GRIDS = np.array([(h, w) for h in range(1, 64) for w in (h, h + 1)])
"""Patches of images: height, width."""
_COPIES = 4
"""Images of each size."""
_MOST_PATCHES = 512
_SHARDS = 2
_PLACE_BYTES = 98
"""Bytes of an image's place and digest in a decoded row group."""


def write_sources(
    folder: Path,
    *,
    count: int,
    state_bytes: int,
    latency_s: float,
    tokens: int,
    longest: int,
    seed: int,
    modality: Modality = "image",
    fault: str = "none",
) -> tuple[SourceSpec, ...]:
    """Write ``count`` sources around the given means, skewed, with a row group in each shard.

    A row group is half to one and a half times the mean state, a source's latency a third to three
    times that of what is read, weights follow a power law, median lengths are half to twice
    ``tokens``. ``fault``: storage of the second source ``raises`` (its images are missing) or
    ``hangs`` (they are a pipe that nobody writes to).
    """
    rng = np.random.default_rng((seed, count))
    rank = rng.permutation(count) + 1
    weight = rank**-0.7 / np.sum(rank**-0.7)
    latency = np.exp(rng.uniform(-1.1, 1.1, count))
    latency *= latency_s / np.sum(latency * weight)
    state = np.linspace(0.5, 1.5, count)[rng.permutation(count)] if count > 1 else np.ones(1)
    median = tokens * np.exp2(rng.uniform(-1, 1, count))
    specs = []
    for number in range(count):
        name = f"{_KINDS[number % len(_KINDS)]}-{number:02d}"
        shards, rows = _write(
            folder / name,
            rng=np.random.default_rng((seed, number)),
            state_bytes=int(state_bytes * state[number]),
            median=max(4.0, median[number]),
            longest=longest,
            modality=modality,
        )
        specs.append(
            SourceSpec(
                name=name,
                number=number,
                shards=shards,
                groups=tuple((shard, 0, rows) for shard in range(_SHARDS)),
                weight=float(weight[number]),
                state_bytes=int(state_bytes * state[number]),
                modality=modality,
                latency_s=float(latency[number]),
                seed=seed,
            )
        )
        if fault in ("raises", "hangs") and number == min(1, count - 1):
            images = folder / name / "images.bin"
            images.unlink()
            if fault == "hangs":
                os.mkfifo(images)
    return tuple(specs)


def _write(
    folder: Path,
    *,
    rng: np.random.Generator,
    state_bytes: int,
    median: float,
    longest: int,
    modality: Modality,
) -> tuple[tuple[str, ...], int]:
    """Write the shards of a source; return their paths and the documents of each."""
    folder.mkdir(parents=True)
    # Text takes a byte for a token, and half of a document is its image's.
    row_bytes = 4 + 1.4 * median if modality == "text" else 4 + 0.7 * median + _PLACE_BYTES
    rows = max(16, int(state_bytes / row_bytes))
    places = _write_images(folder, rng, longest) if modality == "image" else None
    shards = []
    for shard in range(_SHARDS):
        drawn = median * np.exp(0.9 * rng.standard_normal(rows))
        lengths: Ints = np.clip(drawn, 4, longest).astype(np.int64)
        columns: dict[str, pa.Array] = {"length": pa.array(lengths, pa.int32())}
        texts = lengths
        if places is not None:
            patches = _GRIDS.prod(1)[: len(places["offset"]) // _COPIES]
            # About half of a document's tokens are its image's.
            grid = np.searchsorted(patches, lengths // 2, side="right") - 1
            texts = lengths - patches[grid]
            image = pa.array(grid * _COPIES + rng.integers(_COPIES, size=rows))
            columns |= {name: values.take(image) for name, values in places.items()}
        columns["text"] = _texts(rng, texts)
        path = folder / f"{shard:05d}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=rows, compression="snappy")
        shards.append(str(path))
    return tuple(shards), rows


def _write_images(folder: Path, rng: np.random.Generator, longest: int) -> dict[str, pa.Array]:
    """Write all images of a source into one file, and return where each lies."""
    offsets, sizes, digests = [], [], []
    with (folder / "images.bin").open("wb") as file:
        for height, width in _GRIDS[_GRIDS.prod(1) <= min(longest, _MOST_PATCHES)].tolist():
            for _ in range(_COPIES):
                pixels = rng.integers(256, size=(height * PATCH, width * PATCH), dtype=np.uint8)
                image = f"P5\n{width * PATCH} {height * PATCH}\n255\n".encode() + pixels.tobytes()
                offsets.append(file.tell())
                sizes.append(len(image))
                digests.append(hashlib.sha256(image).hexdigest())
                file.write(image)
    return {
        "media": pa.array(["images.bin"] * len(offsets)),
        "offset": pa.array(offsets),
        "size": pa.array(sizes),
        "sha256": pa.array(digests),
    }


def _texts(rng: np.random.Generator, lengths: Ints) -> pa.Array:
    """Draw random texts of these lengths, in bytes."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    letters = rng.integers(97, 123, size=1 << 16, dtype=np.uint8)
    data = np.resize(letters, int(offsets[-1]))
    return pa.StringArray.from_buffers(len(lengths), pa.py_buffer(offsets), pa.py_buffer(data))
