-- Exposed and hidden communication by collective, group, phase and layer.
--
-- Summed over ranks and steps: exposed and hidden time.
--
-- title: Exposed and hidden communication
-- section: Communication
-- needs: no communication was recorded
-- from: communication
-- columns:
--   collective: Normalized name of the collective, as allreduce.
--   ranks, null: Global ranks that take part; null where not recorded.
--   phase: Phase of the communication events.
--   layer, null: Module path of the layer of the communication events.
--   event_count: Number of communication events.
--   exposed_ns: Exposed communication: time without overlapping compute.
--   share_ratio: Exposed communication as a share of the observed time.
--   hidden_ns: Hidden communication: time with overlapping compute.
--   elapsed_ns: Sum of the events' durations in the steps, including overlap.
--   waiting_ns: Part of the exposed time before the last rank arrived.
--   at_peak_ns: Part of the exposed time that the bytes need at the link's peak.
--   below_peak_ns: Part of the exposed transfer beyond what the link's peak needs.
--   no_peak_ns: Part of the exposed transfer with an unknown link peak or size.
--   unseparated_ns: Exposed time of unmatched collectives, wait and transfer alike.
--   group, null: Name of the process group; null where not recorded.
WITH observed AS (
    SELECT rank, min(start_ns) AS low_ns, max(end_ns) AS high_ns, sum(end_ns - start_ns) AS time_ns
    FROM "window" JOIN selection USING (rank, step_index)
    WHERE in_step_time
    GROUP BY rank
),
event AS (
    SELECT
        communication.*,
        phase,
        layer,
        greatest(start_ns, low_ns) AS start_ns,
        least(start_ns + dur_ns, high_ns) AS end_ns
    FROM communication
    JOIN device_event event ON event.rank = communication.rank AND event.row = event_row
    JOIN event_link link ON link.rank = communication.rank AND link.row = event_row
    JOIN observed ON observed.rank = communication.rank
    LEFT JOIN selection
        ON selection.rank = communication.rank AND selection.step_index = link.step_index
    WHERE (link.step_index IS NULL OR in_step_time)
        AND start_ns < high_ns AND start_ns + dur_ns > low_ns
),
computing AS (
    -- How long kernels had run, and until when, as each began: overlaps count once.
    SELECT rank, start_ns, max(reached_ns) AS reached_ns, max(busy_ns) AS busy_ns
    FROM (
        SELECT
            rank,
            start_ns,
            greatest(end_ns, reached_before_ns) AS reached_ns,
            sum(greatest(end_ns - greatest(start_ns, reached_before_ns), 0)) OVER (
                PARTITION BY rank ORDER BY start_ns, row ROWS UNBOUNDED PRECEDING
            ) AS busy_ns
        FROM (
            SELECT
                rank,
                row,
                start_ns,
                start_ns + dur_ns AS end_ns,
                max(start_ns + dur_ns) OVER (
                    PARTITION BY rank ORDER BY start_ns, row
                    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
                ) AS reached_before_ns
            FROM device_event JOIN event_link USING (rank, row)
            WHERE work_class = 'compute'
        )
    )
    GROUP BY rank, start_ns
),
spent AS (
    SELECT
        rank,
        event_row,
        sum(time_ns) FILTER (cause LIKE 'communication.wait%' OR cause LIKE 'communication.pipeline%') AS waiting,
        sum(time_ns) FILTER (cause LIKE 'communication.transfer.at_peak%') AS at_peak,
        sum(time_ns) FILTER (cause LIKE 'communication.transfer.below_peak%') AS below_peak,
        sum(time_ns) FILTER (cause LIKE 'communication.transfer.no_peak%') AS no_peak,
        sum(time_ns) FILTER (cause LIKE 'communication.unseparated%') AS unseparated
    FROM piece JOIN selection USING (rank, step_index)
    WHERE in_step_time AND cause LIKE 'communication%'
    GROUP BY rank, event_row
)
SELECT
    collective,
    ranks,
    phase,
    layer,
    "group",
    count(*) AS event_count,
    coalesce(sum(waiting), 0) AS waiting_ns,
    coalesce(sum(at_peak), 0) AS at_peak_ns,
    coalesce(sum(below_peak), 0) AS below_peak_ns,
    coalesce(sum(no_peak), 0) AS no_peak_ns,
    coalesce(sum(unseparated), 0) AS unseparated_ns,
    waiting_ns + at_peak_ns + below_peak_ns + no_peak_ns + unseparated_ns AS exposed_ns,
    exposed_ns / greatest((SELECT sum(time_ns) FROM observed), 1) AS share_ratio,
    sum(
        coalesce(last.busy_ns - greatest(last.reached_ns - event.end_ns, 0), 0)
        - coalesce(first.busy_ns - greatest(first.reached_ns - event.start_ns, 0), 0)
    ) AS hidden_ns,
    sum(event.end_ns - event.start_ns) AS elapsed_ns
FROM event
LEFT JOIN spent USING (rank, event_row)
ASOF LEFT JOIN computing first
    ON first.rank = event.rank AND event.start_ns >= first.start_ns
ASOF LEFT JOIN computing last ON last.rank = event.rank AND event.end_ns >= last.start_ns
GROUP BY collective, ranks, phase, layer, "group"
ORDER BY exposed_ns DESC, elapsed_ns DESC, collective, ranks, "group", phase, layer
