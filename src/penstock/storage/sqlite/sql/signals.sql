-- name: received
SELECT data FROM signals WHERE job = ? AND number = 0

-- name: receive
INSERT INTO signals (job, number, name, data) VALUES (?, 0, ?, ?)

-- name: forget
DELETE FROM signals WHERE job = ? AND number = ?

-- name: oldest
SELECT number, data FROM signals WHERE job = ? AND name = ? AND number > 0 ORDER BY number LIMIT 1

-- name: keep
INSERT INTO signals (job, number, name, data)
SELECT :job, coalesce(max(number), 0) + 1, :name, :data FROM signals WHERE job = :job
