-- complete: completes an item in processing.
-- arguments: prefix, id, lease (the value of the caller's lease, "" if it has none)
-- returns:   1 if this call completed the item; else 0, and at most entries without an item were removed

local id, lease = ARGV[2], ARGV[3]
local published, documented = lease_keys(id)

local holder = holder_of(id)
if lease ~= '' and holder and holder ~= lease then return 0 end

-- The published clients decide by this entry, the documented way by the data. The call that removes both wins.
if redis.call('LREM', PROCESSING, 0, id) == 0 then return 0 end
redis.call('DEL', published, documented)
return redis.call('DEL', data_key(id))
