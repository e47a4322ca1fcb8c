-- name: after
SELECT last_seq, first_seq, entry FROM events WHERE queue = ? AND last_seq > ? ORDER BY last_seq

-- name: drop_entry
DELETE FROM events WHERE queue = ? AND last_seq = ?

-- name: add_entry
INSERT INTO events (queue, last_seq, first_seq, at_ms, bytes, entry) VALUES (?, ?, ?, ?, ?, ?)

-- name: oldest
SELECT last_seq, at_ms, bytes, last_seq - first_seq + 1 FROM events WHERE queue = ? ORDER BY last_seq LIMIT ?

-- name: trim
DELETE FROM events WHERE queue = ? AND last_seq <= ?

-- name: furthest_behind
SELECT min(position) FROM consumers WHERE queue = ?

-- name: hold
INSERT INTO consumers (queue, name, position, expires_at) VALUES (?, ?, ?, ?)
ON CONFLICT DO UPDATE SET position = max(position, excluded.position), expires_at = excluded.expires_at

-- name: release
DELETE FROM consumers WHERE queue = ? AND name = ?

-- name: consumers
SELECT name, position, expires_at FROM consumers WHERE queue = ? ORDER BY name

-- name: epoch
SELECT value FROM meta WHERE name = 'epoch'
