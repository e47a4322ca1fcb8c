-- name: walk
SELECT {record}
FROM jobs j JOIN options o ON o.key = j.options
WHERE j.queue = :queue AND {which} {and_after}
ORDER BY j.{first}, j.{second} LIMIT :limit

-- name: errors
SELECT error_type, count(*) FROM jobs
WHERE queue = ? AND state = 'failed' AND error_type <> '' GROUP BY error_type ORDER BY error_type
