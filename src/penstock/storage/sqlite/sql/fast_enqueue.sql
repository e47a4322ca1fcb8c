-- name: insert
INSERT INTO jobs (
    key, queue, id, incarnation, state, priority, place, options, ttl_ms, run_id, write_id, ready_at, run_at,
    enqueued_at, expires_at, blocked_by, {later}
) VALUES (?, ?, ?, ?, 'waiting', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, '', {later_values})
