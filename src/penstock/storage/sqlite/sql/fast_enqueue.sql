-- name: insert
INSERT INTO jobs (
    key, queue, id, incarnation, state, priority, place, options, ttl_ms, run_id, write_id, ready_at, run_at,
    enqueued_at, expires_at, blocked_by, runs, failures, stalls, claimed_at, finished_at, kept_until, token,
    settled_as, worker, lease_until, cancelling
) VALUES (?, ?, ?, ?, 'waiting', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, '', 0, 0, 0, 0, 0, 0, 0, '', '', 0, 0)
