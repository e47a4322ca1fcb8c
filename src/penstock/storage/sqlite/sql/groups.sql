-- name: load
SELECT key, waiting, active, held, blocked, cost, parked_until, paused, starts, level, level_at, level_per, look_at,
    over_at
FROM job_groups WHERE queue = ? AND key = ?

-- name: save
INSERT INTO job_groups (
    key, waiting, active, held, blocked, cost, parked_until, paused, starts, level, level_at, level_per, look_at, over_at,
    queue
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET waiting = excluded.waiting, active = excluded.active, held = excluded.held,
    blocked = excluded.blocked, cost = excluded.cost, parked_until = excluded.parked_until, paused = excluded.paused,
    starts = excluded.starts, level = excluded.level, level_at = excluded.level_at, level_per = excluded.level_per,
    look_at = excluded.look_at, over_at = excluded.over_at

-- name: drop
DELETE FROM job_groups WHERE queue = ? AND key = ?

-- name: limits_for
SELECT key, value FROM limits WHERE queue = ? AND key IN (?, '*')

-- name: limits
SELECT key, value FROM limits WHERE queue = ? ORDER BY key

-- name: set_limit
INSERT INTO limits (queue, key, value) VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET value = excluded.value

-- name: remove_limit
DELETE FROM limits WHERE queue = ? AND key = ?

-- name: left_window
SELECT sum(count) FROM starts WHERE queue = ? AND key = ? AND at_ms <= ?

-- name: slide
DELETE FROM starts WHERE queue = ? AND key = ? AND at_ms <= ?

-- name: first_start
SELECT min(at_ms) FROM starts WHERE queue = ? AND key = ?

-- name: last_start
SELECT max(at_ms) FROM starts WHERE queue = ? AND key = ?

-- name: add_start
INSERT INTO starts (queue, key, at_ms, count) VALUES (?, ?, ?, ?)
ON CONFLICT DO UPDATE SET count = count + excluded.count

-- name: line_up
INSERT INTO group_lines (rank, priority, place, queue, key, id) VALUES (?, ?, ?, ?, ?, ?)

-- name: step_out
DELETE FROM group_lines WHERE rank = ? AND priority = ? AND place = ? AND queue = ? AND key = ? AND id = ?

-- name: head
SELECT l.id, {record}
FROM group_lines l LEFT JOIN jobs j ON j.queue = l.queue AND j.id = l.id LEFT JOIN options o ON o.key = j.options
WHERE l.queue = ? AND l.key = ? ORDER BY l.rank, l.priority, l.place LIMIT 1

-- name: due
SELECT key FROM job_groups WHERE queue = ? AND look_at > 0 AND look_at <= ? ORDER BY look_at, key LIMIT ?

-- name: over
SELECT key FROM job_groups WHERE queue = ? AND over_at > 0 AND over_at <= ? ORDER BY over_at, key LIMIT ?

-- name: next_look
SELECT min(look_at) FROM job_groups WHERE queue = ? AND look_at > 0

-- name: next_over
SELECT min(over_at) FROM job_groups WHERE queue = ? AND over_at > 0

-- name: keys_after
SELECT key FROM job_groups WHERE queue = ? AND key > ? ORDER BY key LIMIT ?

-- name: any
SELECT EXISTS (SELECT 1 FROM job_groups WHERE queue = :queue AND key > '')
    OR EXISTS (SELECT 1 FROM limits WHERE queue = :queue)

-- name: obliterate_lines
DELETE FROM group_lines WHERE queue = ?

-- name: obliterate_starts
DELETE FROM starts WHERE queue = ?

-- name: obliterate_groups
DELETE FROM job_groups WHERE queue = ? AND paused = 0 AND parked_until <= ?

-- name: empty_groups
UPDATE job_groups SET waiting = 0, active = 0, held = 0, blocked = 0, cost = 0, starts = 0, level_per = 0, look_at = 0,
    over_at = CASE WHEN paused OR key = '' THEN 0 ELSE parked_until END
WHERE queue = ?

-- name: line
SELECT rank, priority, place, id FROM group_lines WHERE queue = ? AND key = ?

-- name: clear_line
DELETE FROM group_lines WHERE queue = ? AND key = ?
