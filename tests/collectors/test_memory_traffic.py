"""Traffic of the host's memory, on trees made like /sys.

No controller is needed to count: a tree may say that one has the type of the kernel's software
events, whose event 0 counts ns on a core.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chopper.collectors.host._memory import MemorySource
from chopper.collectors.host._processes import open_event
from chopper.errors import CollectorUnavailable
from tests.collectors.sampled import put, take

SOFTWARE = "1"
CPU = min(os.sched_getaffinity(0))


def controller(root: Path, name: str, kind: str, *, cpus: str = str(CPU), **events: str) -> None:
    folder = f"sys/bus/event_source/devices/{name}"
    put(root, f"{folder}/type", kind)
    put(root, f"{folder}/cpumask", cpus)
    put(root, f"{folder}/format/event", "config:0-7")
    put(root, f"{folder}/format/umask", "config:8-15")
    put(root, f"{folder}/format/rdwrmask", "config:8-9")
    for event, text in events.items():
        put(root, f"{folder}/events/{event.replace('__', '.')}", text)


def counts() -> bool:
    try:
        os.close(open_event(1, 0, -1, CPU))
    except OSError:
        return False
    return True


needs_perf = pytest.mark.skipif(
    not counts(), reason="the kernel lets this user count no events of a core (CAP_PERFMON)"
)


@needs_perf
def test_controllers_count_bytes_by_their_scale(tmp_path: Path) -> None:
    """One of Intel's with its scale in MiB; one without a scale, whose counts are 64 bytes."""
    clock = "event=0x00,umask=0x00"
    controller(
        tmp_path, "uncore_imc_0", SOFTWARE,
        cas_count_read=clock, cas_count_read__scale="6.103515625e-5", cas_count_read__unit="MiB",
        cas_count_write=clock, cas_count_write__scale="1", cas_count_write__unit="MiB",
    )  # fmt: skip
    controller(tmp_path, "uncore_imc_free_running", SOFTWARE, data_read=clock)
    controller(tmp_path, "uncore_cha_0", SOFTWARE, cas_count_read=clock)
    source = MemorySource(str(tmp_path))
    source.open()
    try:
        (scaled, read, written, total), (plain, plain_read, none, _) = take(source)
    finally:
        source.close()
    assert (scaled, plain) == (f"uncore_imc_0[cpu {CPU}]", f"uncore_imc_free_running[cpu {CPU}]")
    assert (total, none) == (None, None)
    # 6.1e-5 MiB are 64 bytes of each ns; the second event, opened a little later, counts MiB.
    assert written % (1 << 20) == 0
    assert written > 1000 * read > 0
    assert plain_read % 64 == read % 64 == 0


@needs_perf
def test_a_controller_on_two_sockets_is_two(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    controller(tmp_path, "amd_umc_3", SOFTWARE, cpus=",".join(map(str, cpus)))
    # Without a place for it, AMD's event 0x0a is event 0 of the kernel's: it counts.
    for name in ("event", "rdwrmask"):
        put(tmp_path, f"sys/bus/event_source/devices/amd_umc_3/format/{name}", "")
    source = MemorySource(str(tmp_path))
    source.open()
    found = [row[0] for row in take(source)]
    source.close()
    assert found == [f"amd_umc_3[cpu {cpu}]" for cpu in cpus]


def test_a_controller_that_does_not_count_is_named_beside_the_domains(tmp_path: Path) -> None:
    controller(tmp_path, "uncore_imc_0", "2147483647", cas_count_read="event=0x04,umask=0x03")
    scaled = {"cas_count_read": "event=0x04", "cas_count_read__scale": "1"}
    controller(tmp_path, "uncore_imc_1", SOFTWARE, **scaled, cas_count_read__unit="furlongs")
    first = put(tmp_path, "sys/fs/resctrl/mon_data/mon_L3_00/mbm_total_bytes", "640")
    put(tmp_path, "sys/fs/resctrl/mon_data/mon_L3_01/mbm_total_bytes", "Unavailable")
    source = MemorySource(str(tmp_path))
    source.open()
    assert take(source) == [("L3_00", None, None, 640)]
    first.write_text("6400\n")
    assert take(source) == [("L3_00", None, None, 6400)]
    source.close()
    absent = source.absent["memory_controller"].split("; ")
    assert absent[0].startswith("uncore_imc_0: this machine does not count it")
    assert absent[-2:] == [
        f"uncore_imc_1: has no event for {way} that is known here" for way in ("read", "write")
    ]


def test_where_nothing_counts_the_reason_says_what_would(tmp_path: Path) -> None:
    put(tmp_path, "sys/bus/event_source/devices/software/type", "1")
    with pytest.raises(CollectorUnavailable) as refused:
        MemorySource(str(tmp_path)).open()
    assert str(refused.value).startswith(f"no memory controller counts in {tmp_path}/sys/bus")
    assert "a virtual machine rarely shows them" in str(refused.value)
    assert "mount -t resctrl" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "event", "bits"),
    [
        ("uncore_imc_0", "event=0x04,umask=0x03", 0x0304),
        # Eight bits at the bottom, the rest above: 0x187 stands in bits 0 to 7 and 32.
        ("uncore_imc_1", "wide=0x187,flag", 0x187 & 0xFF | 1 << 32 | 1 << 18),
        ("amd_umc_0", "", 0x020A),
    ],
)
def test_events_are_placed_as_the_format_says(
    name: str, event: str, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def opener(kind: int, number: int, tid: int, cpu: int) -> int:
        opened.append((kind, number, tid, cpu))
        return os.open(os.devnull, os.O_RDONLY)

    monkeypatch.setattr("chopper.collectors.host._memory.open_event", opener)
    controller(tmp_path, name, "77", cpus="4", **({"cas_count_write": event} if event else {}))
    put(tmp_path, f"sys/bus/event_source/devices/{name}/format/wide", "config:0-7,32")
    put(tmp_path, f"sys/bus/event_source/devices/{name}/format/flag", "config:18")
    source = MemorySource(str(tmp_path))
    source.open()
    source.close()
    assert opened[-1] == (77, bits, -1, 4)
