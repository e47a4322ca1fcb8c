-- name: timed_out
SELECT {record}
FROM jobs j JOIN options o ON o.key = j.options
WHERE j.queue = ? AND j.wake_at > 0 AND j.wake_at <= ?
ORDER BY j.wake_at, j.id LIMIT ?

-- name: active
SELECT count(*) FROM jobs WHERE queue = ? AND state = 'active'

-- name: renew_leases
-- Leases that were ended on purpose (1) stay ended.
UPDATE jobs SET lease_until = max(? + max(lease_until - ?, 0), ?)
WHERE queue = ? AND state = 'active' AND lease_until > 1 AND lease_until <= ?

-- name: stalled
SELECT {record}
FROM jobs j JOIN options o ON o.key = j.options
WHERE j.queue = ? AND j.state = 'active' AND j.lease_until <= ? AND NOT (j.lease_until > ? AND j.lease_until <= ?)
ORDER BY j.lease_until, j.id LIMIT ?

-- name: past_ttl
SELECT {record}
FROM jobs j JOIN options o ON o.key = j.options
WHERE j.queue = ? AND j.expires_at > 0 AND j.kept_until = 0 AND j.lease_until = 0 AND j.expires_at <= ?
ORDER BY j.expires_at, j.id LIMIT ?

-- name: forgotten
SELECT {record}
FROM jobs j JOIN options o ON o.key = j.options
WHERE j.queue = ? AND j.kept_until > 0 AND j.state IN ('completed', 'failed', 'cancelled') AND j.kept_until BETWEEN ? AND ?
LIMIT ?

-- name: surplus
SELECT {record}
FROM jobs j JOIN options o ON o.key = j.options
WHERE j.queue = ? AND j.state = ? AND j.kept_until > 0 AND j.held_until = 0
ORDER BY j.kept_until, j.id LIMIT ?

-- name: forget_consumers
DELETE FROM consumers WHERE queue = ? AND expires_at <= ?

-- name: forget_workers
DELETE FROM workers WHERE queue = ? AND seen_at <= ?

-- name: forget_replays
DELETE FROM memo WHERE queue = ? AND at_ms <= ?

-- name: next_time
SELECT min(at) FROM (
    SELECT min(run_at) AS at FROM jobs WHERE queue = :queue AND state = 'scheduled' AND run_at < {staged_from}
    UNION ALL SELECT min(wake_at) FROM jobs WHERE queue = :queue AND wake_at > 0
    UNION ALL SELECT min(held_until) FROM jobs WHERE queue = :queue AND NOT :is_lagging AND held_until > 0
    UNION ALL SELECT min(lease_until) FROM jobs WHERE queue = :queue AND state = 'active'
    UNION ALL SELECT min(expires_at) FROM jobs
        WHERE queue = :queue AND expires_at > 0 AND kept_until = 0 AND lease_until = 0
    UNION ALL SELECT min(kept_until) FROM jobs WHERE queue = :queue AND NOT :is_lagging AND state = 'completed' AND kept_until > 0
    UNION ALL SELECT min(kept_until) FROM jobs WHERE queue = :queue AND NOT :is_lagging AND state = 'failed' AND kept_until > 0
    UNION ALL SELECT min(kept_until) FROM jobs WHERE queue = :queue AND NOT :is_lagging AND state = 'cancelled' AND kept_until > 0
    UNION ALL SELECT min(look_at) FROM job_groups WHERE queue = :queue AND look_at > 0
    UNION ALL SELECT min(over_at) FROM job_groups WHERE queue = :queue AND over_at > 0
)
