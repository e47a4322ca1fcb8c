-- name: get
SELECT name, spec, next_at, paused, fired, slots_limit, end_at, repeat_ms, last_id, awaits
FROM schedulers WHERE queue = ? AND name = ?

-- name: all
SELECT name, spec, next_at, paused, fired, slots_limit, end_at, repeat_ms, last_id, awaits
FROM schedulers WHERE queue = ? ORDER BY name

-- name: put
INSERT INTO schedulers (queue, name, spec, next_at, paused, fired, slots_limit, end_at, repeat_ms, last_id, awaits)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET
    spec = excluded.spec, next_at = excluded.next_at, paused = excluded.paused, fired = excluded.fired,
    slots_limit = excluded.slots_limit, end_at = excluded.end_at, repeat_ms = excluded.repeat_ms,
    last_id = excluded.last_id, awaits = excluded.awaits

-- name: remove
DELETE FROM schedulers WHERE queue = ? AND name = ?

-- name: awaiting
SELECT name, spec, next_at, paused, fired, slots_limit, end_at, repeat_ms, last_id, awaits
FROM schedulers WHERE queue = ? AND awaits > 0

-- name: is_awaiting
SELECT EXISTS (SELECT 1 FROM schedulers WHERE queue = ? AND awaits > 0 AND paused = 0)

-- name: due
SELECT name, next_at, spec FROM schedulers
WHERE queue = ? AND paused = 0 AND next_at > 0 AND next_at <= ?
ORDER BY next_at, name LIMIT ?

-- name: next_slot
SELECT min(next_at) FROM schedulers WHERE queue = ? AND paused = 0 AND next_at > 0 AND next_at > ?
