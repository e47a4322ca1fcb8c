-- name: last_line
SELECT max(number) FROM logs WHERE job = ?

-- name: add_line
INSERT INTO logs (job, number, line) VALUES (?, ?, ?)

-- name: trim_lines
DELETE FROM logs WHERE job = ? AND number <= ?
