"""The primitives between processes: real shared memory, Triton's interpreter, 2 to 4 ranks."""

from __future__ import annotations

import re

import pytest

CASES = "tests.workloads.primitive_cases"


@pytest.mark.parametrize(
    ("of", "count", "steps"),
    [
        (3, 37, 10),
        *(pytest.param(*rows, marks=pytest.mark.long) for rows in ((2, 1, 30), (4, 64, 10))),
    ],
)
def test_rows_come_whole_in_every_step_whoever_is_late(ranks, of, count, steps):
    assert ranks.run(CASES, "swap", of, steps=steps, count=count, seed=of) == ["done"] * of


def test_a_rank_that_is_killed_ends_the_wait_of_the_others_with_its_name(ranks):
    *waiting, killed = ranks.run(CASES, "swap", 3, steps=6, count=8, lost=[3, "killed"])
    assert killed is None
    for me, line in enumerate(waiting):
        assert re.fullmatch(
            rf"swap: rank {me} waited \d+\.\d s in step 4 for .*rank 2 \(process \d+, which has "
            r"ended\): 2 of 2 parts have not come.*\. Look for the first error among the ranks",
            line,
        ), line


def test_a_rank_that_does_not_send_ends_the_wait_of_the_others_at_the_deadline(ranks):
    *waiting, late = ranks.run(CASES, "swap", 3, steps=4, count=8, lost=[2, "late"])
    assert late == "late"
    for me, line in enumerate(waiting):
        found = re.fullmatch(
            rf"swap: rank {me} waited (\d+\.\d) s in step 3 for .*rank 2 \(process \d+, which "
            r"still runs\): 2 of 2 parts have not come.*",
            line,
        )
        assert found, line
        assert float(found[1]) >= 0.5


def test_a_rank_may_end_when_it_has_sent_all(ranks):
    *others, left = ranks.run(CASES, "swap", 3, steps=3, count=8, lost=[2, "left"])
    assert left is None
    assert others == ["done"] * 2
