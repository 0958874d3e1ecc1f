-- The table `operator_call`: calls of operators, and the time in which their own events ran.
SELECT
    rank,
    call_id,
    op_row,
    any_value(op) AS op,
    arg_min(phase, row) AS phase,
    count(*) AS event_count,
    sum(greatest(end_ns - greatest(start_ns, end_before_ns), 0))::BIGINT AS busy_ns
FROM (
    SELECT
        *,
        start_ns + dur_ns AS end_ns,
        max(start_ns + dur_ns) OVER (
            PARTITION BY rank, call_id
            ORDER BY start_ns, row
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS end_before_ns
    FROM (
        SELECT rank, row, start_ns, dur_ns, op_row, op, phase, coalesce(op_row, -1 - row) AS call_id
        FROM step_event
    )
)
GROUP BY rank, call_id, op_row
ORDER BY rank, call_id
