-- name: identity
SELECT value FROM meta WHERE name = 'identity'

-- name: set_meta
INSERT INTO meta (name, value) VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value
