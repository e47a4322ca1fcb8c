-- LEFT JOIN, so that the statements also find damaged jobs without options or payload.

-- name: heads
SELECT p.job IS NULL, {record}
FROM jobs j LEFT JOIN options o ON o.key = j.options LEFT JOIN payloads p ON p.job = j.key
WHERE j.key IN (
    SELECT key FROM (SELECT key FROM jobs WHERE queue = :queue AND state = 'waiting' ORDER BY priority, place LIMIT :limit)
    UNION ALL
    SELECT key FROM (SELECT key FROM jobs WHERE queue = :queue AND state = 'scheduled' ORDER BY run_at, id LIMIT :limit)
    UNION ALL
    SELECT key FROM (SELECT key FROM jobs WHERE queue = :queue AND state = 'active' ORDER BY lease_until LIMIT :limit)
    UNION ALL
    SELECT key FROM (SELECT key FROM jobs WHERE queue = :queue AND state = 'blocked' ORDER BY place LIMIT :limit)
)
ORDER BY j.key

-- name: walk
SELECT p.job IS NULL, {record}
FROM jobs j LEFT JOIN options o ON o.key = j.options LEFT JOIN payloads p ON p.job = j.key
WHERE j.queue = ? AND j.key > ?
ORDER BY j.key LIMIT ?

-- name: by_ids
SELECT p.job IS NULL, {record}
FROM json_each(?) e
CROSS JOIN jobs j ON j.queue = ? AND j.id = e.value
LEFT JOIN options o ON o.key = j.options LEFT JOIN payloads p ON p.job = j.key

-- name: recent
SELECT count(*) FROM jobs WHERE queue = ? AND error_type <> '' AND error_type = ? AND finished_at > ?

-- name: rename
UPDATE jobs SET id = ? WHERE key = ?

-- name: is_taken
SELECT 1 FROM jobs WHERE queue = ? AND id = ?

-- name: dependents_of
SELECT q.name, d.parent, p.flow
FROM dependencies d JOIN parents p ON p.queue = d.queue AND p.id = d.parent JOIN queues q ON q.key = d.queue
WHERE q.namespace = ? AND d.on_queue = ? AND d.on_id = ?
ORDER BY d.key

-- name: leave_lines
DELETE FROM group_lines WHERE queue = ? AND id = ?

-- name: forget_dedup
DELETE FROM dedup WHERE queue = ? AND id = ? AND incarnation = ? AND expires_at = 0

-- name: forget_signals
DELETE FROM signals WHERE job = ?

-- name: has_steps
SELECT 1 FROM steps WHERE job = ? LIMIT 1

-- name: steps_of
SELECT job, CAST(name AS BLOB), number, status, at_ms, until_ms, body, length(result) FROM steps
WHERE job IN (SELECT value FROM json_each(?))

-- name: take_step
DELETE FROM steps WHERE job = ? AND CAST(name AS BLOB) = ? RETURNING body, result

-- name: limits
SELECT key, value FROM limits WHERE queue = ?

-- name: drop_limit
DELETE FROM limits WHERE queue = ? AND key = ?

-- name: edges
SELECT key, policy, state, failure FROM dependencies WHERE queue = ?

-- name: mend_edge
UPDATE dependencies SET policy = ?, state = ?, failure = NULL WHERE key = ?

-- name: has_unknown_states
SELECT EXISTS (SELECT 1 FROM jobs WHERE queue = ? AND state NOT IN (SELECT value FROM json_each(?)))
