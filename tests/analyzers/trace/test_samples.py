"""Samples find their rank: by UUID, by ordinal, by being the only ones."""

from __future__ import annotations

import pyarrow as pa
import pytest

from chopper.analyzers.trace.samples import (
    canonical_uuid,
    core_wait_ratio,
    of_rank,
    per_device,
    thread_growth,
)
from chopper.storage.manifest import Device, RankManifest, RunManifest
from chopper.storage.run import Run
from chopper.tables import TABLES
from tests.made_runs import put_table

UUID = "1f2e3d4c-0000-0000-0000-00000000000a"
OTHER = "1f2e3d4c-0000-0000-0000-00000000000b"


def clocks(*rows: tuple[int, int, str | None]) -> pa.Table:
    """(time, device, uuid) with a clock of the device's number plus one in GHz."""
    return pa.Table.from_pylist(
        [
            {
                "time_ns": time_ns,
                "span_ns": 10,
                "device_id": device,
                "device_uuid": uuid,
                "sm_clock_hz": (device + 1) * 10**9,
            }
            for time_ns, device, uuid in rows
        ],
        schema=TABLES["device_clock"].arrow,
    )


def a_run(parts: list[RankManifest], tables: dict[int, pa.Table]) -> Run:
    run = Run(RunManifest(kind="recorded", name="a", ranks=parts), None)
    for rank, table in tables.items():
        put_table(run, rank, "device_clock", table)
    return run


def part(rank: int, uuid: str | None = None, host: str | None = "one") -> RankManifest:
    return RankManifest(
        rank=rank,
        hostname=host,
        device_id=rank,
        devices=[Device(device_id=rank, uuid=uuid)],
    )


def test_the_hosts_samples_are_divided_by_uuid_whatever_the_order_of_devices() -> None:
    # CUDA numbers devices by speed, NVML by address: the ordinals do not agree.
    shared = clocks((20, 0, f"GPU-{OTHER}"), (10, 1, f"GPU-{UUID}"), (11, 0, f"GPU-{OTHER}"))
    run = a_run([part(0, UUID), part(1, OTHER.upper())], {0: shared})
    assert of_rank(run, 0, "device_clock")["time_ns"].to_pylist() == [10]
    second = of_rank(run, 1, "device_clock")
    assert second["time_ns"].to_pylist() == [11, 20]
    # The rank's kernels are on device 1: its samples say so too, whatever the driver calls it.
    assert second["device_id"].to_pylist() == [1, 1]
    assert second["sm_clock_hz"].to_pylist() == [10**9] * 2


def test_times_that_passed_twice_are_of_nobody() -> None:
    """A reading each 100 ms; after 4 s the host's clock is set back by 2 s, then goes on."""
    ms = 1_000_000
    taken = [*range(0, 4000, 100), *range(2000, 6000, 100)]
    run = a_run([part(0)], {0: clocks(*((t * ms, 0, None) for t in taken))})
    found = [t // ms for t in of_rank(run, 0, "device_clock")["time_ns"].to_pylist()]
    assert found == [*range(0, 2000, 100), *range(4000, 6000, 100)]


def test_rows_of_threads_that_passed_each_other_are_all_kept() -> None:
    ms = 1_000_000
    run = a_run([part(0)], {0: clocks(*((t * ms, 0, None) for t in (0, 200, 100, 300)))})
    found = of_rank(run, 0, "device_clock")["time_ns"].to_pylist()
    assert found == [0, 100 * ms, 200 * ms, 300 * ms]


def test_a_device_that_was_not_sampled_never_gets_anothers_clock() -> None:
    run = a_run([part(0, UUID)], {0: clocks((10, 0, f"GPU-{OTHER}"))})
    assert of_rank(run, 0, "device_clock").num_rows == 0


@pytest.mark.parametrize("uuid", [None, UUID])
def test_without_uuids_the_ordinal_decides(uuid: str | None) -> None:
    run = a_run([part(0, uuid), part(1, uuid)], {0: clocks((10, 0, None), (11, 1, None))})
    assert of_rank(run, 1, "device_clock")["sm_clock_hz"].to_pylist() == [2 * 10**9]


def test_ranks_that_share_an_ordinal_take_nothing_from_each_other() -> None:
    parts = [
        RankManifest(rank=r, hostname="one", device_id=0, devices=[Device(device_id=0)])
        for r in range(2)
    ]
    run = a_run(parts, {0: clocks((10, 0, None))})
    assert of_rank(run, 0, "device_clock").num_rows == 1
    assert of_rank(run, 1, "device_clock").num_rows == 0


def test_another_hosts_samples_do_not_count() -> None:
    run = a_run([part(0, host="one"), part(1, host="two")], {0: clocks((10, 1, None))})
    assert of_rank(run, 1, "device_clock").num_rows == 0
    unknown = a_run([part(0, host=None), part(1, host=None)], {0: clocks((10, 1, None))})
    assert of_rank(unknown, 1, "device_clock").num_rows == 0


def test_a_rank_without_a_device_takes_the_only_one_there_is() -> None:
    alone = RankManifest(rank=0)
    assert of_rank(a_run([alone], {0: clocks((10, 3, None))}), 0, "device_clock").num_rows == 1
    two = clocks((10, 3, None), (10, 4, None))
    assert of_rank(a_run([alone], {0: two}), 0, "device_clock").num_rows == 0


def test_a_rank_that_computes_on_the_host_takes_no_devices_samples() -> None:
    """Recorded with torch, which knew of no device at the end; or beside a rank that has it."""
    readings = clocks((10, 3, UUID))
    host = RankManifest(rank=0, environment={"torch": "2.13"}, status="complete")
    run = a_run([host], {0: readings})
    assert of_rank(run, 0, "device_clock").num_rows == 0
    assert per_device(run, 0, "device_clock") == []
    # A log that was imported beside such a trace says nothing of who computes on what.
    run.manifest.kind = "imported"
    assert of_rank(run, 0, "device_clock").num_rows == 1
    # Killed before it could say so.
    host.status, run.manifest.kind = "running", "recorded"
    assert of_rank(run, 0, "device_clock").num_rows == 1
    beside = a_run([RankManifest(rank=0, hostname="one"), part(1, UUID)], {0: readings})
    assert of_rank(beside, 0, "device_clock").num_rows == 0
    assert of_rank(beside, 1, "device_clock").num_rows == 1


def test_a_part_of_a_device_has_the_samples_of_the_whole() -> None:
    """torch names the MIG device; its PCI address is that of the device that was sampled."""
    mig = Device(device_id=0, uuid="MIG-7f3e", pci_address="0000:1b:00")
    ranks = [RankManifest(rank=0, hostname="one", device_id=0, devices=[mig])]
    run = a_run(ranks, {0: clocks((10, 4, f"GPU-{UUID}"), (10, 5, f"GPU-{OTHER}"))})
    assert of_rank(run, 0, "device_clock").num_rows == 0
    limit = {"time_ns": 1, "span_ns": 0, "device_id": 4, "device_uuid": f"GPU-{UUID}"}
    other = {**limit, "device_id": 5, "device_uuid": f"GPU-{OTHER}", "pci_address": "0000:1c:00.0"}

    def limits(address: str | None) -> pa.Table:
        rows = [{**limit, "pci_address": address}, other]
        return pa.Table.from_pylist(rows, schema=TABLES["device_limit"].arrow)

    put_table(run, 0, "device_limit", limits("00000000:1B:00.0"))
    [row] = of_rank(run, 0, "device_clock").to_pylist()
    assert (row["device_id"], row["sm_clock_hz"]) == (0, 5 * 10**9)
    for unknown in (None, "0000:1d:00.0", "?"):
        put_table(run, 0, "device_limit", limits(unknown))
        assert of_rank(run, 0, "device_clock").num_rows == 0
    # Another device of that address, whose name is not known: which one is it?
    nameless = {**limit, "device_id": 6, "device_uuid": None, "pci_address": "0000:1b:00.1"}
    both = [{**limit, "pci_address": "0000:1b:00.0"}, nameless]
    put_table(run, 0, "device_limit", pa.Table.from_pylist(both, TABLES["device_limit"].arrow))
    assert of_rank(run, 0, "device_clock").num_rows == 0


def test_uuids_are_the_same_however_they_are_written() -> None:
    assert canonical_uuid(f"GPU-{UUID}") == canonical_uuid(UUID.upper())
    # torch on ROCm shows the characters of HIP's UUID as bytes.
    shown = "GPU-e1e8b5c8c3a9f2d1"
    assert canonical_uuid("65316538-6235-6338-6333-613966326431") == canonical_uuid(shown)


def test_nothing_recorded_is_an_empty_table() -> None:
    assert of_rank(a_run([part(0)], {}), 0, "device_clock").num_rows == 0


def waits(*rows: tuple[int, int | None], rank: int = 0, pid: int = 7) -> pa.Table:
    """(time in ms, run delay in ms) of a rank's process."""
    return pa.Table.from_pylist(
        [
            {
                "time_ns": at * 10**6,
                "span_ns": 0,
                "rank": rank,
                "pid": pid,
                "run_delay_ns": None if delay is None else delay * 10**6,
            }
            for at, delay in rows
        ],
        schema=TABLES["process"].arrow,
    )


def test_waiting_for_a_core_is_the_growth_within_the_time() -> None:
    run = a_run([part(0), part(1)], {})
    put_table(
        run,
        0,
        "process",
        pa.concat_tables([waits((0, 0), (100, 90), (200, 100), (300, 130), (400, 999))]),
    )
    assert core_wait_ratio(run, 0, 90 * 10**6, 310 * 10**6) == pytest.approx(0.2)
    assert core_wait_ratio(run, 0, 150 * 10**6, 250 * 10**6) is None
    assert core_wait_ratio(run, 1, 0, 10**12) is None
    put_table(run, 0, "process", waits((0, 0), (100, 122)))  # read later than its time says
    assert core_wait_ratio(run, 0, 0, 10**9) == 1.0


def test_a_counter_that_restarts_or_is_not_there_tells_nothing() -> None:
    run = a_run([part(0)], {})
    put_table(run, 0, "process", waits((0, 50), (100, 10)))
    assert core_wait_ratio(run, 0, 0, 10**9) is None
    put_table(run, 0, "process", waits((0, None), (100, None)))
    assert core_wait_ratio(run, 0, 0, 10**9) is None


def test_another_rank_of_the_host_may_hold_the_samples() -> None:
    run = a_run([part(0), part(1)], {})
    put_table(run, 0, "process", waits((0, 0), (100, 50), rank=1))
    assert core_wait_ratio(run, 1, 0, 10**9) == pytest.approx(0.5)


def test_a_log_of_several_devices_is_told_device_by_device() -> None:
    two = clocks((20, 1, None), (10, 3, None), (30, 3, None))
    run = a_run([RankManifest(rank=0)], {0: two})
    assert [(n, t["time_ns"].to_pylist()) for n, t in per_device(run, 0, "device_clock")] == [
        (1, [20]),
        (3, [10, 30]),
    ]
    # A rank that names its device gets that one, or none.
    own = a_run([part(1)], {1: two})
    assert [n for n, _ in per_device(own, 1, "device_clock")] == [None]
    assert per_device(a_run([part(2)], {2: two}), 2, "device_clock") == []


def test_a_device_has_one_name_in_all_tables_of_a_rank_that_names_none() -> None:
    """Two devices have clocks, one of them counters as well: not a third device's counters."""
    run = a_run([RankManifest(rank=0)], {0: clocks((10, 1, None), (20, 3, None))})
    counter = {"time_ns": 10, "span_ns": 1, "device_id": 3, "energy_j": 1.0}
    put_table(
        run,
        0,
        "device_counter",
        pa.Table.from_pylist([counter], schema=TABLES["device_counter"].arrow),
    )
    assert [n for n, _ in per_device(run, 0, "device_counter")] == [3]
    assert [n for n, _ in per_device(run, 0, "device_clock")] == [1, 3]


def delays(*rows: tuple[int, int, int]) -> pa.Table:
    """(time in ms, thread, run delay in ms) of rank 0."""
    return pa.Table.from_pylist(
        [
            {
                "time_ns": at * 10**6,
                "span_ns": 0,
                "rank": 0,
                "pid": 7,
                "tid": tid,
                "name": f"thread {tid}",
                "run_ns": 0,
                "run_delay_ns": delay * 10**6,
                "slice_count": 0,
            }
            for at, tid, delay in rows
        ],
        schema=TABLES["process_thread"].arrow,
    )


def test_the_waiting_of_threads_between_two_moments() -> None:
    run = a_run([part(0)], {})
    put_table(
        run, 0, "process_thread",
        delays((0, 7, 5), (0, 8, 0), (0, 9, 0),
               (900, 7, 105), (1000, 8, 300), (1000, 9, 900), (2500, 8, 999)),
    )  # fmt: skip
    # What comes after the time does not count.
    grown = {t.tid: (t.name, t.wait_ns) for t in thread_growth(run, 0, 100 * 10**6, 2100 * 10**6)}
    assert grown[8] == ("thread 8", round(0.15 * 2 * 10**9))
    assert grown[7] == ("thread 7", round(0.05 * 2 * 10**9))
    assert grown.keys() == {7, 8, 9}
