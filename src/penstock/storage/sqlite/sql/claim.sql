-- name: due
SELECT {record}
FROM jobs j JOIN options o ON o.key = j.options
WHERE j.queue = ? AND j.state = 'scheduled' AND j.run_at <= ?
ORDER BY j.run_at, j.id LIMIT ?

-- name: head
SELECT j.key, j.expires_at, j.ready_at, j.run_id, j.cancelling, j.enqueued_at, j.priority, o.value, p.payload,
    j.stalls, j.failures, j.runs, j.incarnation, j.id, j.annex,
    CASE WHEN j.expires_at > 0 AND j.expires_at <= ? THEN 2 ELSE j.binds END
FROM jobs j JOIN options o ON o.key = j.options JOIN payloads p ON p.job = j.key
WHERE j.queue = ? AND j.state = 'waiting'
ORDER BY j.priority, j.place LIMIT ?

-- name: lease
UPDATE jobs SET state = 'active', token = ?, runs = runs + 1, claimed_at = ?, lease_until = ?, worker = ?,
    settled_as = ''
WHERE key = ?

-- name: held
SELECT p.payload, {record}
FROM json_each(?) e
CROSS JOIN jobs j ON j.queue = ? AND j.id = e.value
JOIN options o ON o.key = j.options JOIN payloads p ON p.job = j.key
WHERE j.state = 'active'

-- name: leases_of
SELECT id, token FROM jobs
WHERE queue = ? AND state = 'active' AND worker = ?
ORDER BY lease_until, id

-- name: push
UPDATE jobs SET lease_until = ? WHERE key = ?

-- name: see_worker
INSERT INTO workers (queue, id, info, seen_at) VALUES (?, ?, ?, ?)
ON CONFLICT DO UPDATE SET info = excluded.info, seen_at = excluded.seen_at
