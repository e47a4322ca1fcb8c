-- deliver: applies messages of another queue's outbox (outbox.lua). What was applied before is passed over.
-- arguments: source, then sequence and message of each, in order
-- returns:   1 if the outbox of this queue is not empty, else 0
-- events:    as enqueue; unblocked, failed
-- deliver_new: the same, refused when the server is full: for messages that put jobs in
-- delivered: messages up to a sequence have been applied by their targets.
-- arguments: sequence
-- returns:   1 if more is left, else 0

local AT_ONCE = 100

local function apply(kind, said)
  if kind == 'p' then
    Flows.put(said[1], said[2], said[3])
  elseif kind == 'l' then
    Flows.link(said[1], said[2])
  else
    Flows.done(said)
  end
end

local function deliver(keys, args)
  open(keys)
  local last = tonumber(call('HGET', K.inbox, args[1]) or 0)
  local kinds, messages, ids, headers = {}, {}, {}, {}
  for i = 2, #args, 2 do
    if tonumber(args[i]) > last then
      local n = #messages + 1
      kinds[n], messages[n], last = sub(args[i + 1], 1, 1), decode(sub(args[i + 1], 2)), tonumber(args[i])
      if kinds[n] ~= 'd' then ids[#ids + 1] = messages[n][1] end
      if kinds[n] == 'p' and messages[n][5] then headers[messages[n][4]] = messages[n][5] end
    end
  end
  load(ids, true)
  for reference, header in pairs(headers) do call('HSETNX', K.options, reference, header) end
  for n = 1, #messages do apply(kinds[n], messages[n]) end
  call('HSET', K.inbox, args[1], digits(last))
  close()
  return Outbox.is_full() and 1 or 0
end

register('deliver', deliver)
register('deliver_new', deliver, REFUSED_WHEN_FULL)

register('delivered', function(keys, args)
  open(keys)
  local sequence, count = tonumber(args[1]), AT_ONCE
  while count == AT_ONCE do
    local entries = call('LRANGE', K.outbox, 0, AT_ONCE - 1)
    count = 0
    while entries[count + 1] and tonumber(sub(entries[count + 1], 1, 16)) <= sequence do count = count + 1 end
    if count > 0 then call('LPOP', K.outbox, count) end
  end
  local is_empty = call('LLEN', K.outbox) == 0
  if is_empty and Outbox.is_full() then Q.uses = Q.uses - Outbox.BIT end
  close()
  return is_empty and 0 or 1
end)
