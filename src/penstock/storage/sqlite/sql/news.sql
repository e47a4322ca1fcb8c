-- name: waiters_of
SELECT job, listener FROM waiters WHERE job IN (SELECT value FROM json_each(?))

-- name: add_waiter
INSERT OR IGNORE INTO waiters (job, listener) VALUES (?, ?)

-- name: publish
INSERT INTO news (queue, listener, at_ms, body) VALUES (?, ?, ?, ?)

-- name: after
SELECT n.key, n.body FROM queues q JOIN news n ON n.queue = q.key
WHERE q.namespace = ? AND q.name = ? AND n.listener = ? AND n.key > ?
ORDER BY n.key

-- name: forget
DELETE FROM news WHERE queue = ? AND at_ms < ?
