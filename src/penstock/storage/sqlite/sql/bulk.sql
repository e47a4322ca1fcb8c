-- name: drain_blocked
SELECT {record}
FROM jobs j JOIN options o ON o.key = j.options
WHERE j.queue = :queue AND j.state = 'blocked' AND (j.place, j.id) > (:first, :second)
ORDER BY j.place, j.id LIMIT :limit

-- name: drain_waiting
SELECT {record}
FROM jobs j JOIN options o ON o.key = j.options
WHERE j.queue = :queue AND j.state = 'waiting' AND (j.priority, j.place) > (:first, :second)
ORDER BY j.priority, j.place LIMIT :limit

-- name: drain_scheduled
SELECT {record}
FROM jobs j JOIN options o ON o.key = j.options
WHERE j.queue = :queue AND j.state = 'scheduled' AND (j.run_at, j.id) > (:first, :second)
ORDER BY j.run_at, j.id LIMIT :limit

-- name: staged
SELECT {record}
FROM jobs j JOIN options o ON o.key = j.options
WHERE j.queue = :queue AND j.state = 'scheduled' AND j.run_at = :first AND j.id > :second
ORDER BY j.id LIMIT :limit

-- name: has_staged
SELECT 1 FROM jobs WHERE queue = ? AND state = 'scheduled' AND run_at >= {staged_from} LIMIT 1

-- name: finished
SELECT {record}
FROM jobs j JOIN options o ON o.key = j.options
WHERE j.queue = :queue AND j.state = :state AND j.kept_until > 0 AND j.kept_until >= :first
    AND (j.kept_until, j.id) > (:first, :second)
ORDER BY j.kept_until, j.id LIMIT :limit

-- name: obliterate_news
SELECT j.key, j.id, j.incarnation FROM jobs j
WHERE j.queue = ? AND j.kept_until = 0 AND j.key IN (SELECT job FROM waiters)

-- name: reruns
SELECT rerun, id, incarnation FROM jobs WHERE queue = ? AND state = 'active' AND rerun IS NOT NULL

-- name: obliterate_waiters
DELETE FROM waiters WHERE job IN (SELECT key FROM jobs WHERE queue = ?)

-- name: obliterate_signals
DELETE FROM signals WHERE job IN (SELECT key FROM jobs WHERE queue = ?)

-- name: obliterate_steps
DELETE FROM steps WHERE job IN (SELECT key FROM jobs WHERE queue = ?)

-- name: obliterate_holds
DELETE FROM holds WHERE queue = ?

-- name: obliterate_logs
DELETE FROM logs WHERE job IN (SELECT key FROM jobs WHERE queue = ?)

-- name: obliterate_payloads
DELETE FROM payloads WHERE job IN (SELECT key FROM jobs WHERE queue = ?)

-- name: obliterate_jobs
DELETE FROM jobs WHERE queue = ?
