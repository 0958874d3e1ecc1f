-- The table `collective_member`: the matched collectives of the step time, a row per rank.
WITH matched AS (
    SELECT communication.*, event.start_ns, phase, layer, op
    FROM communication
    JOIN event_link link ON link.rank = communication.rank AND link.row = event_row
    JOIN device_event event ON event.rank = communication.rank AND event.row = event_row
    LEFT JOIN selection
        ON selection.rank = communication.rank AND selection.step_index = link.step_index
    WHERE instance_id IS NOT NULL AND (link.step_index IS NULL OR in_step_time)
    -- The rank that came last may be one that has no row: it lies outside that rank's steps.
    QUALIFY count(*) OVER (PARTITION BY instance_id) = rank_count
),
step AS (
    SELECT "window".*
    FROM "window" JOIN selection USING (rank, step_index)
    WHERE in_step_time
),
spent AS (
    SELECT
        rank,
        event_row,
        sum(time_ns) AS exposed_ns,
        sum(time_ns) FILTER (cause LIKE 'communication.wait%' OR cause LIKE 'communication.pipeline%') AS exposed_waiting_ns
    FROM piece JOIN selection USING (rank, step_index)
    WHERE in_step_time AND cause LIKE 'communication%'
    GROUP BY rank, event_row
)
SELECT
    instance_id,
    matched.rank,
    matched.event_row,
    row_number() OVER (PARTITION BY instance_id ORDER BY arrival_ns DESC, matched.rank DESC) = 1
        AS is_last,
    if(matched.start_ns < step.end_ns, number, NULL) AS step,
    collective,
    ranks,
    "group",
    sequence_id,
    rank_count,
    phase,
    layer,
    op,
    matched.start_ns,
    arrival_ns,
    ready_ns,
    left_ns,
    -- A rank that left 50 µs before the last one came, as the root of a broadcast, did not wait.
    if(left_ns >= ready_ns - 50_000, greatest(least(ready_ns, left_ns) - arrival_ns, 0), 0)
        AS waiting_ns,
    coalesce(exposed_ns, 0)::BIGINT AS exposed_ns,
    coalesce(exposed_waiting_ns, 0)::BIGINT AS exposed_waiting_ns,
    message_bytes,
    bus_factor,
    link_bytes_per_s,
    link_source
FROM matched
ASOF LEFT JOIN step ON step.rank = matched.rank AND matched.start_ns >= step.start_ns
LEFT JOIN spent ON spent.rank = matched.rank AND spent.event_row = matched.event_row
ORDER BY instance_id, matched.rank
