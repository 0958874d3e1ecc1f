-- Operators by shapes, types and phase: time, rates, roofline.
--
-- Calls of operators with the same arguments in the same phase, over all ranks and steps. A call's
-- time is that of the device events that it launched itself. Events without an operator are one row
-- per phase, each event a call. Collectives are grouped by phase alone: sequence number and group
-- are among their arguments, so no two calls are equal; `collectives` has their sizes.
--
-- title: Operations by arguments
-- section: Operators
-- columns:
--   op, null: Operator; null for events that no operator launched.
--   input_dims, null: Shapes of the operator's inputs, JSON as recorded.
--   phase: Phase: forward, backward, optimizer, evaluation or another one.
--   call_count: Number of calls.
--   time_ns: Time of all calls.
--   share_ratio, null: Share of the sum of times over all rows; null for no time.
--   mean_ns: Mean time of one call.
--   compute_rate_flop_per_s, null: FLOP over the time of the device events.
--   memory_rate_bytes_per_s, null: Bytes over the time of the device events.
--   ideal_ns, null: Time that one call of a product needs at the device's peak.
--   roofline_ns, null: Time that one call needs at the roofline; null where unknown.
--   input_types, null: Data types of the operator's inputs, JSON as recorded.
--   concrete_inputs, null: Values of the operator's scalar inputs, JSON as recorded.
--   dtype, null: Data type of a product's arithmetic, which selects its peak.
--   math_flop, null: Mathematical FLOP of one call; null where unknown.
--   traffic_bytes, null: Least bytes that one call moves to and from memory.
--   flop_per_byte, float64, null: Arithmetic intensity: FLOP over least bytes moved.
--   median_ns: Median time of one call.
--   min_ns: Time of the fastest call.
--   max_ns: Time of the slowest call.
--   std_ns: Standard deviation of the time over calls (n − 1); 0 for a single one.
WITH call AS (
    SELECT
        rank,
        call_id,
        op,
        phase,
        if(is_collective, NULL, input_dims) AS input_dims,
        if(is_collective, NULL, input_types) AS input_types,
        if(is_collective, NULL, concrete_inputs) AS concrete_inputs,
        busy_ns,
        dense_rank() OVER (
            ORDER BY
                op,
                phase,
                if(is_collective, NULL, input_dims),
                if(is_collective, NULL, input_types),
                if(is_collective, NULL, concrete_inputs)
        ) AS operation
    FROM (
        SELECT
            *,
            regexp_matches(
                op, '^c10d::|^_c10d_functional::|^record_param_comms$|^([nrxh]ccl|gloo):'
            ) AS is_collective
        FROM operator_call
    )
),
event AS (
    SELECT operation, step_event.*
    FROM step_event
    JOIN call ON call.rank = step_event.rank AND call_id = coalesce(op_row, -1 - row)
),
work AS (
    -- Null unless it is known of all events that a model applies to.
    SELECT
        operation,
        if(count(work_flop) = count(*), fsum(work_flop), NULL) AS flop,
        if(count(work_bytes) = count(*), fsum(work_bytes), NULL) AS bytes,
        if(count(roofline_ns) = count(*), fsum(roofline_ns), NULL) AS roofline,
        if(bool_and(ideal_ns IS NOT NULL) FILTER (math), fsum(ideal_ns) FILTER (math), NULL) AS ideal
    FROM event
    WHERE modelled
    GROUP BY operation
),
main_dtype AS (
    SELECT operation, first(dtype ORDER BY time_ns DESC, dtype) AS dtype
    FROM (SELECT operation, dtype, sum(dur_ns) AS time_ns FROM event WHERE dtype IS NOT NULL GROUP BY ALL)
    WHERE time_ns > 0
    GROUP BY operation
),
calls AS (
    SELECT
        operation,
        op,
        phase,
        input_dims,
        input_types,
        concrete_inputs,
        count(*) AS call_count,
        sum(busy_ns) AS time_ns,
        round_even(avg(busy_ns), 0) AS mean_ns,
        floor(median(busy_ns)) AS median_ns,
        min(busy_ns) AS min_ns,
        max(busy_ns) AS max_ns,
        round_even(coalesce(stddev_samp(busy_ns), 0), 0) AS std_ns
    FROM call
    GROUP BY ALL
)
SELECT
    calls.* EXCLUDE (operation),
    dtype,
    time_ns / nullif(sum(time_ns) OVER (), 0) AS share_ratio,
    flop / nullif(time_ns / 1e9, 0) AS compute_rate_flop_per_s,
    bytes / nullif(time_ns / 1e9, 0) AS memory_rate_bytes_per_s,
    flop / nullif(bytes, 0) AS flop_per_byte,
    round_even(ideal / call_count, 0) AS ideal_ns,
    round_even(roofline / call_count, 0) AS roofline_ns,
    round_even(flop / call_count, 0) AS math_flop,
    round_even(bytes / call_count, 0) AS traffic_bytes
FROM calls LEFT JOIN work USING (operation) LEFT JOIN main_dtype USING (operation)
ORDER BY time_ns DESC, operation
