-- name: held
SELECT j.key, j.id, j.state, j.token, j.incarnation, j.enqueued_at, j.run_id, o.value, j.runs, j.worker, j.annex
FROM json_each(?) e
CROSS JOIN jobs j ON j.queue = ? AND j.id = e.value
JOIN options o ON o.key = j.options

-- name: known
SELECT s.job, s.name, s.number, s.status
FROM json_each(?) e
CROSS JOIN steps s ON s.job = json_extract(e.value, '$[0]') AND s.name = json_extract(e.value, '$[1]')

-- name: record
INSERT INTO steps (job, name, number, status, at_ms, until_ms, body, result) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET status = excluded.status, at_ms = excluded.at_ms, until_ms = excluded.until_ms,
    body = excluded.body, result = excluded.result

-- name: mark
UPDATE jobs SET lease_until = max(lease_until, ?), annex = coalesce(?, annex) WHERE key = ?

-- name: of_job
SELECT name, number, status, at_ms, until_ms, body FROM steps WHERE job = ? ORDER BY number LIMIT ?

-- name: all
SELECT s.name, s.number, s.status, s.at_ms, s.until_ms, s.body
FROM jobs j JOIN steps s ON s.job = j.key
WHERE j.queue = ? AND j.id = ? ORDER BY s.number

-- name: named
SELECT s.name, s.number, s.status, s.at_ms, s.until_ms, s.body, s.result
FROM json_each(?) e CROSS JOIN jobs j ON j.queue = ? AND j.id = ? JOIN steps s ON s.job = j.key AND s.name = e.value
ORDER BY s.number

-- name: reset
DELETE FROM steps WHERE job = ? AND name = ?

-- name: under_way
SELECT name FROM steps WHERE job = ? AND status = 'started' AND at_ms >= ? ORDER BY number DESC LIMIT 1

-- name: first_of
SELECT min(number) FROM steps WHERE job = :job AND (name = :name OR substr(name, 1, length(:name) + 1) = :name || '[')

-- name: earlier
SELECT name, status, at_ms, until_ms, body, result FROM steps WHERE job = ? AND number < ? ORDER BY number

-- name: copy
INSERT INTO steps (job, name, number, status, at_ms, until_ms, body, result) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO NOTHING

-- name: forgive
DELETE FROM steps WHERE job = ? AND status <> 'completed'
