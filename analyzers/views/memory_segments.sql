-- Segments that the allocator held from the driver, and their fragmentation.
--
-- A gap cannot serve a request larger than itself: the largest gap shows what still fits.
--
-- title: Memory segments
-- section: Memory
-- needs: no snapshot of the allocator (record with memory=True, or import one with the trace)
-- from: allocator_segment
-- columns:
--   rank, int32: Global rank that the row is about.
--   device: Device of the memory: `device N`.
--   kind, null: Kind of segment: small (blocks of up to 1 MiB) or large.
--   stream_id, int64, null: Stream that the segments serve; null where not recorded.
--   segment_count: Number of segments.
--   reserved_bytes: Size of the segments, reserved from the driver.
--   allocated_bytes: Bytes of the segments that tensors hold.
--   fragmentation_ratio, null: Share of the segments' bytes that no tensor holds.
--   gap_count: Number of gaps between tensors, free segments included.
--   largest_gap_bytes: Size of the largest gap: what fits without a new segment.
--   whole_free_bytes: Bytes in unused segments, which empty_cache() returns.
--   rounding_bytes, null: Bytes held beyond what tensors requested.
WITH segments AS (
    SELECT
        rank,
        device_id,
        kind,
        stream_id,
        count(*) AS segment_count,
        sum(coalesce(total_bytes, 0)) AS reserved_bytes,
        sum(coalesce(allocated_bytes, 0)) AS allocated_bytes,
        coalesce(sum(total_bytes) FILTER (coalesce(allocated_bytes, 0) = 0), 0) AS whole_free_bytes
    FROM allocator_segment
    GROUP BY ALL
),
blocks AS (
    SELECT
        segment.rank,
        segment.device_id,
        kind,
        segment.stream_id,
        count(*) FILTER (NOT held) AS gap_count,
        coalesce(max(size_bytes) FILTER (NOT held), 0) AS largest_gap_bytes,
        if(
            bool_or(block.requested_bytes > 0) FILTER (held),
            greatest(sum(coalesce(size_bytes, 0) - coalesce(block.requested_bytes, 0)) FILTER (held), 0),
            NULL
        ) AS rounding_bytes
    FROM (SELECT *, starts_with(state, 'active') AS held FROM allocator_block) block
    JOIN allocator_segment segment
        ON segment.rank = block.rank
        AND segment.device_id = block.device_id
        AND segment.address_id = segment_address_id
    GROUP BY ALL
)
SELECT
    segments.rank,
    if(segments.device_id < 0, 'unknown device', 'device ' || segments.device_id) AS device,
    segments.kind,
    segments.stream_id,
    segment_count,
    reserved_bytes,
    allocated_bytes,
    1 - allocated_bytes / nullif(reserved_bytes, 0) AS fragmentation_ratio,
    coalesce(gap_count, 0) AS gap_count,
    coalesce(largest_gap_bytes, 0) AS largest_gap_bytes,
    whole_free_bytes,
    rounding_bytes
FROM segments LEFT JOIN blocks
    ON blocks.rank = segments.rank
    AND blocks.device_id = segments.device_id
    AND blocks.kind IS NOT DISTINCT FROM segments.kind
    AND blocks.stream_id IS NOT DISTINCT FROM segments.stream_id
ORDER BY reserved_bytes DESC, segments.rank, segments.device_id, segments.kind, segments.stream_id
