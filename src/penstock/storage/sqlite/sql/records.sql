-- name: by_ids
SELECT {record}
FROM json_each(?) e
CROSS JOIN jobs j ON j.queue = ? AND j.id = e.value
JOIN options o ON o.key = j.options

-- name: knows_any
SELECT EXISTS (SELECT 1 FROM json_each(?) e CROSS JOIN jobs j ON j.queue = ? AND j.id = e.value)

-- name: last_key
SELECT max(key) FROM jobs

-- name: next_due
SELECT min(run_at) FROM jobs WHERE queue = ? AND state = 'scheduled' AND run_at < {staged_from}

-- name: insert
INSERT INTO jobs ({new}, key, queue, id, {later}) VALUES ({new_marks}, ?, ?, ?, {later_values})

-- name: update
UPDATE jobs SET {set_saved} WHERE key = ?

-- name: insert_payload
INSERT INTO payloads (job, payload) VALUES (?, ?)

-- name: replace_payload
INSERT INTO payloads (job, payload) VALUES (?, ?) ON CONFLICT DO UPDATE SET payload = excluded.payload

-- name: payload_size
SELECT length(payload) FROM payloads WHERE job = ?

-- name: delete_jobs
DELETE FROM jobs WHERE key IN (SELECT value FROM json_each(?))

-- name: delete_payloads
DELETE FROM payloads WHERE job IN (SELECT value FROM json_each(?))

-- name: delete_logs
DELETE FROM logs WHERE job IN (SELECT value FROM json_each(?))

-- name: delete_signals
DELETE FROM signals WHERE job IN (SELECT value FROM json_each(?))

-- name: delete_steps
DELETE FROM steps WHERE job IN (SELECT value FROM json_each(?))

-- name: delete_waiters
DELETE FROM waiters WHERE job IN (SELECT value FROM json_each(?))

-- name: options_key
INSERT INTO options (value) VALUES (?) ON CONFLICT DO UPDATE SET value = value RETURNING key

-- name: payload
SELECT payload FROM payloads WHERE job = ?
