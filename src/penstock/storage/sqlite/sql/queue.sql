-- name: load
SELECT key, name, seq, events, event_bytes, now_ms, shift_ms, paused, used, has_budgets, settings,
    scheduled, waiting, blocked, active, completed, failed, cancelled, held_completed, held_failed
FROM queues WHERE namespace = ? AND name = ?

-- name: create
INSERT INTO queues (namespace, name) VALUES (?, ?)

-- name: save
UPDATE queues SET seq = ?, events = ?, event_bytes = ?, now_ms = ?, shift_ms = ?, paused = ?, used = ?, has_budgets = ?,
    settings = ?,
    scheduled = ?, waiting = ?, blocked = ?, active = ?, completed = ?, failed = ?, cancelled = ?,
    held_completed = ?, held_failed = ?
WHERE key = ?

-- name: append_events
INSERT INTO events (queue, last_seq, first_seq, at_ms, bytes, entry) VALUES (?, ?, ?, ?, ?, ?)

-- name: names
SELECT name FROM queues WHERE namespace = ? AND used = 1 ORDER BY name
