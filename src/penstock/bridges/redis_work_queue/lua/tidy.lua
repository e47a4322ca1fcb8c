-- tidy: keeps one entry in the queue, the oldest, for an item that exists, and none for an item that does not.
-- arguments: prefix, ids
-- returns:   {entries without an item removed, surplus entries removed}

local dropped, surplus = 0, 0

for i = 2, #ARGV do
  local id = ARGV[i]
  if not exists(id) then
    dropped = dropped + redis.call('LREM', QUEUE, 0, id)
  else
    local more = #redis.call('LPOS', QUEUE, id, 'COUNT', 0) - 1
    if more > 0 then surplus = surplus + redis.call('LREM', QUEUE, more, id) end
  end
end

return { dropped, surplus }
