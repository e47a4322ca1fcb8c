-- reclaim: puts items that nobody holds back into the queue, and removes entries of items that do not exist.
-- arguments: prefix, mode, ids. "look" only looks; "listed" is for ids from processing and cleaning, "stray" for
--            those that no list had
-- returns:   look: the ids to act on; else {items put back, entries removed}

-- How far to look for an entry in the queue that an item may have besides the one in processing. Further back
-- it is missed, and the item has as many entries as before: a deep clean finds that. The walk along a long queue
-- would cost more than it mends.
local NEAR = 10000

local mode = ARGV[2]
local found, returned, dropped = {}, 0, 0

local function put_back(id, entries)
  local waits
  if mode == 'stray' then
    waits = redis.call('LPOS', QUEUE, id)
  else
    -- Without an entry somebody else was quicker: it was completed, or put back.
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
      -- Out of processing first, as the layout asks; nobody sees the moment in between.
      local entries = redis.call('LREM', PROCESSING, 0, id) + redis.call('LREM', CLEANING, 0, id)
      if is_item then put_back(id, entries) else dropped = dropped + entries end
    end
  end
end

if mode == 'look' then return found end
return { returned, dropped }
