-- deliver: applies messages of another queue's outbox (outbox.lua). What was applied before is passed over.
-- arguments: source, then sequence and message of each, in order
-- returns:   1 if the outbox of this queue is not empty, else 0; in a list with the sequences of messages that cannot be
--   read, if there are any: these are passed over
-- events:    as enqueue; unblocked, failed
-- deliver_new: the same, refused when the server is full: for messages that put jobs in
-- delivered: messages up to a sequence have been applied by their targets.
-- arguments: sequence
-- returns:   1 if more is left, else 0
-- put_aside: entries of the outbox cannot be read, or their messages cannot: they are kept among what is damaged.
-- arguments: entries
-- returns:   how many there were

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

local function are_texts(list, count)
  if type(list) ~= 'table' then return false end
  for i = 1, count do
    if type(list[i]) ~= 'string' then return false end
  end
  return true
end

local function is_sound(kind, said)
  if kind == 'p' then return are_texts(said, 2) and pcall(read_body, {}, said[2]) end
  if kind == 'l' then return are_texts(said, 1) and are_texts(said[2], 3) end
  return kind == 'd' and are_texts(said, 5)
end

local function deliver(keys, args)
  open(keys)
  local last = tonumber(call('HGET', K.inbox, args[1]) or 0)
  local kinds, messages, ids, headers, damaged = {}, {}, {}, {}, {}
  for i = 2, #args, 2 do
    if tonumber(args[i]) > last then
      local kind, is_read, said = sub(args[i + 1], 1, 1), pcall(decode, sub(args[i + 1], 2))
      last = tonumber(args[i])
      if is_read and is_sound(kind, said) then
        kinds[#kinds + 1], messages[#messages + 1] = kind, said
        if kind ~= 'd' then ids[#ids + 1] = said[1] end
        if kind == 'p' and said[5] then headers[said[4]] = said[5] end
      else
        damaged[#damaged + 1] = args[i]
      end
    end
  end
  load(ids, true)
  for reference, header in pairs(headers) do call('HSETNX', K.options, reference, header) end
  for n = 1, #messages do apply(kinds[n], messages[n]) end
  call('HSET', K.inbox, args[1], digits(last))
  close()
  local is_full = Outbox.is_full() and 1 or 0
  return damaged[1] and { is_full, spread(damaged) } or is_full
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

register('put_aside', function(keys, args)
  open(keys)
  local count = 0
  for i = 1, #args do
    if call('LREM', K.outbox, 1, args[i]) == 1 then
      count = count + 1
      hset('damaged', 'message:' .. redis.sha1hex(args[i]), encode({ value = args[i] }))
    end
  end
  if call('LLEN', K.outbox) == 0 and Outbox.is_full() then Q.uses = Q.uses - Outbox.BIT end
  close()
  return count
end)
