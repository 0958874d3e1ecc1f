-- Launch overhead by operator and phase: time before the launching call, and in it.
--
-- Launch overhead as defined in "Chopper" (arXiv 2512.08242). Compute kernels are taken in order of
-- their start, per device and step. With `prev_end` the end of the kernels before and `t_rt` the
-- start of the call that launched the kernel:
--
--     overhead = max(0, start − prev_end),
--     preparation = max(0, t_rt − prev_end), no more than the overhead,
--     call = min(start − t_rt, overhead)
--
-- `prev_end` is the latest end of the compute kernels before, which is that of the previous kernel
-- unless kernels overlap. The first kernel of a step has no kernel before it and no overhead: time
-- between steps is idle time with its own causes. Communication during the gap does not shorten it,
-- so the run's idle causes can be smaller.
--
-- title: Launch overhead
-- section: Steps and host
-- columns:
--   op, null: Operator that launched the kernels; null where none was recorded.
--   phase: Phase: forward, backward, optimizer, evaluation or another one.
--   kernel_count: Number of compute kernels.
--   overhead_ns: Launch overhead: preparation, call and what could not be split.
--   share_ratio: Launch overhead as a share of the observed time of all ranks.
--   preparation_ns: Part of the overhead before the launching call.
--   call_ns: Part of the overhead from the launching call to the kernel's start.
--   unsplit_ns: Overhead of kernels whose launch was not recorded.
--   mean_ns: Mean overhead per kernel.
--   running_ns: Time in which the kernels themselves ran.
WITH kernel AS (
    SELECT
        rank,
        op,
        phase,
        launch_row,
        start_ns,
        dur_ns,
        greatest(start_ns - coalesce(max(start_ns + dur_ns) OVER (
            PARTITION BY rank, device_id, step_index
            ORDER BY start_ns, row
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ), start_ns), 0) AS gap_ns
    FROM step_event
    WHERE work_class = 'compute'
),
split AS (
    SELECT
        kernel.*,
        if(
            launch.start_ns IS NOT NULL,
            greatest(least(kernel.start_ns - launch.start_ns, gap_ns), 0),
            NULL
        ) AS call_ns
    FROM kernel
    LEFT JOIN host_span launch ON launch.rank = kernel.rank AND launch.row = launch_row
)
SELECT
    op,
    phase,
    count(*) AS kernel_count,
    sum(gap_ns) AS overhead_ns,
    sum(gap_ns) / greatest((
        SELECT sum(end_ns - start_ns)
        FROM "window" JOIN selection USING (rank, step_index)
        WHERE in_step_time
    ), 1) AS share_ratio,
    coalesce(sum(gap_ns - call_ns), 0) AS preparation_ns,
    coalesce(sum(call_ns), 0) AS call_ns,
    coalesce(sum(gap_ns) FILTER (call_ns IS NULL), 0) AS unsplit_ns,
    round_even(sum(gap_ns) / count(*), 0) AS mean_ns,
    sum(dur_ns) AS running_ns
FROM split
GROUP BY op, phase
ORDER BY overhead_ns DESC, op, phase
