-- name: ids
SELECT key, id FROM jobs WHERE queue = ? AND id > ? ORDER BY id LIMIT ?

-- name: jobs
SELECT p.payload, {record}
FROM json_each(:keys) e
CROSS JOIN jobs j ON j.key = e.value
JOIN options o ON o.key = j.options JOIN payloads p ON p.job = j.key
WHERE :states IS NULL OR j.state IN (SELECT value FROM json_each(:states))
ORDER BY e.key

-- name: light
SELECT x'', {record}
FROM json_each(:keys) e
CROSS JOIN jobs j ON j.key = e.value
JOIN options o ON o.key = j.options
WHERE :states IS NULL OR j.state IN (SELECT value FROM json_each(:states))
ORDER BY e.key
