-- name: held
SELECT j.key, j.id, j.state, j.token, j.rerun IS NOT NULL OR j.grip, j.incarnation, j.runs, j.worker, j.claimed_at,
    j.enqueued_at, j.run_id, o.value, CASE WHEN j.binds THEN j.annex END
FROM json_each(?) e
CROSS JOIN jobs j ON j.queue = ? AND j.id = e.value
JOIN options o ON o.key = j.options

-- name: complete
UPDATE jobs SET state = 'completed', settled_as = 'completed', finished_at = ?, kept_until = ?, worker = '',
    lease_until = 0, result = ?
WHERE key = ?
