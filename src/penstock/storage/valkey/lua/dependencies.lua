-- dependencies: the dependencies of a job, in their order.
-- arguments: id, start, limit
-- returns:   {queue '\0' id, entry, result or failure ('' if none), ...} (flows.lua)
-- events:    none

register('dependencies', function(keys, args)
  open(keys)
  local key, start, numbers, values = Q.prefix .. ':deps:' .. args[1], tonumber(args[2]), {}, {}
  for i = 1, tonumber(args[3]) do numbers[i] = '\2' .. digits(start + i) end
  local stored_names, names = read_many('HMGET', key, numbers), {}
  for i = 1, #numbers do
    if not stored_names[i] then break end
    names[i], values[i] = stored_names[i], '\1' .. stored_names[i]
  end
  local entries, results, reply = read_many('HMGET', key, names), read_many('HMGET', key, values), {}
  for i = 1, #names do
    local at = #reply
    reply[at + 1], reply[at + 2], reply[at + 3] = names[i], entries[i], results[i] or ''
  end
  return reply
end, READS)
