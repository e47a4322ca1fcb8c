-- name: note
INSERT OR REPLACE INTO instants (queue, id, wall_at, run_at) VALUES (?, ?, ?, ?)

-- name: forget
DELETE FROM instants WHERE queue = ? AND id IN (SELECT value FROM json_each(?))

-- name: to_follow
SELECT id, wall_at, run_at FROM instants WHERE queue = ? AND wall_at >= ? ORDER BY wall_at LIMIT ?

-- name: at
SELECT id, wall_at, run_at FROM instants WHERE queue = ? AND wall_at = ?

-- name: any
SELECT 1 FROM instants WHERE queue = ? LIMIT 1

-- name: obliterate
DELETE FROM instants WHERE queue = ?
