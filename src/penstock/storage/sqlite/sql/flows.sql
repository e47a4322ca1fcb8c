-- name: add_parent
INSERT INTO parents (queue, id, flow, given, pending, failed) VALUES (?, ?, ?, 0, 0, 0)
ON CONFLICT DO NOTHING

-- name: parent
SELECT flow, given, pending, failed FROM parents WHERE queue = ? AND id = ?

-- name: give
UPDATE parents SET given = given + ?, pending = pending + ? WHERE queue = ? AND id = ?

-- name: add_dependency
INSERT INTO dependencies (queue, parent, number, on_queue, on_id, policy, state)
VALUES (?, ?, ?, ?, ?, ?, 'pending')

-- name: known_dependencies
SELECT d.on_queue, d.on_id FROM json_each(?) e
JOIN dependencies d ON d.queue = ? AND d.parent = ? AND d.on_queue = e.value ->> 0 AND d.on_id = e.value ->> 1

-- name: edge
SELECT p.flow, d.key, d.number, d.policy, d.state
FROM parents p JOIN dependencies d ON d.queue = p.queue AND d.parent = p.id
WHERE p.queue = ? AND p.id = ? AND d.on_queue = ? AND d.on_id = ?

-- name: set_end
UPDATE dependencies SET state = ?, result = ?, failure = ? WHERE key = ?

-- name: count_one
UPDATE parents SET pending = pending - 1 WHERE queue = ? AND id = ? RETURNING pending

-- name: mark_failed
UPDATE parents SET failed = ? WHERE queue = ? AND id = ? AND failed = 0

-- name: clear_failed
UPDATE parents SET failed = 0, awaited = 0 WHERE queue = ? AND id = ?

-- name: awaits_nothing_new
SELECT 1 FROM parents WHERE queue = ? AND id = ? AND pending = 0 AND awaited = given

-- name: await
UPDATE parents SET awaited = given WHERE queue = ? AND id = ?

-- name: by_number
SELECT on_queue, on_id, policy, state, result, failure FROM dependencies
WHERE queue = ? AND parent = ? AND number = ?

-- name: unfinished
SELECT key, on_queue, on_id, policy FROM dependencies
WHERE queue = ? AND parent = ? AND (
    (policy = 'fail' AND state IN ('failed', 'cancelled', 'removed')) OR (policy = 'wait' AND state = 'removed')
)
ORDER BY number

-- name: page
SELECT on_queue, on_id, policy, state, result, failure FROM dependencies
WHERE queue = ? AND parent = ? AND number > ?
ORDER BY number LIMIT ?

-- name: add_dependent
INSERT INTO later_dependents (queue, id, to_queue, to_id, flow) VALUES (?, ?, ?, ?, ?)

-- name: later_dependents
SELECT to_queue, to_id, flow FROM later_dependents WHERE queue = ? AND id = ? ORDER BY key

-- name: forget_parents
DELETE FROM parents WHERE queue = ? AND id IN (SELECT value FROM json_each(?))

-- name: forget_dependencies
DELETE FROM dependencies WHERE queue = ? AND parent IN (SELECT value FROM json_each(?))

-- name: forget_dependents
DELETE FROM later_dependents WHERE queue = ? AND id IN (SELECT value FROM json_each(?))

-- name: waiting_elsewhere
SELECT q.name, d.parent, p.flow, d.on_id
FROM dependencies d JOIN parents p ON p.queue = d.queue AND p.id = d.parent JOIN queues q ON q.key = d.queue
WHERE q.namespace = ? AND d.on_queue = ? AND d.queue <> ? AND d.state <> 'completed'
ORDER BY d.key

-- name: obliterate_parents
DELETE FROM parents WHERE queue = ?

-- name: obliterate_dependencies
DELETE FROM dependencies WHERE queue = ?

-- name: obliterate_dependents
DELETE FROM later_dependents WHERE queue = ?
