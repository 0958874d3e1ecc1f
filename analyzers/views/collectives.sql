-- Matched collectives: straggler wait, transfer time and bandwidths.
--
-- With arrivals a_r and ends e_r of the ranks r of a collective, in one clock:
--
--     ready = max a_r                      the last rank, the straggler, is there
--     waiting = Σ_r (min(ready, e_r) − a_r)     rank-time
--     transfer = max e_r − ready
--     algbw = S / transfer,  busbw = algbw · bus factor    (nccl-tests, PERFORMANCE.md)
--
-- A rank with e_r well before ready (the root of a broadcast) did not wait. S is the whole array:
-- the input of one rank for all-reduce and reduce-scatter, the output for all-gather. The bus factor
-- is 2(n−1)/n for all-reduce, (n−1)/n for reduce-scatter, all-gather, all-to-all, gather and
-- scatter, 1 for broadcast, reduce and send/receive.
--
-- One row per collective that was matched on all ranks of its group.
--
-- title: Collectives
-- section: Communication
-- needs: no collective was seen on all ranks of its group (pass the traces of all ranks)
-- from: communication
-- columns:
--   collective: Normalized name of the collective, as allreduce.
--   ranks, null: Global ranks that took part; null where not recorded.
--   step, int64, null: Step number at the start of the straggler's event.
--   waiting_ns: Straggler wait: from each rank's arrival to the last arrival, summed.
--   straggler_rank, int32: Global rank that arrived last.
--   exposed_waiting_ns: Exposed part of the straggler wait, summed.
--   transfer_ns: Transfer time: from the last arrival to the last rank's end.
--   message_bytes, null: Size of the whole array that the collective operates on.
--   bus_bytes_per_s, null: Bus bandwidth, as nccl-tests defines it.
--   at_peak_ratio, null: Bus bandwidth as a share of the link's peak.
--   exposed_ns: Exposed part of wait and transfer, summed over ranks.
--   algorithm_bytes_per_s, null: Algorithm bandwidth: message size over transfer time.
--   phase: Phase of the straggler's event.
--   layer, null: Module path of the layer of the straggler's event.
--   op, null: Operator that launched the straggler's event; null where not recorded.
--   group, null: Name of the process group; null where not recorded.
--   sequence_id, int64, null: Number of the collective within its group.
--   rank_count: Number of ranks that took part.
--   first_arrival_ns: Arrival of the first rank, Unix time.
--   last_arrival_ns: Arrival of the last rank, Unix time.
--   last_end_ns: End of the last rank, Unix time.
--   reason, text, null: Reason why the share of the link's peak is null.
WITH instance AS (
    SELECT
        instance_id,
        first(collective) AS collective,
        first(ranks) AS ranks,
        first("group") AS "group",
        first(sequence_id) AS sequence_id,
        first(message_bytes) AS message_bytes,
        first(bus_factor) AS bus_factor,
        min(link_bytes_per_s) AS link_bytes_per_s,
        first(link_source) AS link_source,
        count(*) AS rank_count,
        sum(waiting_ns) AS waiting_ns,
        sum(exposed_ns) AS exposed_ns,
        sum(exposed_waiting_ns) AS exposed_waiting_ns,
        min(arrival_ns) AS first_arrival_ns,
        first(ready_ns) AS last_arrival_ns,
        max(left_ns) AS last_end_ns,
        greatest(last_end_ns - last_arrival_ns, 0) AS transfer_ns
    FROM collective_member
    GROUP BY instance_id
)
SELECT
    instance.* EXCLUDE (instance_id, bus_factor, link_bytes_per_s, link_source),
    last.rank AS straggler_rank,
    step,
    phase,
    layer,
    op,
    instance.message_bytes / nullif(transfer_ns, 0) * 1e9 AS algorithm_bytes_per_s,
    algorithm_bytes_per_s * instance.bus_factor AS bus_bytes_per_s,
    if(bus_bytes_per_s / instance.link_bytes_per_s > 1.05, NULL, bus_bytes_per_s / instance.link_bytes_per_s)
        AS at_peak_ratio,
    if(
        bus_bytes_per_s / instance.link_bytes_per_s > 1.05,
        'withheld: exceeds the link''s peak; the peak, the size or the times are wrong',
        if(instance.link_bytes_per_s IS NULL, instance.link_source, NULL)
    ) AS reason
FROM instance JOIN collective_member last ON last.instance_id = instance.instance_id AND is_last
ORDER BY instance.exposed_ns DESC, transfer_ns DESC, last_arrival_ns, instance.instance_id
