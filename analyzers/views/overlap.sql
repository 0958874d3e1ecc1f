-- Kernels that overlapped communication: overlap ratio and slowdown.
--
-- The overlap ratio of an instance is the share of its time with communication on the same device:
-- *alone* means no overlap at all, *overlapped* half of the time or more.
--
-- title: Overlap with communication
-- section: Communication
-- needs: no communication, or no compute, was recorded
-- columns:
--   op, null: Operator that launched the kernels; null where none was recorded.
--   input_dims, null: Shapes of the operator's inputs, JSON as recorded.
--   instance_count: Number of instances of the kernel.
--   overlap_ratio: Share of the instances' time that overlapped communication.
--   slowdown_factor, null: Median duration with communication over the median alone.
--   spearman, float64, null: Rank correlation of overlap ratio and duration.
--   pearson, float64, null: Linear correlation of overlap ratio and duration.
--   median_alone_ns, null: Median duration of instances without any overlap.
--   median_beside_ns, null: Median duration of instances overlapped at least half.
--   alone_instance_count: Number of instances without any overlap.
--   beside_instance_count: Number of instances overlapped at least half.
--   overlap_ns: Time of all instances that overlapped communication.
--   time_ns: Time of all instances.
--   kernel: Name of the kernel as recorded.
WITH sending AS (
    -- The stretches in which the device communicated.
    SELECT rank, device_id, min(start_ns) AS start_ns, max(end_ns) AS end_ns
    FROM (
        SELECT
            *,
            count(*) FILTER (begins) OVER (PARTITION BY rank, device_id ORDER BY start_ns, row)
                AS stretch
        FROM (
            SELECT
                rank,
                device_id,
                row,
                start_ns,
                start_ns + dur_ns AS end_ns,
                coalesce(start_ns > max(start_ns + dur_ns) OVER (
                    PARTITION BY rank, device_id ORDER BY start_ns, row
                    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
                ), true) AS begins
            FROM step_event
            WHERE work_class = 'communication' AND dur_ns > 0
        )
    )
    GROUP BY rank, device_id, stretch
),
compute AS (
    SELECT * FROM step_event WHERE work_class = 'compute' AND dur_ns > 0
),
shared AS (
    SELECT
        compute.rank,
        row,
        sum(least(start_ns + dur_ns, sent_until_ns) - greatest(start_ns, sent_from_ns)) AS shared_ns
    FROM compute
    JOIN (SELECT rank, device_id, start_ns AS sent_from_ns, end_ns AS sent_until_ns FROM sending) sent
        ON sent.rank = compute.rank
        AND sent.device_id = compute.device_id
        AND sent_from_ns < start_ns + dur_ns
        AND sent_until_ns > start_ns
    GROUP BY compute.rank, row
),
instance AS (
    SELECT
        op,
        input_dims,
        kernel,
        compute.dur_ns,
        coalesce(shared_ns, 0)::BIGINT AS shared_ns,
        coalesce(shared_ns, 0) / compute.dur_ns AS ratio
    FROM compute
    LEFT JOIN shared ON shared.rank = compute.rank AND shared.row = compute.row
    LEFT JOIN host_span ON host_span.rank = compute.rank AND host_span.row = op_row
    WHERE EXISTS (
        FROM communication
        JOIN event_link ON event_link.rank = communication.rank AND event_link.row = event_row
        LEFT JOIN selection
            ON selection.rank = event_link.rank AND selection.step_index = event_link.step_index
        WHERE event_link.step_index IS NULL OR in_step_time
    )
),
ranked AS (
    -- Ranks within a kernel's instances; ties share their mean.
    SELECT
        *,
        rank() OVER (PARTITION BY op, input_dims, kernel ORDER BY ratio)
            + (count(*) OVER (PARTITION BY op, input_dims, kernel, ratio) - 1) / 2 AS ratio_rank,
        rank() OVER (PARTITION BY op, input_dims, kernel ORDER BY dur_ns)
            + (count(*) OVER (PARTITION BY op, input_dims, kernel, dur_ns) - 1) / 2 AS dur_rank
    FROM instance
)
SELECT
    op,
    input_dims,
    kernel,
    count(*) AS instance_count,
    sum(dur_ns) AS time_ns,
    sum(shared_ns) AS overlap_ns,
    sum(shared_ns) / sum(dur_ns) AS overlap_ratio,
    count(*) FILTER (ratio <= 0) AS alone_instance_count,
    count(*) FILTER (ratio >= 0.5) AS beside_instance_count,
    trunc(median(dur_ns) FILTER (ratio <= 0)) AS median_alone_ns,
    trunc(median(dur_ns) FILTER (ratio >= 0.5)) AS median_beside_ns,
    median(dur_ns) FILTER (ratio >= 0.5) / median(dur_ns) FILTER (ratio <= 0) AS slowdown_factor,
    -- Fewer than five instances tell nothing, nor does a side that is constant.
    CASE WHEN count(*) >= 5 AND min(ratio) < max(ratio) AND min(dur_ns) < max(dur_ns)
        THEN greatest(least(corr(ratio_rank, dur_rank), 1), -1) END AS spearman,
    CASE WHEN count(*) >= 5 AND min(ratio) < max(ratio) AND min(dur_ns) < max(dur_ns)
        THEN greatest(least(corr(ratio, dur_ns), 1), -1) END AS pearson
FROM ranked
GROUP BY op, input_dims, kernel
ORDER BY overlap_ns DESC, time_ns DESC, op, input_dims, kernel
