-- take: moves the next item from the queue to processing and writes its lease.
-- arguments: prefix, lease (its value), lease_ms, most, moved (an id that was moved to processing before, or "")
-- returns:   {id, data}; 0 if the queue is empty; 1 if `most` entries were skipped and more may follow

local lease, lease_ms, most, moved = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]

local function admit(id)
  local data = redis.call('GET', data_key(id))
  if not data then
    redis.call('LREM', PROCESSING, 0, id)
    return nil
  end
  if holder_of(id) then
    -- The item has a holder: this was a surplus entry, or a cleaner returned it slightly too early. One entry stays in
    -- processing, where a light clean finds the item if its holder never completes it.
    if redis.call('LPOS', PROCESSING, id, 'RANK', 2) then redis.call('LREM', PROCESSING, 1, id) end
    return nil
  end
  local published, documented = lease_keys(id)
  redis.call('SET', published, lease, 'PX', lease_ms)
  redis.call('SET', documented, lease, 'PX', lease_ms)
  return { id, data }
end

-- A cleaner may have returned the id to the queue since it was moved; then do not lease it.
if moved ~= '' and redis.call('LPOS', PROCESSING, moved) then
  local item = admit(moved)
  if item then return item end
end

for _ = 1, most do
  local id = redis.call('LMOVE', QUEUE, PROCESSING, 'RIGHT', 'LEFT')
  if not id then return 0 end
  local item = admit(id)
  if item then return item end
end

return 1
