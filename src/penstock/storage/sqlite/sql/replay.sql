-- name: recall
SELECT answer FROM memo WHERE queue = ? AND lane = ? AND number = ? AND at_ms > ?

-- name: remember
INSERT INTO memo (queue, lane, number, at_ms, answer) VALUES (?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET number = excluded.number, at_ms = excluded.at_ms, answer = excluded.answer
