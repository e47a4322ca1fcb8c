-- name: load
SELECT key, name, seq, events, event_bytes, now_ms, shift_ms, paused, used, has_budgets, settings, uses, regroup,
    scheduled, waiting, blocked, active, completed, failed, cancelled, held_completed, held_failed, minute,
    clock_ms, boot_ms, boot, clock_marks
FROM queues WHERE namespace = ? AND name = ?

-- name: create
INSERT INTO queues (namespace, name, seq)
VALUES (?, ?, coalesce((SELECT CAST(value AS INTEGER) FROM meta WHERE name = 'first_number'), 0))

-- name: save
UPDATE queues SET seq = ?, events = ?, event_bytes = ?, now_ms = ?, shift_ms = ?, paused = ?, used = ?, has_budgets = ?,
    settings = ?, uses = ?, regroup = ?,
    scheduled = ?, waiting = ?, blocked = ?, active = ?, completed = ?, failed = ?, cancelled = ?,
    held_completed = ?, held_failed = ?, minute = ?, clock_ms = ?, boot_ms = ?, boot = ?, clock_marks = ?
WHERE key = ?

-- name: append_events
INSERT INTO events (queue, last_seq, first_seq, at_ms, bytes, entry) VALUES (?, ?, ?, ?, ?, ?)

-- name: names
SELECT name FROM queues WHERE namespace = ? AND used = 1 ORDER BY name

-- name: attended
SELECT name FROM queues WHERE namespace = ? AND key IN (SELECT queue FROM workers) ORDER BY name

-- name: keep_minute
INSERT INTO minutes (queue, slot, minute) VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET minute = excluded.minute

-- name: minutes
SELECT minute FROM minutes WHERE queue = ?
