-- Kernels, copies and memsets by name and launching operator, over all ranks and steps.
--
-- title: Kernels
-- section: Operators
-- columns:
--   kernel: Name of the kernel, copy or memset as recorded.
--   op, null: Operator that launched it; null where none was recorded.
--   call_count: Number of device events.
--   time_ns: Sum of their durations, including overlap.
--   share_ratio, null: Share of the sum of times over all rows; null for no time.
--   mean_ns: Mean duration of a device event.
--   work_class: Class of the work: compute, communication or copy.
--   median_ns: Median time of one call.
--   min_ns: Time of the fastest call.
--   max_ns: Time of the slowest call.
--   std_ns: Standard deviation of the time over calls (n − 1); 0 for a single one.
SELECT
    kernel,
    op,
    count(*) AS call_count,
    sum(dur_ns) AS time_ns,
    sum(dur_ns) / nullif(sum(sum(dur_ns)) OVER (), 0) AS share_ratio,
    round_even(avg(dur_ns), 0) AS mean_ns,
    first(work_class) AS work_class,
    floor(median(dur_ns)) AS median_ns,
    min(dur_ns) AS min_ns,
    max(dur_ns) AS max_ns,
    round_even(coalesce(stddev_samp(dur_ns), 0), 0) AS std_ns
FROM step_event
GROUP BY kernel, op
ORDER BY time_ns DESC, kernel, op
