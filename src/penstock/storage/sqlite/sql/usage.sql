-- name: add
INSERT INTO usage (queue, scope, name, micros, at_ms) VALUES (?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET micros = micros + excluded.micros, at_ms = excluded.at_ms

-- name: read
SELECT scope, name, micros FROM usage WHERE queue = ?

-- name: reset
DELETE FROM usage WHERE queue = ?

-- name: forget
DELETE FROM usage WHERE queue = ? AND at_ms <= ?

-- name: sum
SELECT micros FROM usage WHERE queue = ? AND scope = ? AND name = ?

-- name: set_budget
INSERT INTO budgets (queue, scope, name, micros, per_ms, base, since) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET micros = excluded.micros, per_ms = excluded.per_ms, base = excluded.base,
    since = excluded.since

-- name: renew_budget
UPDATE budgets SET base = ?, since = ? WHERE queue = ? AND scope = ? AND name = ?

-- name: remove_budget
DELETE FROM budgets WHERE queue = ? AND scope = ? AND name = ?

-- name: zero_budgets
UPDATE budgets SET base = 0 WHERE queue = ?

-- name: budgets_left
SELECT count(*) FROM budgets WHERE queue = ?

-- name: budgets
SELECT b.scope, b.name, b.micros, b.per_ms, b.base, b.since,
    coalesce((SELECT u.micros FROM usage u WHERE u.queue = b.queue AND u.scope = b.scope AND u.name = b.name), 0)
FROM budgets b WHERE b.queue = ? ORDER BY b.scope, b.name
