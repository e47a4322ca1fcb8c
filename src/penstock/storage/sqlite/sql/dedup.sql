-- name: find
SELECT id, incarnation, expires_at FROM dedup WHERE queue = ? AND key = ?

-- name: put
INSERT INTO dedup (queue, key, id, incarnation, expires_at) VALUES (?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET id = excluded.id, incarnation = excluded.incarnation, expires_at = excluded.expires_at

-- name: end
DELETE FROM dedup WHERE queue = ? AND key = ? AND incarnation = ?

-- name: clear
DELETE FROM dedup WHERE queue = ? AND key = ?

-- name: forget
DELETE FROM dedup WHERE (queue, key) IN (
    SELECT queue, key FROM dedup WHERE queue = ? AND expires_at > 0 AND expires_at <= ? LIMIT ?
)

-- name: obliterate
DELETE FROM dedup WHERE queue = ?
