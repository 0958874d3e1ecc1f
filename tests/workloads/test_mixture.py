"""Declared mixtures, and what is read from their shards, on disk and on an S3 server."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chopper.errors import InputError
from chopper.workloads.declared_mixtures import read_mixture
from chopper.workloads.made_sources import write_sources
from chopper.workloads.mixture import VOCABULARY, Modality, SourceError, weight_at
from chopper.workloads.planning import Planner
from chopper.workloads.shards import OpenSources, Source, lengths_of, tokenize
from tests.storage.s3_server import BUCKET
from tests.waiting import PATIENCE_S
from tests.workloads.made_mixtures import draw, of_lengths, sources

TWO = """
[packing]
width = 64
[[sources]]
name = "web"
shards = "web/*.parquet"
weight = [[0, 3.0], [10, 1.0]]
[[sources]]
name = "papers"
shards = ["papers/00000.parquet", "papers/00001.parquet"]
modality = "image"
[[curriculum]]
step = 0
longest = 16
[[curriculum]]
step = 5
longest = 64
"""


def write_two(folder: Path, text: str = TWO) -> Path:
    """A declaration, and the shards that it names."""
    options: dict[str, Any] = {
        "count": 1,
        "state_bytes": 20_000,
        "latency_s": 0.0,
        "tokens": 16,
        "longest": 64,
    }
    modalities: dict[str, Modality] = {"web": "text", "papers": "image"}
    for name, modality in modalities.items():
        if not (folder / name).exists():
            write_sources(folder / f"{name}-made", seed=len(name), modality=modality, **options)
            (folder / f"{name}-made" / "web-00").rename(folder / name)
    file = folder / "mixture.toml"
    file.write_text(text)
    return file


def test_a_declared_mixture_is_drawn_as_it_says(tmp_path):
    found = read_mixture(write_two(tmp_path))
    web, papers = found.specs
    assert [weight_at(web.points, step) for step in (0, 5, 10, 99)] == [3, 2, 1, 1]
    assert (papers.modality, len(papers.shards), found.packing.width) == ("image", 2, 64)
    planner = Planner(draw(found.specs, stages=found.stages, batch=40))
    plans = {step: planner.plan(step) for step in (0, 4, 5, 40)}
    assert max(plans[0].length.max(), plans[4].length.max()) <= 16
    assert 16 < plans[5].length.max() <= 64
    drawn = [np.mean(plans[step].source == 0) for step in (0, 40)]
    assert drawn == pytest.approx([0.75, 0.5], abs=0.15)
    read = OpenSources(found.specs)
    for (source, index), length in zip(plans[40].of(1), plans[40].length[40:], strict=True):
        ids, _, _ = read.read((source, index))
        assert (len(ids), ids.min() > 0, ids.max() < VOCABULARY) == (length, True, True)
        assert (ids.max() > 256) == (source == 1)  # patches


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("width = 64", "width = '64'", "expected `int`, got `str` - at `packing.width`"),
        ("width = 64", "widht = 64", "object contains unknown field `widht` - at `packing`"),
        ('name = "web"', "", "object missing required field `name` - at `sources[0]`"),
        ('name = "web"', 'name = "papers"', "two sources are named papers"),
        ("[0, 3.0]", "[2, 3.0]", r"sources[0].weight: steps [2, 10], expected 0 first"),
        ("[10, 1.0]", "[10, -1.0]", "expected `float` >= 0.0"),
        ('"image"', '"video"', "invalid enum value 'video' - at `sources[1].modality`"),
        ("web/*", "wbe/*", "sources[0].shards: nothing matches"),
        ('"web/*', '"nosuch://web/*', "nosuch://web/*.parquet: ValueError: Protocol not known"),
        ("longest = 64", "longest = 65", "curriculum[1].longest: 65 tokens, expected at most"),
        ("step = 5", "step = 0", "curriculum: steps [0, 0], expected 0 first and ascending"),
        ("[packing]", "[packing", "expected"),
        ('name = "web"', 'name = "web"\ncontent = "txt"', "has no column 'txt' (string); it has"),
        (
            'name = "web"',
            'name = "web"\ncontent = "length"',
            "column 'length': int32, expected string",
        ),
        (
            'weight = [[0, 3.0], [10, 1.0]]\n[[sources]]\nname = "papers"',
            'weight = 0.0\n[[sources]]\nname = "papers"\nweight = 0.0',
            "all weights are 0 at step 0",
        ),
    ],
)
def test_a_declaration_that_cannot_be_is_one_line(tmp_path, old, new, message):
    assert old in TWO
    file = write_two(tmp_path, TWO.replace(old, new, 1))
    with pytest.raises(InputError) as refused:
        read_mixture(file)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_shard_that_is_cut_or_missing_is_named(tmp_path):
    file = write_two(tmp_path)
    whole = read_mixture(file).specs[0]
    shard = tmp_path / "web/00001.parquet"
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(InputError, match=r"source web: .*web/00001.parquet: ArrowInvalid: "):
        read_mixture(file)
    shard.unlink()
    with pytest.raises(SourceError, match=r"source web: .*web/00001.parquet: FileNotFoundError"):
        lengths_of(whole)
    with pytest.raises(InputError, match=r"none.toml: cannot be read \(No such file"):
        read_mixture(tmp_path / "none.toml")


def test_a_source_that_a_stage_admits_nothing_of_is_refused():
    specs = (of_lengths("a", (5, 9, 30), 2), of_lengths("b", (40, 50), 2, 1))
    stages = read_stages = draw(specs).stages
    assert Planner(draw(specs, batch=1, stages=read_stages)).left_out() == 0
    short = (replace_stage(stages[0], longest=16),)
    with pytest.raises(SourceError, match="source b has no document of at most 16 tokens"):
        Planner(draw(specs, stages=short))
    later = (specs[0], replace(specs[1], points=((0, 0.0), (9, 0.0))))
    assert Planner(draw(later, batch=1, stages=short)).left_out() == 3


def replace_stage(stage, **changes):
    return type(stage)(**{"step": stage.step, "longest": stage.longest} | changes)


def test_documents_of_a_bucket_are_those_of_the_disk(s3, tmp_path):
    here = read_mixture(write_two(tmp_path))
    s3.put(f"{tmp_path}/", "bucket/data/", recursive=True)
    text = TWO.replace('"web/*', f'"{BUCKET}/data/web/*').replace(
        '"papers/', f'"{BUCKET}/data/papers/'
    )
    away = read_mixture(write_two(tmp_path, text))
    assert all(shard.startswith(f"{BUCKET}/data/") for s in away.specs for shard in s.shards)
    assert [s.groups for s in away.specs] == [s.groups for s in here.specs]
    plan = Planner(draw(away.specs, batch=16)).plan(3)
    with ThreadPoolExecutor(8) as pool:
        far, near = (OpenSources(m.specs).read_all(plan.of(0), pool) for m in (away, here))
    assert [ids.tolist() for ids, _, _ in far] == [ids.tolist() for ids, _, _ in near]
    s3.rm("bucket/data/papers/images.bin")
    with pytest.raises(SourceError, match=r"source papers, sample 0: FileNotFoundError"):
        OpenSources(away.specs).read((1, 0))


def test_an_image_that_is_not_that_of_its_digest_is_named(tmp_path):
    papers = read_mixture(write_two(tmp_path)).specs[1]
    Source(papers).read(3)
    images = tmp_path / "papers/images.bin"
    images.write_bytes(bytes(images.stat().st_size))
    with pytest.raises(SourceError, match=r"source papers, sample 3: .* not those of sha256"):
        Source(papers).read(3)


def test_made_sources_are_skewed_around_what_was_asked_for():
    made = sources(count=24, latency_s=0.15, state_bytes=40_000)
    weight = np.array([s.points[0][1] for s in made])
    assert weight.sum() == pytest.approx(1)
    assert (weight * [s.latency_s for s in made]).sum() == pytest.approx(0.15)
    assert np.mean([s.state_bytes for s in made]) == pytest.approx(40_000, rel=1e-3)
    assert len({s.name for s in made}) == 24
    held = [sum(a.nbytes for a in Source(s)._group_of(0)[1]) for s in made]
    assert np.mean(held) == pytest.approx(40_000, rel=0.15)


def test_added_latency_differs_by_document_and_has_the_mean_of_its_source():
    spec = sources()[0]
    found = np.array([spec.latency_of(i) for i in range(1000)])
    assert found.mean() == pytest.approx(spec.latency_s, rel=0.05)
    assert found.max() > 2 * found.mean()
    assert spec.latency_of(17) == spec.latency_of(17)


def test_a_document_has_as_many_tokens_as_its_metadata_says():
    for spec in (*sources(), *sources(modality="text")):
        opened, lengths = Source(spec), lengths_of(spec)
        assert 4 <= lengths.min() <= lengths.max() <= 64
        for index in (0, 1, 7, spec.groups[0][2], spec.size - 1):
            assert len(opened.read(index)[0]) == lengths[index]


def test_text_becomes_bytes_and_an_image_its_patches():
    # A patch of 255s and one of 5s, in a row.
    pixels = np.repeat(np.array([[255, 5]], dtype=np.uint8), 16, axis=0).repeat(16, axis=1)
    image = b"P5\n32 16\n255\n" + pixels.tobytes()
    assert tokenize("aé", image).tolist() == [98, 196, 170, 257 + 51, 257 + 1]
    assert tokenize([5, 319, 320, 128_000], None).tolist() == [5, 319, 1, 1 + 127_999 % 319]
    with pytest.raises(ValueError, match="no binary PGM"):
        tokenize("a", b"P5\n32 16\n255\n")


def test_a_source_holds_two_row_groups_at_most():
    spec = of_lengths("a", tuple(range(1, 51)), 10)
    opened = Source(spec)
    for index in range(50):
        assert len(opened.read(index)[0]) == index + 1
        assert len(opened._groups) <= 2
    assert list(opened._groups) == [3, 4]


def test_documents_come_in_the_order_asked_for_also_when_read_at_once():
    items = [(3, 5), (0, 1), (3, 4), (1, 9), (0, 0)]
    one_by_one = [OpenSources(sources()).read(item)[0].tolist() for item in items]
    with ThreadPoolExecutor(5) as pool:
        at_once = [ids.tolist() for ids, _, _ in OpenSources(sources()).read_all(items, pool)]
    assert at_once == one_by_one


def test_a_source_whose_storage_fails_is_named():
    items = [(0, 1), (1, 7), (2, 2)]
    with pytest.raises(SourceError, match="source code-01, sample 7: FileNotFoundError"):
        OpenSources(sources("raises")).read_all(items, ThreadPoolExecutor(4))


def test_a_source_whose_storage_hangs_is_given_up(tmp_path):
    code = """
from concurrent.futures import ThreadPoolExecutor
from chopper.workloads import shards
from tests.workloads import made_mixtures
import os
shards.READ_TIMEOUT_S = 0.5
opened = shards.OpenSources(made_mixtures.sources("hangs"))
try:
    opened.read_all([(1, 2), (0, 1)], ThreadPoolExecutor(2))
except shards.SourceError as exc:
    print(exc, flush=True)
made_mixtures.HOME.cleanup()
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


def test_tokens_are_taken_as_they_are_and_lengths_are_checked(tmp_path):
    ids = [[5, 6, 7], [8], [9, 10]]
    table = pa.table({"ids": ids, "n": pa.array([3, 1, 2])})
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "m.toml").write_text(
        '[[sources]]\nname = "a"\nshards = "a.parquet"\nmodality = "tokens"\ncontent = "ids"\n'
        'length = "n"\n'
    )
    [spec] = read_mixture(tmp_path / "m.toml").specs
    assert lengths_of(spec).tolist() == [3, 1, 2]
    assert [Source(spec).read(i)[0].tolist() for i in range(3)] == ids
    pq.write_table(table.set_column(1, "n", pa.array([3, 0, 2])), tmp_path / "a.parquet")
    with pytest.raises(
        SourceError, match=r"source a: .*column 'n': a length is missing or below 1"
    ):
        lengths_of(spec)


def test_state_is_held_while_a_source_is_open(tmp_path):
    if not sys.platform.startswith("linux"):
        pytest.skip("/proc of Linux")
    (tmp_path / "specs").write_bytes(pickle.dumps(sources(count=1, state_bytes=60_000_000)))
    code = """
import os, pickle, sys
from pathlib import Path
from chopper.workloads.shards import OpenSources
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
opened = OpenSources(pickle.loads(Path(sys.argv[1], "specs").read_bytes()))
before = resident()
opened.open([(0, 0)])
held = resident() - before
opened.close([0])
print(held, resident() - before)
"""
    words = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    held, left = map(int, done.stdout.split())
    assert 55e6 < held < 95e6  # with what reading Parquet itself takes
    # What Arrow and malloc keep is the same however large the state is.
    assert left < held - 30e6
