"""Checks of a run before a number is believed, and the claims that each can withhold.

A check that finds something leaves a :class:`chopper.storage.manifest.Finding` with its code. A
finding may withhold claims: those are null or flagged in the attribution, and the reports say so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from chopper.storage.manifest import Finding


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that an attribution says, and may have to leave unsaid."""

    id: str
    title: str
    effect: str
    """What stands in its place."""
    causes: tuple[str, ...] = ()
    """Causes, with all below them, whose numbers it is about."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check."""

    code: str
    title: str
    doc: str
    """What was found when it speaks, and what that means for the numbers."""
    withholds: tuple[str, ...] = ()
    """Claims that it can withhold."""


@dataclass(frozen=True, slots=True)
class Withheld:
    """A claim that is withheld, and why."""

    claim: Claim
    reason: str
    codes: tuple[str, ...]
    ranks: tuple[int, ...] | None
    """Ranks that it is withheld of; None: the whole run."""


_CLAIMS = (
    Claim("attribution", "Attribution of a rank", "The rank has no windows and no time."),
    Claim(
        "compute.ideal",
        "Ideal time",
        "`ideal_ns` is null, and so is everything that is measured against it: distance from the "
        "ceiling, MFU, speed-up.",
        ("compute.ideal",),
    ),
    Claim(
        "compute.clock",
        "Clock",
        "No time is blamed on a low clock; it stays in the rest of the efficiency, which says so.",
        ("compute.clock",),
    ),
    Claim(
        "compute.contention",
        "Contention",
        "No time of these kernels is blamed on others that ran beside them.",
        ("compute.contention",),
    ),
    Claim(
        "compute.counters",
        "Instructions and busy matrix units",
        "The counters are not used; the efficiency is not split by them.",
        ("compute.efficiency.instructions", "compute.efficiency.tensor_core"),
    ),
    Claim(
        "communication.wait",
        "Straggler wait",
        "Waiting is not told from transfer: the time is `communication.unseparated`, and no rank "
        "is called late.",
        ("communication.wait", "communication.transfer"),
    ),
    Claim(
        "idle.causes",
        "Causes of idle time",
        "The idle time stands, the causes below it are flagged: the launches that would tell are "
        "not in the trace.",
        ("idle.dependency", "idle.launch_latency", "idle.call", "idle.preparation"),
    ),
    Claim(
        "confidence",
        "Confidence intervals",
        "`ci95_ns` is null: there are too few steps to resample.",
    ),
)
CLAIMS: dict[str, Claim] = {claim.id: claim for claim in _CLAIMS}

_IDEAL = ("compute.ideal",)
_WAIT = ("communication.wait",)
_CHECKS = (
    # -- is there something to attribute
    Check("trace.absent", "No kernel trace", "A rank recorded no trace.", ("attribution",)),
    Check(
        "trace.unreadable", "Unreadable trace", "A rank's trace cannot be read.", ("attribution",)
    ),
    Check("trace.no_events", "Nothing ran", "No event that could be attributed.", ("attribution",)),
    Check(
        "trace.no_device_events",
        "Device events missing",
        "The trace lists devices and has no event of theirs: the host's operators are attributed "
        "instead, and how fast the device could have been is not claimed.",
        _IDEAL,
    ),
    # -- damage
    Check(
        "trace.truncated",
        "Truncated file",
        "The file ends in the middle. Everything before is used; the last step may lack events.",
    ),
    Check(
        "trace.truncated_gzip",
        "Damaged compression",
        "The compressed stream is damaged; what could be unpacked before that is used.",
    ),
    Check(
        "trace.concatenated", "Several documents", "Several JSON texts in one file; all are used."
    ),
    Check("trace.trailing_text", "Text after the trace", "What follows the JSON is left out."),
    Check(
        "trace.not_strict", "Not strict JSON", "Repaired while reading: trailing commas and such."
    ),
    Check("trace.nan", "NaN in the trace", "Numbers that JSON does not have, taken as unknown."),
    Check("trace.byte_order_mark", "Byte order mark", "Left out."),
    Check("trace.utf16", "UTF-16", "Converted to UTF-8."),
    Check(
        "trace.base_time", "Odd base time", "The time base is not one; times are taken without it."
    ),
    Check("event.without_ts", "Events without time", "Dropped: they have no place."),
    Check("event.without_name", "Events without name", "Dropped."),
    Check("event.without_dur", "Events without duration", "Taken as points in time."),
    Check("event.without_ph", "Events without phase", "Dropped: what they are is not known."),
    Check("event.without_category", "Events without category", "Not used."),
    Check("event.unknown_category", "Events of unknown categories", "Not used; they are named."),
    Check("event.not_an_object", "Entries that are no events", "Dropped."),
    Check("event.nested_too_deep", "Events nested too deep", "Dropped."),
    Check("event.negative_duration", "Negative durations", "Taken as points in time."),
    Check(
        "event.overflowing_duration",
        "Overflowing durations",
        "Durations over 30 days, as overflowing counters leave them, taken as points in time: the "
        "time of these events is missing.",
    ),
    Check("event.far_in_time", "Events far in time", "A day or more from the rest; dropped."),
    Check("event.nanosecond_unit", "Nanoseconds for microseconds", "Converted."),
    Check("event.duplicate", "Events recorded twice", "Counted once."),
    # -- what the trace lets be said
    Check(
        "trace.no_steps",
        "No steps",
        "The trace is one window from the first event to the last; what varies from step to step "
        "is not known.",
        ("confidence",),
    ),
    Check(
        "trace.not_recorded",
        "What the format does not tell",
        "Another profiler's recording: what its format leaves out is null.",
    ),
    Check(
        "trace.joined_recording",
        "Another profiler's recording joined",
        "Of the same run, by its kernels.",
    ),
    Check(
        "trace.boot_clock",
        "Times of the host's own clock",
        "They count from its start: no log of another tool can be joined.",
    ),
    Check("trace.damaged_table", "Damaged table", "Rows before the damage are used."),
    Check(
        "trace.unwritten_log", "Database not written back", "What waits in its journal is not read."
    ),
    Check("trace.whole_graphs", "Graphs as one event", "What ran inside of them was not recorded."),
    Check("trace.single_step", "A single step", "One step has no variation.", ("confidence",)),
    Check("trace.outside_steps", "Time outside the steps", "Shown apart, not attributed."),
    Check(
        "steps.empty", "Steps without work", "Steps that ran nothing of their own on the device."
    ),
    Check(
        "steps.not_consecutive",
        "Step numbers jump",
        "Steps follow each other in time and their numbers do not: whatever ran between two of "
        "them counts to the later one. Where the trace itself has a hole, `trace.several_windows` "
        "says so.",
    ),
    Check(
        "trace.several_windows",
        "Several windows",
        "The trace was taken in several stretches (a profiler's schedule with repeat, "
        "files of several windows): between them nothing is known.",
    ),
    Check(
        "steps.uneven",
        "Steps of different length",
        "The longest step takes more than three times the median: means say little, look at "
        "`--by step`.",
    ),
    Check(
        "steps.slowed_by_tracing",
        "Tracing slowed the steps",
        "The traced steps took over 15 % longer than those without a trace: the step time is of "
        "the latter, the causes are of the former, and what the host does is overstated by as "
        "much.",
    ),
    Check(
        "steps.not_traced",
        "A kind of step was not traced",
        "Steps that took a fifth of the time or more, with phases of their own (evaluation, "
        "rollout) or three times as long as the others, lie in no window: nothing is said of their "
        "causes.",
    ),
    Check(
        "run.outside_steps",
        "Time after the last step",
        "A fifth of the program's time or more: a last evaluation, a checkpoint. "
        "What chopper took to start, write traces and end is apart.",
    ),
    Check(
        "launch.without_kernel",
        "Kernels missing",
        "Launches between others whose kernels were recorded have none themselves: their kernels "
        "ran, and their time counts as idle, mostly as latency of the launch after them. From a "
        "fifth of the launches on, the causes of idle time are withheld.",
        ("idle.causes",),
    ),
    Check(
        "event.without_launch",
        "Device events without launch",
        "Kernels whose launching call was not recorded belong to a step by their place, and gaps "
        "before them have no cause. From a fifth of all events on, the causes of idle time are "
        "withheld.",
        ("idle.causes",),
    ),
    Check(
        "event.stream_overlap",
        "Overlap on one stream",
        "Events of one stream that overlap, though a stream runs one after another: they share "
        "that time, by clock jitter or by concurrent graph branches.",
    ),
    Check("trace.no_shapes", "No shapes", "FLOP and bytes are unknown without them.", _IDEAL),
    Check(
        "trace.double_backward",
        "Differentiated backward",
        "Operators within backward recorded a graph of their own (`create_graph=True`): they count "
        "as backward, not as recomputation.",
    ),
    Check("device.no_peak", "Peak not known", "Without a peak there is no ideal time.", _IDEAL),
    Check(
        "compute.above_peak",
        "Faster than the peak",
        "Kernels that ran faster than their device can: the peak, the data type or the FLOP count "
        "does not fit; their ideal is capped at their time. Where all products together were 5 % "
        "faster, the ideal time is withheld.",
        _IDEAL,
    ),
    Check(
        "utilization.above_one",
        "More than the ceiling",
        "A utilization above 1 (by 5 %: clocks vary, and so do measured ceilings) cannot be: the "
        "peak, the data types, the shapes or the times are wrong. It is null, with this reason.",
    ),
    Check(
        "compute.contention_unknown",
        "Nothing to compare with",
        "Kernels ran beside other work and too few of their like ran alone.",
        ("compute.contention",),
    ),
    Check(
        "compute.factors_exceed",
        "Factors explain too much",
        "The factors of a kernel explain more than it took: those of models (roofline, waves) were "
        "scaled down, then the others.",
    ),
    # -- counters
    Check("counters.partial", "Counters of some kernels", "Kernels of other names have none."),
    Check(
        "counters.not_matched",
        "Counters do not match",
        "Kernels of a name are not as many in the trace as in the counters: nobody can tell which "
        "is which, and none of that name is used.",
        ("compute.counters",),
    ),
    Check(
        "counters.several_devices",
        "Counters of several devices",
        "Not used: nothing says which device is this rank's.",
        ("compute.counters",),
    ),
    Check(
        "counters.damaged", "Damaged counters", "Rows or values of the file that cannot be read."
    ),
    # -- telemetry
    Check(
        "telemetry.truncated", "Truncated telemetry", "Ends in the middle; whole batches are used."
    ),
    Check(
        "telemetry.dropped",
        "Dropped samples",
        "The sampler could not write as fast as it sampled: there are holes.",
    ),
    Check(
        "telemetry.clock_apart",
        "Clocks apart",
        "How far a recording's clock may be from the others' is measured at marks; from 5 ms on, "
        "readings may be joined to other kernels than those that ran.",
    ),
    Check(
        "host.cores_taken",
        "Cores were taken",
        "The rank's main thread waited for a core in a tenth of the time or more (the kernel's run "
        "delay): other programs, or more threads than cores, lengthen whatever the host does, and "
        "causes such as dispatch and user Python are as much the machine's as the program's.",
    ),
    Check(
        "telemetry.clock_set_back",
        "A log's clock was set back",
        "Rows of times that passed twice are left out: nobody can tell which of them a kernel saw.",
    ),
    Check("telemetry.rows_lost", "Rows of a log left out", "They name no device or no time."),
    Check(
        "telemetry.time_zone",
        "Log without time zone",
        "Times that name no zone are read as UTC; where they are local, nothing is joined to them.",
    ),
    Check(
        "telemetry.no_common_time",
        "Log of another time",
        "It shares no moment with the trace: nothing of it is joined.",
    ),
    Check(
        "telemetry.device_unknown",
        "Clocks of an unknown device",
        "Which device they are of is not recorded: kept, not joined.",
    ),
    Check("memory.no_history", "Snapshot without history", "What was held is known, not when."),
    Check(
        "memory.no_common_time",
        "Snapshot of another time",
        "Its history shares no moment with the trace: no steps and phases of allocations.",
    ),
    Check(
        "telemetry.clock_missing",
        "No clock samples",
        "The device's clock was not sampled.",
        ("compute.clock",),
    ),
    Check(
        "telemetry.clock_elsewhere",
        "Clock samples of another time",
        "The samples do not overlap the kernels.",
        ("compute.clock",),
    ),
    Check(
        "telemetry.clock_sparse",
        "Clock samples too sparse",
        "Too far apart for the kernels between them.",
        ("compute.clock",),
    ),
    # -- ranks
    Check(
        "run.ranks_missing",
        "Ranks missing",
        "Collectives of ranks that are not here cannot be matched.",
        _WAIT,
    ),
    Check(
        "communication.unmatched",
        "Collectives not matched",
        "Most of the collectives' time could not be matched on all ranks of their group.",
        _WAIT,
    ),
    Check(
        "communication.numbers_differ",
        "Collectives counted differently",
        "Ranks of a process group give one sequence number to collectives of different names or "
        "sizes, or, on one clock, to some that were never under way together: one of them counts "
        "from elsewhere, or the traces are of different runs. The group's collectives are matched "
        "by time instead, where its members are told, else not at all.",
    ),
    Check(
        "run.no_common_time",
        "No common time",
        "The ranks' traces share no moment: their clocks disagree, or they are different windows.",
        _WAIT,
    ),
    Check(
        "run.clock_offset",
        "Clocks corrected",
        "A rank's clock differs from another's, by when they leave collectives; taken "
        "out before waiting was counted.",
    ),
    Check("run.no_trace", "No trace", "Logs or a snapshot alone: looked at, not attributed."),
    Check("run.rank_unknown", "Rank not named", "A file does not say which rank it is."),
    Check("run.rank_number", "Rank not believed", "A rank that no job has."),
    Check("run.world_size", "Size not believed", "A job size that no job has."),
    Check("run.rank_beyond_world", "Rank beyond the job", "A rank above the job's size."),
    Check("run.file_left_out", "File left out", "A file of a directory that is no trace."),
    Check(
        "trace.ranks_ambiguous",
        "Merged ranks mixed up",
        "Device events fit several of the ranks that one file holds.",
    ),
    Check(
        "trace.several_devices",
        "Several devices",
        "One process drives several devices; each is a timeline of its own.",
    ),
    Check(
        "device.stray_events",
        "Events of another device",
        "Left out: the process does not compute there.",
    ),
    Check(
        "device.unknown",
        "Device not recorded",
        "Device events that name no device, or none that can be: they are a timeline of their own.",
    ),
    # -- the recording
    Check("run.part_missing", "Part missing", "A rank's folder has no readable manifest."),
    Check(
        "run.rank_died", "Rank died", "A rank never closed its recording; what it flushed is used."
    ),
    Check(
        "run.manifest_missing",
        "No manifest of the run",
        "The ranks' own manifests are used: they were started without chopper, or that was killed.",
    ),
    Check("run.manifest_damaged", "Damaged manifest", "The ranks' own manifests are used."),
    Check("run.older_attempt", "Older attempt", "Folders of a start before the last restart."),
    Check(
        "run.processes",
        "Processes recorded apart",
        "Other processes of the same command trained too: each has a run of its "
        "own inside this one.",
    ),
    Check(
        "run.window_follows",
        "Window moved",
        "The later window covers a long step that comes again and again.",
    ),
    Check("run.restarted", "Restarted", "An earlier recording of the rank is kept beside."),
    Check("run.rank_changed", "Rank changed", "The process became another rank after it began."),
    Check("run.rank_unknown", "Rank unknown", "The launcher's variables name no rank."),
    Check(
        "measures.dropped",
        "Measures not kept",
        "What the program gave to `prof.measure` or `prof.step` is no number, or there "
        "were too many.",
    ),
    Check("run.no_steps", "No step seen", "Nothing said where a step ends."),
    Check("run.steps_recounted", "Steps counted anew", "Marks came after steps of the optimizer."),
    Check("run.other_thread", "Steps in another thread", "Not traced: one thread is."),
    Check("run.layers_lost", "Layers lost", "Naming layers failed; later layers have no names."),
    Check("run.profiler_in_use", "Another profiler", "The program's own profiler went first."),
    Check("run.forked", "Forked", "The trace ended where the program forked."),
    Check("run.window_skipped", "Later steps not traced", "A span was open between two traces."),
    Check(
        "run.trace_limited",
        "Window shortened",
        "The trace would have held more than its limit: fewer steps were traced than asked for.",
    ),
    Check("run.trace_abandoned", "Trace lost", "The recording ended in another thread."),
)
CHECKS: dict[str, Check] = {check.code: check for check in _CHECKS}


def withheld(findings: Iterable[Finding]) -> list[Withheld]:
    """Claims that findings withhold, in the order of ``CLAIMS``; claims of others are added."""
    found: dict[str, list[Finding]] = {}
    for finding in findings:
        for name in finding.withholds:
            found.setdefault(name, []).append(finding)
    order = [*(c for c in CLAIMS if c in found), *(c for c in found if c not in CLAIMS)]
    out = []
    for name in order:
        because = found[name]
        ranks = None
        if all(f.rank is not None for f in because):
            ranks = tuple(sorted({f.rank for f in because if f.rank is not None}))
        out.append(
            Withheld(
                claim=CLAIMS.get(name) or Claim(name, name, "", (name,)),
                reason="; ".join(dict.fromkeys(f.message for f in because)),
                codes=tuple(dict.fromkeys(f.code for f in because)),
                ranks=ranks,
            )
        )
    return out
