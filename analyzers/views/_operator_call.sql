-- The table `operator_call`: calls of operators, the time in which their own events ran, and their
-- arguments without white space.
WITH event AS (
    SELECT
        rank,
        row,
        coalesce(op_row, -1 - row) AS call_id,
        op_row,
        op,
        phase,
        start_ns,
        start_ns + dur_ns AS end_ns,
        max(start_ns + dur_ns) OVER (
            PARTITION BY rank, coalesce(op_row, -1 - row)
            ORDER BY start_ns, row
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS end_before_ns
    FROM step_event
),
call AS (
    SELECT
        rank,
        call_id,
        op_row,
        any_value(op) AS op,
        arg_min(phase, row) AS phase,
        count(*) AS event_count,
        sum(greatest(end_ns - greatest(start_ns, end_before_ns), 0))::BIGINT AS busy_ns
    FROM event
    GROUP BY rank, call_id, op_row
),
span AS (
    SELECT call.rank, row, input_dims, input_types, concrete_inputs
    FROM call JOIN host_span ON host_span.rank = call.rank AND row = op_row
),
argument AS (
    SELECT
        text,
        if(json_valid(text), regexp_replace(text, '("(?:[^"\\]|\\.)*")|\s+', '\1', 'g'), text)
            AS short
    FROM (SELECT DISTINCT unnest([input_dims, input_types, concrete_inputs]) AS text FROM span)
)
SELECT
    call.*,
    dims.short AS input_dims,
    types.short AS input_types,
    inputs.short AS concrete_inputs
FROM call
LEFT JOIN span ON span.rank = call.rank AND span.row = op_row
LEFT JOIN argument dims ON dims.text = span.input_dims
LEFT JOIN argument types ON types.text = span.input_types
LEFT JOIN argument inputs ON inputs.text = span.concrete_inputs
ORDER BY call.rank, call_id
