"""Synthetic sources, and what is read from their shards."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from chopper.workloads.object_store import fetch, object_store
from chopper.workloads.sources import (
    OpenSources,
    Source,
    SourceError,
    lengths_of,
    tokenize,
    write_sources,
)
from tests.waiting import PATIENCE_S, until
from tests.workloads.small_mixtures import of_lengths, sources


def papers(folder: Path):
    """A source of images."""
    (spec,) = write_sources(
        folder, count=1, state_bytes=20_000, latency_s=0.0, tokens=16, longest=64, seed=6
    )
    return spec


def test_a_shard_that_is_missing_is_named(tmp_path):
    spec = papers(tmp_path)
    Path(spec.shards[1]).unlink()
    with pytest.raises(SourceError, match=r"source web-00: .*00001.parquet: FileNotFoundError"):
        lengths_of(spec)


def test_an_image_that_is_not_that_of_its_digest_is_named(tmp_path):
    spec = papers(tmp_path)
    Source(spec).read(3)
    images = tmp_path / "web-00/images.bin"
    images.write_bytes(bytes(images.stat().st_size))
    with pytest.raises(SourceError, match=r"source web-00, sample 3: .* not those of sha256"):
        Source(spec).read(3)


def test_storage_answers_at_its_rate_after_its_distance_and_only_its_own_files(tmp_path):
    folder = tmp_path / "served"
    spec = papers(folder)
    with object_store(folder, 50) as port, ThreadPoolExecutor(8) as pool:
        far = replace(spec, storage=port, latency_s=1e-3)
        began = time.perf_counter()
        read = list(pool.map(Source(far).read, range(8)))
        took_s = time.perf_counter() - began
        # The row group and 8 images, of which the first comes at once.
        assert took_s >= 8 / 50
        images = folder / spec.name / "images.bin"
        assert fetch(port, images, 3, 5, 0.05) == images.read_bytes()[3:8]
        other = tmp_path / "other"
        other.write_text("secret")
        assert fetch(port, folder / ".." / "other", 0, 6, 0.0) == b""
    assert [ids.tolist() for ids in read] == [Source(spec).read(n).tolist() for n in range(8)]
    with pytest.raises(OSError, match="refused"):
        fetch(port, images, 0, 1, 0.0)


def test_storage_ends_with_the_process_that_started_it(tmp_path):
    code = """
import os, sys
from pathlib import Path
from chopper.workloads.object_store import object_store
with object_store(Path(sys.argv[1]), 0) as port:
    print(port, flush=True)
    os._exit(9)
"""
    words = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)

    def is_gone():
        try:
            fetch(int(done.stdout), tmp_path, 0, 0, 0.0)
        except OSError:
            return True
        return False

    until(is_gone, "the end of the storage")


def test_made_sources_are_skewed_around_what_was_asked_for():
    made = sources(count=24, latency_s=0.15, state_bytes=40_000)
    weight = np.array([s.weight for s in made])
    assert weight.sum() == pytest.approx(1)
    assert (weight * [s.latency_s for s in made]).sum() == pytest.approx(0.15)
    assert np.mean([s.state_bytes for s in made]) == pytest.approx(40_000, rel=1e-3)
    assert len({s.name for s in made}) == 24
    held = [sum(a.nbytes for a in Source(s)._group_of(0)[1]) for s in made]
    assert np.mean(held) == pytest.approx(40_000, rel=0.15)


def test_a_document_has_as_many_tokens_as_its_metadata_says():
    for spec in (*sources(), *sources(modality="text")):
        opened, lengths = Source(spec), lengths_of(spec)
        assert 4 <= lengths.min() <= lengths.max() <= 64
        for index in (0, 1, 7, spec.groups[0][2], spec.size - 1):
            assert len(opened.read(index)) == lengths[index]


def test_text_becomes_bytes_and_an_image_its_patches():
    # A patch of 255s and one of 5s, in a row.
    pixels = np.repeat(np.array([[255, 5]], dtype=np.uint8), 16, axis=0).repeat(16, axis=1)
    image = b"P5\n32 16\n255\n" + pixels.tobytes()
    assert tokenize("aé", image).tolist() == [98, 196, 170, 257 + 51, 257 + 1]
    with pytest.raises(ValueError, match="no binary PGM"):
        tokenize("a", b"P5\n32 16\n255\n")


def test_a_source_holds_two_row_groups_at_most():
    spec = of_lengths("a", tuple(range(1, 51)), 10)
    opened = Source(spec)
    for index in range(50):
        assert len(opened.read(index)) == index + 1
        assert len(opened._groups) <= 2
    assert list(opened._groups) == [3, 4]


def test_documents_come_in_the_order_asked_for_also_when_read_at_once():
    items = [(3, 5), (0, 1), (3, 4), (1, 9), (0, 0)]
    one_by_one = [OpenSources(sources()).read(item).tolist() for item in items]
    with ThreadPoolExecutor(5) as pool:
        at_once = [ids.tolist() for ids in OpenSources(sources()).read_all(items, pool)]
    assert at_once == one_by_one


def test_a_source_whose_storage_hangs_is_given_up(tmp_path):
    code = """
from concurrent.futures import ThreadPoolExecutor
from chopper.workloads import sources
from tests.workloads import small_mixtures
import os
sources.READ_TIMEOUT_S = 0.5
opened = sources.OpenSources(small_mixtures.sources("hangs"))
try:
    opened.read_all([(1, 2), (0, 1)], ThreadPoolExecutor(2))
except sources.SourceError as exc:
    print(exc, flush=True)
small_mixtures.HOME.cleanup()
os._exit(0)  # the thread that waits for storage never ends
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert not [*tmp_path.glob("chopper-mixtures-*")]
    assert done.stdout == "source code-01, sample 2: no answer for 0 s\n"


def test_state_is_held_while_a_source_is_open(tmp_path):
    if not sys.platform.startswith("linux"):
        pytest.skip("/proc of Linux")
    (tmp_path / "specs").write_bytes(pickle.dumps(sources(count=1, state_bytes=60_000_000)))
    code = """
import os, pickle, sys
from pathlib import Path
from chopper.workloads.sources import OpenSources
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
opened = OpenSources(pickle.loads(Path(sys.argv[1], "specs").read_bytes()))
before = resident()
opened.open([(0, 0)])
print(resident() - before)
"""
    words = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    assert 55e6 < int(done.stdout) < 95e6  # with what reading Parquet itself takes
