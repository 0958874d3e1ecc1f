"""Totals of ranks, added up in any grouping, are those of all ranks at once."""

from __future__ import annotations

from benchmarks import _synthetic
from chopper import pipeline
from chopper.analyzers.attribution import groups_of
from chopper.analyzers.trace.totals import LEVELS, Totals, merged, totals_of
from chopper.causes import Level


def test_totals_of_ranks_add_up_to_those_of_all() -> None:
    run = pipeline.attribute(_synthetic.run(2_000, 3))
    parts = [
        totals_of(
            run.pieces.filter(run.pieces["rank"].to_numpy() == rank),
            run.windows.filter(run.windows["rank"].to_numpy() == rank),
            {rank: (run.joined[rank].device_event, run.links[rank])},
        )
        for rank in (2, 0, 1)
    ]
    in_pairs: Totals = merged([merged(parts[:2]), parts[2]])
    levels: tuple[Level, ...] = ("rank", "step", *LEVELS)
    for level in levels:
        assert groups_of(in_pairs, level) == run.by(level)
        assert sum(g.time_ns for g in groups_of(in_pairs, level)) == run.observed_ns


def test_own_times_are_those_of_the_events_in_windows() -> None:
    run = pipeline.attribute(_synthetic.run(1_500, 1))
    events = run.joined[0].device_event.filter(run.links[0]["step_index"].is_valid())
    own = {group.key: (group.own_ns, group.events_count) for group in run.by("kernel")}
    expected = {
        name: (own_ns, count)
        for name, own_ns, count in zip(
            *events.group_by("name")
            .aggregate([("dur_ns", "sum"), ("dur_ns", "count")])
            .select(["name", "dur_ns_sum", "dur_ns_count"])
            .to_pydict()
            .values(),
            strict=True,
        )
    }
    assert own == {key: expected.get(key, (0, 0)) for key in own}
    # Kernels that others hide entirely have no time of their own in the attribution.
    assert all("AllReduce" in key for key in expected.keys() - own.keys())
