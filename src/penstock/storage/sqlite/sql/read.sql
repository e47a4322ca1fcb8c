-- name: by_ids
SELECT p.payload, {record}
FROM json_each(?) e
CROSS JOIN jobs j ON j.queue = ? AND j.id = e.value
JOIN options o ON o.key = j.options JOIN payloads p ON p.job = j.key

-- name: list_waiting
SELECT p.payload, {record}
FROM jobs j JOIN options o ON o.key = j.options JOIN payloads p ON p.job = j.key
WHERE j.queue = :queue AND j.state = 'waiting' {and_after}
ORDER BY j.priority {direction}, j.place {direction} LIMIT :limit

-- name: list_scheduled
SELECT p.payload, {record}
FROM jobs j JOIN options o ON o.key = j.options JOIN payloads p ON p.job = j.key
WHERE j.queue = :queue AND j.state = 'scheduled' {and_after}
ORDER BY j.run_at {direction}, j.id {direction} LIMIT :limit

-- name: list_blocked
SELECT p.payload, {record}
FROM jobs j JOIN options o ON o.key = j.options JOIN payloads p ON p.job = j.key
WHERE j.queue = :queue AND j.state = 'blocked' {and_after}
ORDER BY j.place {direction}, j.id {direction} LIMIT :limit

-- name: list_active
SELECT p.payload, {record}
FROM jobs j JOIN options o ON o.key = j.options JOIN payloads p ON p.job = j.key
WHERE j.queue = :queue AND j.state = 'active' {and_after}
ORDER BY j.lease_until {direction}, j.id {direction} LIMIT :limit

-- name: list_finished
SELECT p.payload, {record}
FROM jobs j JOIN options o ON o.key = j.options JOIN payloads p ON p.job = j.key
WHERE j.queue = :queue AND j.state = :state AND j.kept_until > 0 {and_after}
ORDER BY j.kept_until {direction}, j.id {direction} LIMIT :limit

-- name: next_ready_at
SELECT ready_at FROM jobs WHERE queue = ? AND state = 'waiting' ORDER BY priority, place LIMIT 1

-- name: overdue
SELECT count(*), min(run_at) FROM jobs WHERE queue = ? AND state = 'scheduled' AND run_at <= ?

-- name: next_moved
SELECT min(at) FROM (
    SELECT min(run_at) AS at FROM jobs WHERE queue = :queue AND state = 'scheduled' AND run_at < {staged_from}
    UNION ALL SELECT min(wake_at) FROM jobs WHERE queue = :queue AND wake_at > 0
    UNION ALL SELECT min(look_at) FROM job_groups WHERE queue = :queue AND look_at > 0
)

-- name: staged
SELECT count(*) FROM jobs WHERE queue = ? AND state = 'scheduled' AND run_at >= {staged_from}

-- name: worker_ids
SELECT id FROM workers WHERE queue = ?

-- name: workers
SELECT id, info, seen_at FROM workers WHERE queue = ? ORDER BY id

-- name: depart
DELETE FROM workers WHERE queue = ? AND id = ?

-- name: log_range
SELECT min(l.number), max(l.number) FROM jobs j JOIN logs l ON l.job = j.key
WHERE j.queue = ? AND j.id = ?

-- name: logs
SELECT l.line FROM jobs j JOIN logs l ON l.job = j.key
WHERE j.queue = ? AND j.id = ? AND l.number > ? ORDER BY l.number LIMIT ?

-- name: due
SELECT 1 FROM jobs WHERE queue = ? AND state = 'scheduled' AND run_at <= ? LIMIT 1

-- name: queue_limit
SELECT value FROM limits WHERE queue = ? AND key = ''

-- name: queue_parked
SELECT 1 FROM job_groups WHERE queue = ? AND key = '' AND parked_until > ?

-- name: queue_starts
SELECT coalesce(sum(count), 0) FROM starts WHERE queue = ? AND key = '' AND at_ms > ?
