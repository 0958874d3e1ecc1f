from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from chopper import experiment as ex  # noqa: E402
from chopper._workloads import WorkloadUnavailable, prepare  # noqa: E402
from chopper.reports import experiment as report  # noqa: E402


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (2, ["--m", "100"], "--m 100: its rows do not divide into 2 ranks of 8 chunks"),
        (3, ["--m", "96", "--k", "32"], "--k 32: does not divide among 3 ranks"),
        (1, [], "one rank has nobody to exchange with"),
        (2, ["--m", "1048576", "--n", "1048576"], "take smaller matrices"),
    ],
)
def test_impossible_shapes_are_refused(ranks, options, message):
    with pytest.raises(WorkloadUnavailable, match=message):
        prepare("overlap", ranks=ranks, options=[*options, "--device", "cpu"])


def test_variants_for_gpus_are_left_out_with_a_note_or_refused():
    launch = prepare("overlap", options=["--device", "cpu"])
    assert [v.name for v in launch.variants] == ["sequential", "library", "chunked", "unswizzled"]
    assert any("left out, for they need a GPU: triton" in note for note in launch.notes)
    with pytest.raises(WorkloadUnavailable, match="triton needs a GPU, none is here"):
        prepare("overlap", variants="triton", options=["--device", "cpu"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "variants"), [("1gbit", "sequential,chunked"), ("none", "library,unswizzled")]
)
def test_every_order_computes_the_same(tmp_path, rate, variants):
    from chopper.cli.run_ import command

    words = ["overlap", "-o", str(tmp_path / "run"), "--repeats", "1", "--steps", "2", "--json"]
    words += ["--variants", variants]
    words += ["--", "--m", "64", "--k", "96", "--n", "40", "--chunks", "4", "--rate", rate]
    done = CliRunner().invoke(
        command, [*words, "--device", "cpu"], standalone_mode=False, catch_exceptions=False
    )
    assert done.return_value == 0, done.output
    document = json.loads(done.stdout)
    found = ex.load(tmp_path / "run")
    for variant in found.variants:
        for operation in ("all_gather_matmul", "matmul_reduce_scatter"):
            # Checked by the workload itself: it ends when a variant is wrong.
            error = found.find("relative_error", variant, operation=operation)
            assert error is not None
            assert 0 <= error.estimate.value < 1e-5
    claims = {(h["system"], h["claim"].partition(":")[0]) for h in document["headlines"]}
    operations = ("all gather matmul", "matmul reduce scatter")
    assert claims == ({("Triton-distributed", o) for o in operations if "chunked" in variants})
    assert variants.partition(",")[0] in report.render(found, "html")
