-- name: forget
DELETE FROM holds WHERE job = ?

-- name: add
INSERT INTO holds (queue, consumer, finished_at, id, job) VALUES (?, ?, ?, ?, ?)

-- name: lapsed
SELECT {record}
FROM jobs j JOIN options o ON o.key = j.options
WHERE j.queue = ? AND j.held_until > 0 AND j.held_until <= ?
ORDER BY j.held_until, j.id LIMIT ?

-- name: held
SELECT h.finished_at, p.payload, {record}
FROM holds h JOIN jobs j ON j.key = h.job JOIN options o ON o.key = j.options JOIN payloads p ON p.job = j.key
WHERE h.queue = ? AND h.consumer = ? AND (h.finished_at, h.id) > (?, ?)
ORDER BY h.finished_at, h.id LIMIT ?
