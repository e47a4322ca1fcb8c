-- complete: ends an item that is being processed.
-- arguments: prefix, id, lease (the value of the caller's, "" if it does not know)
-- returns:   1 if this call ended it, else 0: then nothing was written, or only entries of no item

local id, lease = ARGV[2], ARGV[3]
local published, documented = lease_keys(id)

local holder = holder_of(id)
if lease ~= '' and holder and holder ~= lease then return 0 end

-- The published clients decide by this entry, the documented way by the data: whoever removes both is the one.
if redis.call('LREM', PROCESSING, 0, id) == 0 then return 0 end
redis.call('DEL', published, documented)
return redis.call('DEL', data_key(id))
