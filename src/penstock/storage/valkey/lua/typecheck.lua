-- Type checks of the keys that a verb is about to write, before its first write (parts.lua).

-- How far seq jumps when numbers may have been lost: more than a server could have given out by then.
Parts.JUMP = 2 ^ 20

-- The log is ahead of the counters: the counters went back, or something else wrote to the log. Both continue after it, in a
-- new epoch. close() writes this.
function Parts.catch_up(last_id)
  local last = tonumber((string.match(last_id, '^%d+')))
  if last <= Q.events then return end
  Q.events, Q.seq, Q.is_renewed = last, Q.seq + Parts.JUMP, true
end

-- Return the name of a sorted set named after something, after checking its type: before the first write of a call.
function Parts.named(part)
  call('ZCARD', K[part])
  return part
end

function Parts.size_of(part)
  return call(Parts.SIZES[Parts.TYPES[part]], K[part])
end

-- Return whether other keys exist. Without counters, the queue is then not new, but has lost them.
function Parts.any_exists()
  local keys = {}
  for part in pairs(Parts.TYPES) do keys[#keys + 1] = K[part] end
  return call('EXISTS', spread(keys)) > 0
end

-- Check the keys of a list (parts.lua), and the end of the log.
function Parts.check(list)
  Q.is_checking = true
  local zsets = {}
  for i = 1, #list.zsets do zsets[i] = K[list.zsets[i]] end
  -- The prefix never exists. It makes the intersection empty without reading members.
  if zsets[1] then call('ZINTERCARD', #zsets + 1, Q.prefix, spread(zsets)) end
  for i = 1, #list - 1 do Parts.size_of(list[i]) end
  Q.wake_tokens = Parts.size_of(list[#list])
  local newer = call('XREAD', 'COUNT', 1, 'STREAMS', K.events, digits(Q.events) .. '-0')
  if newer then Parts.catch_up(call('XREVRANGE', K.events, '+', '-', 'COUNT', 1)[1][1]) end
  Q.is_checking = false
end

-- Return the highest id that the log has had, even if its entries are gone.
function Parts.last_generated()
  local info = redis.pcall('XINFO', 'STREAM', K.events)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then return info[i + 1] end
  end
  return '0-0' -- the log does not exist
end

-- Check all keys.
function Parts.check_all()
  Q.is_checking = true
  for part in pairs(Parts.TYPES) do Parts.size_of(part) end
  if Q.events > 0 then Parts.catch_up(Parts.last_generated()) end
  rawset(K, 1, Q.time[1])
  Q.is_checking = false
end

-- Check all keys if necessary. K[1] is the second in which that was last done. mode: that of open(). A new queue has no keys.
function Parts.check_types(mode)
  if Q.is_new then
    rawset(K, 1, Q.time[1])
  elseif mode ~= Parts.HOT or rawget(K, 1) ~= Q.time[1] then
    Parts.check_all()
  end
end

-- Return a text about a key of the wrong type, if there is one.
function Parts.damaged_key()
  for part, wanted in pairs(Parts.TYPES) do
    if not pcall(Parts.size_of, part) then return K[part] .. ' is not a ' .. wanted end
  end
end

-- Return the number of the last event that is no longer in the log.
function Parts.trimmed_to()
  local first = call('XRANGE', K.events, '-', '+', 'COUNT', 1)[1]
  if not first then return Q.events end
  local last = tonumber((string.match(first[1], '^%d+')))
  local is_read, count = pcall(function()
    local sum = 0
    for _, group in ipairs(decode(first[2][2])) do sum = sum + group.n end
    return sum
  end)
  return is_read and last - count or last
end
