-- reclaim: returns items without a holder to the queue, and removes entries of items that do not exist.
-- arguments: prefix, mode, ids. "look" only checks; "listed" is for ids from processing and cleaning, "stray" for
--            ids in no list
-- returns:   look: the ids to act on; else {items returned, entries removed}

-- How far to search the queue for a second entry of an item in processing. Searching a long queue costs more than it
-- repairs: if the entry is further back, the item keeps both entries until a deep clean.
local NEAR = 10000

local mode = ARGV[2]
local found, returned, dropped = {}, 0, 0

local function put_back(id, entries)
  local waits
  if mode == 'stray' then
    waits = redis.call('LPOS', QUEUE, id)
  else
    -- Without an entry another client was quicker: the item was completed or returned.
    waits = entries == 0 or redis.call('LPOS', QUEUE, id, 'MAXLEN', NEAR)
  end
  if not waits then
    redis.call('LPUSH', QUEUE, id)
    returned = returned + 1
  end
end

for i = 3, #ARGV do
  local id = ARGV[i]
  local is_item = exists(id)
  if not is_item or not holder_of(id) then
    found[#found + 1] = id
    if mode ~= 'look' then
      -- Remove from processing first, as the layout requires; the script is atomic.
      local entries = redis.call('LREM', PROCESSING, 0, id) + redis.call('LREM', CLEANING, 0, id)
      if is_item then put_back(id, entries) else dropped = dropped + entries end
    end
  end
end

if mode == 'look' then return found end
return { returned, dropped }
