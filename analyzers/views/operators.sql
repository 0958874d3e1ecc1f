-- Operators by name: calls, kernels, time, rates.
--
-- All calls of an operator together, whatever their arguments and phase, over all ranks and steps. A
-- call's time is the time of the device events that it launched itself.
--
-- title: Operators
-- section: Operators
-- columns:
--   op, null: Operator; null for events that no operator launched.
--   call_count: Number of calls.
--   kernel_count: Number of device events that the calls launched.
--   time_ns: Time of these device events, summed over calls.
--   share_ratio, null: Share of the sum of times over all rows; null for no time.
--   mean_ns: Mean time of one call.
--   compute_rate_flop_per_s, null: FLOP over the time of the device events.
--   memory_rate_bytes_per_s, null: Bytes over the time of the device events.
--   median_ns: Median time of one call.
--   min_ns: Time of the fastest call.
--   max_ns: Time of the slowest call.
--   std_ns: Standard deviation of the time over calls (n − 1); 0 for a single one.
--   ideal_ns, null: Time that all calls of a product need at the device's peak.
--   roofline_ns, null: Time that all calls need at the roofline; null where unknown.
--   math_flop, null: Mathematical FLOP of all calls; null where unknown.
--   traffic_bytes, null: Least bytes that all calls move to and from memory.
WITH work AS (
    -- Null unless it is known of all events that a model applies to.
    SELECT
        op,
        if(count(work_flop) = count(*), fsum(work_flop), NULL) AS flop,
        if(count(work_bytes) = count(*), fsum(work_bytes), NULL) AS bytes,
        if(count(roofline_ns) = count(*), fsum(roofline_ns), NULL) AS roofline,
        if(bool_and(ideal_ns IS NOT NULL) FILTER (math), fsum(ideal_ns) FILTER (math), NULL) AS ideal
    FROM step_event
    WHERE modelled
    GROUP BY op
),
calls AS (
    SELECT
        op,
        count(*) AS call_count,
        sum(event_count) AS kernel_count,
        sum(busy_ns) AS time_ns,
        round_even(avg(busy_ns), 0) AS mean_ns,
        floor(median(busy_ns)) AS median_ns,
        min(busy_ns) AS min_ns,
        max(busy_ns) AS max_ns,
        round_even(coalesce(stddev_samp(busy_ns), 0), 0) AS std_ns
    FROM operator_call
    GROUP BY op
)
SELECT
    calls.*,
    time_ns / nullif(sum(time_ns) OVER (), 0) AS share_ratio,
    flop / nullif(time_ns / 1e9, 0) AS compute_rate_flop_per_s,
    bytes / nullif(time_ns / 1e9, 0) AS memory_rate_bytes_per_s,
    round_even(ideal, 0) AS ideal_ns,
    round_even(roofline, 0) AS roofline_ns,
    round_even(flop, 0) AS math_flop,
    round_even(bytes, 0) AS traffic_bytes
FROM calls LEFT JOIN work ON calls.op IS NOT DISTINCT FROM work.op
ORDER BY time_ns DESC, calls.op
