"""Collectives, who was late to them, what hid them, and the links."""

from __future__ import annotations

from chopper.tables._base import Table
from chopper.tables.views._columns import column, count, maybe, ns

COLLECTIVES = Table(
    "collectives",
    1,
    "One row per collective that was matched on all ranks of its group. Times of ranks are in one "
    "clock; bandwidths as nccl-tests define them.",
    (
        column("collective", "string", "Normalized name: allreduce, reducescatter, sendrecv …"),
        maybe("ranks", "string", "Global ranks that took part."),
        maybe("step", "int64", "Step number, where the straggler's event began."),
        ns("waiting_ns", "What the ranks waited for the last one, summed over them."),
        column("straggler_rank", "int32", "Rank that came last."),
        ns("exposed_waiting_ns", "The part of the waiting that nothing hid, summed over ranks."),
        ns("transfer_ns", "From the last arrival to the last end."),
        maybe("message_bytes", "int64", "Size: the whole array.", "bytes"),
        maybe("bus_bytes_per_s", "float64", "Bus bandwidth.", "bytes_per_s"),
        maybe("at_peak_ratio", "float64", "Bus bandwidth over the link's peak.", "ratio"),
        ns("exposed_ns", "Waiting and transfer that nothing hid, summed over ranks."),
        maybe("algorithm_bytes_per_s", "float64", "Size over transfer time.", "bytes_per_s"),
        column("phase", "string", "Phase of the straggler's event."),
        maybe("layer", "string", "Layer of the straggler's event."),
        maybe("op", "string", "Operator of the straggler's event."),
        maybe("group", "string", "Name of the process group."),
        maybe("sequence_id", "int64", "Number within the group, where recorded."),
        count("rank_count", "Ranks that took part."),
        ns("first_arrival_ns", "When the first rank came, Unix time."),
        ns("last_arrival_ns", "When the last rank came, Unix time."),
        ns("last_end_ns", "When the last rank left, Unix time."),
        maybe("reason", "text", "Why the share of the link's peak is null."),
    ),
)

STRAGGLERS = Table(
    "stragglers",
    1,
    "Waiting at matched collectives by the rank that came last and by what it spent longer on than "
    "the others since the group's collective before.",
    (
        column("straggler_rank", "int32", "Rank that came last."),
        maybe("cause", "string", "Leaf cause; null for what came before its window, or no excess."),
        ns("waiting_ns", "Waiting of the other ranks, summed; shared among causes by excess."),
        column("share_ratio", "float64", "Of all waiting.", "ratio"),
        ns("exposed_waiting_ns", "The part of the waiting that nothing hid."),
        ns("excess_ns", "How much longer than the others' mean it spent on the cause, in total."),
        count("collective_count", "Collectives at which this was its largest excess."),
        count("late_collective_count", "Collectives at which it came last, whatever the cause."),
        column("late_ratio", "float64", "The same, of all at which anybody waited.", "ratio"),
    ),
)

EXPOSED_COMMUNICATION = Table(
    "exposed_communication",
    1,
    "Communication by group, collective, phase and layer, summed over ranks and steps: what no "
    "computing hid, and what it did.",
    (
        column("collective", "string", "Normalized name: allreduce, reducescatter, sendrecv …"),
        maybe("ranks", "string", "Global ranks that take part."),
        column("phase", "string", "Phase of the events."),
        maybe("layer", "string", "Layer of the events."),
        count("event_count", "Events."),
        ns("exposed_ns", "Time in which no computing ran beside it."),
        column("share_ratio", "float64", "Exposed, of the observed time.", "ratio"),
        ns("hidden_ns", "Time in which computing ran beside it."),
        ns("elapsed_ns", "Time that the events ran; more than both where they overlap."),
        ns("waiting_ns", "Of the exposed: before the last rank came."),
        ns("at_peak_ns", "Of the exposed: what the bytes need at the link's peak."),
        ns("below_peak_ns", "Of the exposed: transfer beyond that."),
        ns("no_peak_ns", "Of the exposed: transfer, peak or bytes unknown."),
        ns("unseparated_ns", "Of the exposed: not matched, wait and transfer together."),
        maybe("group", "string", "Name of the process group."),
    ),
)

OVERLAP = Table(
    "overlap",
    1,
    "Computing kernels by operator, shapes and kernel: how much of their time communication ran "
    "beside them on the same device, and whether they took longer then. Alone is no overlap at "
    "all, beside is half of the time or more.",
    (
        maybe("op", "string", "Operator."),
        maybe("input_dims", "string", "Shapes of its inputs, JSON as recorded."),
        count("instance_count", "Instances."),
        column("overlap_ratio", "float64", "Overlapped, of the time of all.", "ratio"),
        maybe("slowdown_factor", "float64", "Median beside over median alone.", "factor"),
        maybe("spearman", "float64", "Rank correlation of overlap with duration."),
        maybe("pearson", "float64", "Linear correlation of overlap with duration."),
        maybe("median_alone_ns", "int64", "Median duration alone.", "ns"),
        maybe("median_beside_ns", "int64", "Median duration beside communication.", "ns"),
        count("alone_instance_count", "Instances alone."),
        count("beside_instance_count", "Instances beside communication."),
        ns("overlap_ns", "Overlapped time of all."),
        ns("time_ns", "Time of all."),
        column("kernel", "string", "Kernel."),
    ),
)

LEAD = Table(
    "lead",
    1,
    "Latest start over the ranks less this rank's start, of the same collective or kernel.",
    (
        column("rank", "int32", "Rank."),
        maybe("step", "int64", "Step number."),
        column("kind", "string", "collective or kernel."),
        ns("median_ns", "Median lead."),
        ns("p95_ns", "95th percentile of the lead."),
        column("last_ratio", "float64", "Share of them in which this rank came last.", "ratio"),
        count("event_count", "Events compared."),
    ),
)

LINKS = Table(
    "links",
    1,
    "What links carried, and what speaks of congestion on them: rows without a step are the whole "
    "run. Ports and interfaces are their host's, shared by its ranks; device links are a rank's own. "
    "Steps shorter than the time between readings have no row.",
    (
        column("link", "string", "Port, interface, or the links of the rank's device."),
        maybe("step", "int64", "Step; null for the whole run."),
        maybe("signal", "text", "What speaks of congestion, in words."),
        maybe("tx_bytes_per_s", "float64", "Sent.", "bytes_per_s"),
        maybe("rx_bytes_per_s", "float64", "Received.", "bytes_per_s"),
        maybe(
            "both_bytes_per_s",
            "float64",
            "Sent and received, where the device does not tell them apart (AMD's PCIe).",
            "bytes_per_s",
        ),
        maybe("pause_ratio", "float64", "Share of the time in which sending was paused.", "ratio"),
        maybe("cnp_handled_hz", "float64", "Congestion notifications obeyed as sender.", "hz"),
        maybe("retransmit_ratio", "float64", "Bytes sent again, of those sent (EFA).", "ratio"),
        column("ranks", "string", "Ranks that share it."),
        column("kind", "string", "port, interface, flow control, device link or PCIe."),
        column("rank", "int32", "Rank whose steps these are."),
        ns("span_ns", "Time that it was taken over."),
        maybe("sent_pause_ratio", "float64", "Share in which others were told to pause.", "ratio"),
        maybe("cnp_sent_hz", "float64", "Congestion notifications sent as receiver.", "hz"),
        maybe("ecn_marked_hz", "float64", "Packets that a switch had marked.", "hz"),
        maybe(
            "tx_wait_hz", "float64", "Ticks of waiting for credits (InfiniBand), a second.", "hz"
        ),
        maybe("retransmits_per_byte", "float64", "Retransmits (RoCE) over bytes sent."),
        maybe("retransmit_count", "int64", "Order errors, timeouts, adaptive resends.", "count"),
        maybe("out_of_sequence_count", "int64", "Packets that came out of order.", "count"),
        maybe(
            "error_count",
            "int64",
            "Discards, link and CRC errors, replays, NAKs, recoveries.",
            "count",
        ),
        maybe("tx_bytes", "int64", "Sent in all.", "bytes"),
        maybe("rx_bytes", "int64", "Received in all.", "bytes"),
    ),
)
