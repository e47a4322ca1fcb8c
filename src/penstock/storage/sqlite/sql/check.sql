-- name: records
SELECT count(*) FROM jobs WHERE queue = ?

-- name: counts
SELECT state, count(*) FROM jobs WHERE queue = ? GROUP BY state

-- name: drawn
SELECT
    coalesce((SELECT max(max(incarnation, token, abs(place))) FROM jobs WHERE queue = :queue), 0),
    coalesce((SELECT max(last_seq) FROM events WHERE queue = :queue), 0)

-- name: payloads_without_job
SELECT count(*) FROM payloads WHERE job NOT IN (SELECT key FROM jobs)

-- name: repair_payloads_without_job
DELETE FROM payloads WHERE job NOT IN (SELECT key FROM jobs)

-- name: logs_without_job
SELECT count(DISTINCT job) FROM logs WHERE job NOT IN (SELECT key FROM jobs)

-- name: repair_logs_without_job
DELETE FROM logs WHERE job NOT IN (SELECT key FROM jobs)

-- name: signals_without_job
SELECT count(DISTINCT job) FROM signals WHERE job NOT IN (SELECT key FROM jobs)

-- name: repair_signals_without_job
DELETE FROM signals WHERE job NOT IN (SELECT key FROM jobs)

-- name: steps_without_job
SELECT count(DISTINCT job) FROM steps WHERE job NOT IN (SELECT key FROM jobs)

-- name: repair_steps_without_job
DELETE FROM steps WHERE job NOT IN (SELECT key FROM jobs)

-- name: holds_without_job
SELECT count(*) FROM holds WHERE job NOT IN (SELECT key FROM jobs WHERE held_until > 0)

-- name: repair_holds_without_job
DELETE FROM holds WHERE job NOT IN (SELECT key FROM jobs WHERE held_until > 0)

-- name: held_counts
SELECT state, count(*) FROM jobs WHERE queue = ? AND held_until > 0 GROUP BY state

-- name: waiters_without_job
SELECT count(*) FROM waiters WHERE job NOT IN (SELECT key FROM jobs WHERE kept_until = 0)

-- name: repair_waiters_without_job
DELETE FROM waiters WHERE job NOT IN (SELECT key FROM jobs WHERE kept_until = 0)

-- name: dedup_without_job
SELECT count(*) FROM dedup d WHERE d.queue = ? AND d.expires_at = 0 AND NOT EXISTS (
    SELECT 1 FROM jobs j
    WHERE j.queue = d.queue AND j.id = d.id AND j.incarnation = d.incarnation AND j.kept_until = 0
)

-- name: repair_dedup_without_job
DELETE FROM dedup AS d WHERE d.queue = ? AND d.expires_at = 0 AND NOT EXISTS (
    SELECT 1 FROM jobs j
    WHERE j.queue = d.queue AND j.id = d.id AND j.incarnation = d.incarnation AND j.kept_until = 0
)

-- name: schedulers_without_job
SELECT count(*) FROM schedulers s WHERE s.queue = ? AND s.awaits > 0 AND NOT EXISTS (
    SELECT 1 FROM jobs j
    WHERE j.queue = s.queue AND j.id = s.last_id AND j.incarnation = s.awaits AND j.kept_until = 0
)

-- name: repair_schedulers_without_job
UPDATE schedulers AS s SET awaits = 0, next_at = (SELECT now_ms + s.repeat_ms FROM queues WHERE key = s.queue)
WHERE s.queue = ? AND s.awaits > 0 AND NOT EXISTS (
    SELECT 1 FROM jobs j
    WHERE j.queue = s.queue AND j.id = s.last_id AND j.incarnation = s.awaits AND j.kept_until = 0
)

-- name: active_without_lease
SELECT count(*) FROM jobs WHERE queue = ? AND state = 'active' AND lease_until <= 0

-- name: repair_active_without_lease
UPDATE jobs SET lease_until = 1 WHERE queue = ? AND state = 'active' AND lease_until <= 0

-- name: finished_without_expiry
SELECT count(*) FROM jobs WHERE queue = ? AND state IN ('completed', 'failed', 'cancelled') AND kept_until <= 0

-- name: repair_finished_without_expiry
UPDATE jobs SET kept_until = max(finished_at, 1)
WHERE queue = ? AND state IN ('completed', 'failed', 'cancelled') AND kept_until <= 0

-- name: members
SELECT {record}
FROM jobs j JOIN options o ON o.key = j.options
WHERE j.queue = ? AND j.binds = 1 AND j.kept_until = 0

-- name: group_keys
SELECT key FROM job_groups WHERE queue = :queue AND key > ''
UNION SELECT key FROM group_lines WHERE queue = :queue

-- name: parents_without_job
SELECT count(*) FROM parents AS t WHERE t.queue = ? AND NOT EXISTS (
    SELECT 1 FROM jobs j WHERE j.queue = t.queue AND j.id = t.id
)

-- name: repair_parents_without_job
DELETE FROM parents AS t WHERE t.queue = ? AND NOT EXISTS (
    SELECT 1 FROM jobs j WHERE j.queue = t.queue AND j.id = t.id
)

-- name: dependencies_without_job
SELECT count(*) FROM dependencies AS t WHERE t.queue = ? AND NOT EXISTS (
    SELECT 1 FROM jobs j WHERE j.queue = t.queue AND j.id = t.parent
)

-- name: repair_dependencies_without_job
DELETE FROM dependencies AS t WHERE t.queue = ? AND NOT EXISTS (
    SELECT 1 FROM jobs j WHERE j.queue = t.queue AND j.id = t.parent
)

-- name: dependents_without_job
SELECT count(*) FROM later_dependents AS t WHERE t.queue = ? AND NOT EXISTS (
    SELECT 1 FROM jobs j WHERE j.queue = t.queue AND j.id = t.id
)

-- name: repair_dependents_without_job
DELETE FROM later_dependents AS t WHERE t.queue = ? AND NOT EXISTS (
    SELECT 1 FROM jobs j WHERE j.queue = t.queue AND j.id = t.id
)
