-- Kernels that overlapped communication: overlap ratio and slowdown.
--
-- The overlap ratio of an instance is the share of its time with communication on the same device:
-- *alone* means no overlap at all, *overlapped* half of the time or more.
--
-- title: Overlap with communication
-- section: Communication
-- needs: no communication, or no compute, was recorded
-- from: communication
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
    -- How long the device had communicated, and until when, as each event began.
    SELECT rank, device_id, start_ns, max(reached_ns) AS reached_ns, max(busy_ns) AS busy_ns
    FROM (
        SELECT
            rank, device_id,
            start_ns,
            greatest(end_ns, reached_before_ns) AS reached_ns,
            sum(greatest(end_ns - greatest(start_ns, reached_before_ns), 0)) OVER (
                PARTITION BY rank, device_id ORDER BY start_ns, row ROWS UNBOUNDED PRECEDING
            ) AS busy_ns
        FROM (
            SELECT
                rank, device_id,
                row,
                start_ns,
                start_ns + dur_ns AS end_ns,
                max(start_ns + dur_ns) OVER (
                    PARTITION BY rank, device_id ORDER BY start_ns, row
                    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
                ) AS reached_before_ns
            FROM step_event
            WHERE work_class = 'communication'
        )
    )
    GROUP BY rank, device_id, start_ns
),
compute AS (
    SELECT rank, device_id, op, op_row, kernel, dur_ns, start_ns, start_ns + dur_ns AS end_ns
    FROM step_event
    WHERE work_class = 'compute' AND dur_ns > 0
        AND EXISTS (FROM communication)
),
instance AS (
    SELECT
        op,
        input_dims,
        kernel,
        compute.dur_ns,
        (
            coalesce(last.busy_ns - greatest(last.reached_ns - compute.end_ns, 0), 0)
            - coalesce(first.busy_ns - greatest(first.reached_ns - compute.start_ns, 0), 0)
        )::BIGINT AS shared_ns,
        shared_ns / compute.dur_ns AS ratio
    FROM compute
    ASOF LEFT JOIN sending first
        ON first.rank = compute.rank
        AND first.device_id = compute.device_id
        AND compute.start_ns >= first.start_ns
    ASOF LEFT JOIN sending last
        ON last.rank = compute.rank
        AND last.device_id = compute.device_id
        AND compute.end_ns >= last.start_ns
    LEFT JOIN host_span ON host_span.rank = compute.rank AND host_span.row = op_row
),
work AS (
    SELECT row_number() OVER () AS id, *
    FROM (SELECT DISTINCT op, input_dims, kernel FROM instance)
),
numbered AS (
    SELECT work.*, dur_ns, shared_ns, ratio
    FROM instance JOIN work
        ON work.kernel = instance.kernel
        AND work.op IS NOT DISTINCT FROM instance.op
        AND work.input_dims IS NOT DISTINCT FROM instance.input_dims
),
-- Ranks within a kernel's instances, doubled; ties share their mean.
by_ratio AS (
    SELECT id, ratio, 2 * sum(count(*)) OVER of_kernel - count(*) AS ratio_rank
    FROM numbered
    GROUP BY id, ratio
    WINDOW of_kernel AS (PARTITION BY id ORDER BY ratio ROWS UNBOUNDED PRECEDING)
),
by_dur AS (
    SELECT id, dur_ns, 2 * sum(count(*)) OVER of_kernel - count(*) AS dur_rank
    FROM numbered
    GROUP BY id, dur_ns
    WINDOW of_kernel AS (PARTITION BY id ORDER BY dur_ns ROWS UNBOUNDED PRECEDING)
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
FROM numbered JOIN by_ratio USING (id, ratio) JOIN by_dur USING (id, dur_ns)
GROUP BY id, op, input_dims, kernel
ORDER BY overlap_ns DESC, time_ns DESC, op, input_dims, kernel
