-- Overheads of each operation: how its ideal time became the time that it took.
--
-- An operation is an operator within a module, with the indices of its path left out
-- (`layers.*.ffn.w1`), in one phase; where no module was recorded, an operator with the shapes of
-- its inputs. One call's time is a product,
--
--     observed = ideal × roofline × instructions × tensor cores × wave quantization × contention
--              × clock × CPU contention × rest
--
-- exactly: with the time cᵢ that the attribution gives to a cause, the factor is fᵢ = exp(cᵢ / L),
-- L = (observed − ideal) / ln(observed / ideal). These are the factors of the Chopper paper (arXiv
-- 2512.08242): performed over theoretical FLOP, the inverse of the busy share of the matrix units,
-- the overlap with communication, and the clock. There the clock's factor is what is left over,
-- here it is measured, and the rest stands beside it. The ideal of memory-bound work is its bytes
-- over the memory's bandwidth.
--
-- title: Overheads by operation
-- section: Operators
-- needs: nothing was computed
-- columns:
--   module, null: Module, its indices as *; null where none was recorded.
--   op, null: Operator; null where none launched the kernels.
--   phase: Phase: forward, backward, optimizer or another one.
--   ideal_ns, null: Ideal time of one call; null with a reason.
--   roofline_ratio, null: Factor of a product whose bytes take longer than its FLOP.
--   instructions_ratio, null: Performed over theoretical FLOP; null without counters.
--   tensor_core_ratio, null: Factor of idle tensor cores; null without counters.
--   wave_quantization_ratio, null: Factor of the last wave; null where unknown.
--   contention_ratio, null: Factor of overlap with other kernels; null where unknown.
--   clock_ratio, null: Factor of a clock below the reference; null where not sampled.
--   core_wait_ratio, null: Factor of missing CPU cores; null in runs with a device.
--   rest_ratio, null: Factor that nothing measured explains.
--   observed_ns: Time that one call alone accounts for (level 1).
--   launch_ns: Idle time of the device before one call, while it was launched.
--   preparation_ns: Other idle time of the device before one call.
--   call_count: Number of calls, over all ranks and steps.
--   time_ns: Time that all calls alone account for.
--   reason, text, null: Reason why there is no ideal time; null where there is one.
--   input_dims, null: Shapes of the inputs, JSON; null where a module was recorded.
WITH call AS (
    SELECT
        *,
        dense_rank() OVER (ORDER BY module, op, phase, input_dims) AS operation
    FROM (
        SELECT
            call.rank,
            call_id,
            module,
            op,
            phase,
            if(module IS NULL, input_dims, NULL) AS input_dims
        FROM operator_call call
        LEFT JOIN operator_module ON operator_module.rank = call.rank AND row = op_row
    )
),
spent AS (
    SELECT operation, cause, sum(time_ns) AS time_ns
    FROM piece
    JOIN selection
        ON selection.rank = piece.rank AND selection.step_index = piece.step_index AND in_step_time
    JOIN step_event event ON event.rank = piece.rank AND event.row = event_row
    JOIN call ON call.rank = event.rank AND call_id = coalesce(op_row, -1 - event.row)
    GROUP BY operation, cause
),
total AS (
    SELECT
        operation,
        sum(time_ns) FILTER (cause LIKE 'compute.%') AS time_ns,
        coalesce(sum(time_ns) FILTER (cause IN ('compute.ideal', 'compute.vector.roofline')), 0)
            AS ideal_ns,
        coalesce(sum(time_ns) FILTER (cause = 'compute.roofline'), 0) AS roofline_ns,
        coalesce(sum(time_ns) FILTER (cause = 'compute.efficiency.instructions'), 0)
            AS instructions_ns,
        coalesce(sum(time_ns) FILTER (cause = 'compute.efficiency.tensor_core'), 0)
            AS tensor_core_ns,
        coalesce(sum(time_ns) FILTER (cause = 'compute.efficiency.wave_quantization'), 0)
            AS wave_ns,
        coalesce(sum(time_ns) FILTER (cause = 'compute.contention'), 0) AS contention_ns,
        coalesce(sum(time_ns) FILTER (cause LIKE 'compute.clock.%'), 0) AS clock_ns,
        coalesce(sum(time_ns) FILTER (cause = 'compute.core_wait'), 0) AS core_wait_ns,
        coalesce(sum(time_ns) FILTER (cause IN ('compute.efficiency.rest', 'compute.vector.excess')), 0)
            AS rest_ns,
        coalesce(sum(time_ns) FILTER (cause IN ('idle.call', 'idle.launch_latency')), 0)
            AS launch_ns,
        coalesce(sum(time_ns) FILTER (cause LIKE 'idle.%'), 0) - launch_ns AS preparation_ns,
        arg_max(cause, time_ns) FILTER (
            cause LIKE 'compute.%' AND cause NOT IN ('compute.ideal', 'compute.vector.roofline')
        )
            AS main_cause
    FROM spent
    GROUP BY operation
),
factor AS (
    -- L, by which the times of causes become factors; null without an ideal time.
    SELECT
        *,
        if(
            ideal_ns > 0 AND time_ns = ideal_ns + roofline_ns + instructions_ns + tensor_core_ns
                + wave_ns + contention_ns + clock_ns + core_wait_ns + rest_ns,
            greatest(
                if(time_ns > ideal_ns, (time_ns - ideal_ns) / ln(time_ns / ideal_ns), ideal_ns), 1
            ),
            NULL
        ) AS mean_ns,
        sum(core_wait_ns) OVER () = 0 AS no_core_waits,
        (SELECT coalesce(list(factor), []) FROM unmeasured_factor) AS unmeasured
    FROM total
    WHERE time_ns > 0
)
SELECT
    module,
    op,
    phase,
    if(mean_ns IS NULL, NULL, round_even(ideal_ns / call_count, 0)) AS ideal_ns,
    exp(roofline_ns / mean_ns) AS roofline_ratio,
    if(
        instructions_ns = 0 AND 'instructions and tensor cores' IN unmeasured,
        NULL,
        exp(instructions_ns / mean_ns)
    ) AS instructions_ratio,
    if(
        tensor_core_ns = 0 AND 'instructions and tensor cores' IN unmeasured,
        NULL,
        exp(tensor_core_ns / mean_ns)
    ) AS tensor_core_ratio,
    if(wave_ns = 0 AND 'wave quantization' IN unmeasured, NULL, exp(wave_ns / mean_ns))
        AS wave_quantization_ratio,
    if(contention_ns = 0 AND 'contention' IN unmeasured, NULL, exp(contention_ns / mean_ns))
        AS contention_ratio,
    if(clock_ns = 0 AND 'clock' IN unmeasured, NULL, exp(clock_ns / mean_ns)) AS clock_ratio,
    if(core_wait_ns = 0 AND no_core_waits, NULL, exp(core_wait_ns / mean_ns)) AS core_wait_ratio,
    exp(rest_ns / mean_ns) AS rest_ratio,
    round_even(factor.time_ns / call_count, 0) AS observed_ns,
    round_even(launch_ns / call_count, 0) AS launch_ns,
    round_even(preparation_ns / call_count, 0) AS preparation_ns,
    call_count,
    factor.time_ns,
    if(mean_ns IS NULL, 'no ideal time: ' || label, NULL) AS reason,
    input_dims
FROM factor
JOIN (
    SELECT operation, module, op, phase, input_dims, count(*) AS call_count
    FROM call
    GROUP BY operation, module, op, phase, input_dims
) USING (operation)
LEFT JOIN cause ON cause.id = main_cause
ORDER BY factor.time_ns DESC, operation
