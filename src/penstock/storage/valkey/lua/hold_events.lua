-- hold_events: keeps events after an offset for a named consumer. Never moves an offset back.
-- arguments: consumer, offset, ttl_ms
-- release_events: forgets the consumer.
-- arguments: consumer
-- consumers: {consumer, offset:6 expires_at:6, ...} of those that have not expired
-- events:    none

register('hold_events', function(keys, args)
  open(keys)
  local stored = call('HGET', K.consumers, args[1])
  local offset, expires_at = tonumber(args[2]), Q.now + tonumber(args[3])
  if stored then
    local held, until_ms = unpack('>I6I6', stored)
    if not Clock.is_past(until_ms) then offset = max(offset, held) end
  end
  call('HSET', K.consumers, args[1], pack('>I6I6', offset, expires_at))
  close()
  return offset
end)

register('release_events', function(keys, args)
  open(keys)
  return call('HDEL', K.consumers, args[1])
end)

register('consumers', function(keys)
  open(keys)
  local stored, reply = call('HGETALL', K.consumers), {}
  for i = 1, #stored, 2 do
    local _, expires_at = unpack('>I6I6', stored[i + 1])
    if not Clock.is_past(expires_at) then
      reply[#reply + 1], reply[#reply + 2] = stored[i], stored[i + 1]
    end
  end
  return reply
end, READS)
