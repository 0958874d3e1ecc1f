-- Lead of each rank over the last one, by step.
--
-- The lead of an event is the latest start over the ranks minus its own start, in one clock (arXiv
-- 2512.08242). Collectives are matched across ranks; compute kernels by step, name and order, if all
-- ranks ran the same number of that name in that step.
--
-- title: Lead of ranks
-- section: Communication
-- needs: there is only one rank, or the ranks ran nothing in common
-- columns:
--   rank, int32: Global rank that the row is about.
--   step, int64, null: Step number; null where no step holds it.
--   kind: Kind of the compared events: collective or kernel.
--   median_ns: Median lead: how long before the last rank this rank starts.
--   p95_ns: 95th percentile of the lead.
--   last_ratio: Share of the events at which this rank started last.
--   event_count: Number of compared events.
WITH clock AS (
    -- Events are in the clock of their rank; arrivals are in one for all.
    SELECT communication.rank, first(start_ns - arrival_ns ORDER BY event_row) AS ahead_ns
    FROM communication JOIN device_event
        ON device_event.rank = communication.rank AND row = event_row
    GROUP BY communication.rank
),
kernel AS (
    SELECT
        step_event.rank,
        number AS step,
        kernel,
        start_ns - coalesce(ahead_ns, 0) AS start_ns,
        row_number() OVER (
            PARTITION BY step_event.rank, number, kernel ORDER BY start_ns, step_event.row
        ) AS occurrence,
        count(*) OVER (PARTITION BY step_event.rank, number, kernel) AS rank_events_count
    FROM step_event
    JOIN selection USING (rank, step_index)
    LEFT JOIN clock ON clock.rank = step_event.rank
    WHERE work_class = 'compute' AND (SELECT count(*) FROM ranks) > 1
),
common AS (
    SELECT step, kernel
    FROM kernel
    GROUP BY step, kernel
    HAVING count(DISTINCT rank) = (SELECT count(*) FROM ranks)
        AND min(rank_events_count) = max(rank_events_count)
),
lead AS (
    SELECT 'collective' AS kind, rank, step, ready_ns - arrival_ns AS lead_ns
    FROM collective_member
    UNION ALL
    SELECT
        'kernel',
        rank,
        kernel.step,
        max(start_ns) OVER (PARTITION BY kernel.step, kernel.kernel, occurrence) - start_ns
    FROM kernel JOIN common
        ON common.kernel = kernel.kernel AND common.step IS NOT DISTINCT FROM kernel.step
)
SELECT
    rank,
    step,
    kind,
    trunc(median(lead_ns)) AS median_ns,
    trunc(round(quantile_cont(lead_ns, 0.95), 3)) AS p95_ns,
    count(*) FILTER (lead_ns <= 0) / count(*) AS last_ratio,
    count(*) AS event_count
FROM lead
GROUP BY rank, step, kind
ORDER BY median_ns DESC, rank, kind, step
