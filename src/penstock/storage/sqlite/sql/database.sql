-- name: identity
SELECT value FROM meta WHERE name = 'identity'

-- name: set_meta
INSERT INTO meta (name, value) VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value

-- name: locked
SELECT value FROM meta WHERE name = 'locked'

-- name: last_write
SELECT max(boot_ms) FROM queues WHERE boot = ?

-- name: highest_number
SELECT max(
    (SELECT coalesce(max(seq), 0) FROM queues),
    coalesce((SELECT CAST(value AS INTEGER) FROM meta WHERE name = 'first_number'), 0)
)

-- name: raise_numbers
UPDATE queues SET seq = ?
