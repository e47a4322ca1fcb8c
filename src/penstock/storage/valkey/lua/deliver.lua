-- deliver: applies messages of another queue's outbox (outbox.lua), except those applied before.
-- arguments: source, then sequence and message of each, in order
-- returns:   1 if the outbox of this queue is not empty, else 0; in a list with the sequences of skipped messages that
--   cannot be read, if there are any
-- events:    as enqueue; unblocked, failed
-- deliver_new: the same, refused when the server is full: for messages that add jobs
-- undelivered: the first entries of the outbox, after repairing damaged ones.
-- arguments: how many
-- returns:   {number of entries that were renumbered, number of entries put aside, entry, entry ...}
-- delivered: removes messages that their targets have applied, up to a sequence.
-- arguments: sequence
-- returns:   1 if more are left, else 0
-- put_aside: moves entries of the outbox that cannot be read, or whose messages cannot, to the damaged hash.
-- arguments: entries
-- returns:   the number of entries

local AT_ONCE = 100

local function apply(kind, message)
  if kind == 'p' then
    Flows.put(message[1], message[2], message[3])
  elseif kind == 'l' then
    Flows.link(message[1], message[2])
  else
    Flows.dependency_ended(message)
  end
end

local function are_texts(list, count)
  if type(list) ~= 'table' then return false end
  for i = 1, count do
    if type(list[i]) ~= 'string' then return false end
  end
  return true
end

local function is_sound(kind, message)
  if kind == 'p' then return are_texts(message, 2) and pcall(read_body, {}, message[2]) end
  if kind == 'l' then return are_texts(message, 1) and are_texts(message[2], 3) end
  return kind == 'd' and are_texts(message, 5)
end

local function is_letter(message)
  local is_read, _, _, _, id, handled_by, task, failure = pcall(unpack, '>I6I6I4I2I2I2I4', message, 2)
  return is_read and 27 + id + handled_by + task + failure <= #message
end

-- Return whether an entry can be read, whatever its number.
local function is_message(entry)
  local _, last = string.find(entry, '^%w[%w_.-]*%z', 17)
  local message = last and sub(entry, last + 1) or ''
  local kind = sub(message, 1, 1)
  if kind == 'x' then return is_letter(message) end
  local is_read, content = pcall(decode, sub(message, 2))
  return is_read and is_sound(kind, content)
end

local function number_of(entry)
  return string.find(entry, '^%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d') and tonumber(sub(entry, 1, 16))
end

-- Return the last number delivered and the last number drawn: those of the entries lie between them.
local function bounds()
  local stored = call('HMGET', K.meta, 'delivered', 'outbox')
  return tonumber(stored[1] or nil) or 0, tonumber(stored[2] or nil) or 1e16
end

local function is_in_order(entries)
  if not entries[1] then return true end
  local before, last = bounds()
  for i = 1, #entries do
    local number = number_of(entries[i])
    if not number or number <= before or number > last then return false end
    before = number
  end
  return true
end

-- Return the places of the longest rising sequence of numbers up to last: all other numbers are damaged.
local function rising(numbers, first, last)
  local starts, behind, places = {}, {}, {}
  for i = #numbers, 1, -1 do
    local number, low, high = numbers[i], 1, #starts + 1
    while low < high do
      local middle = floor((low + high) / 2)
      if numbers[starts[middle]] > number then low = middle + 1 else high = middle end
    end
    if number > first and number <= last then behind[i], starts[low] = starts[low - 1], i end
  end
  local place = starts[#starts]
  while place do
    places[place], place = true, behind[place]
  end
  return places
end

-- Renumber entries with damaged numbers, counting down from the entry after each. A target skips numbers that are not above
-- the last one it has applied, and everything after a number that is too high. Return how many there were.
local function renumber(entries)
  local numbers, count, first, last = {}, 0, bounds()
  for i = 1, #entries do numbers[i] = number_of(entries[i]) or 0 end
  local places, number = rising(numbers, first, last), last + 1
  for i = #entries, 1, -1 do
    number = places[i] and numbers[i] or number - 1
    if not places[i] then
      count, entries[i] = count + 1, format('%016.0f', number) .. sub(entries[i], 17)
    end
  end
  return count
end

-- Check the whole outbox. Return how many numbers are damaged, and how many entries cannot be read. repair: renumber the
-- former, and put the latter aside.
function Outbox.mend(repair)
  local kept, aside = {}, {}
  for _, entry in ipairs(call('LRANGE', K.outbox, 0, -1)) do
    local list = is_message(entry) and kept or aside
    list[#list + 1] = entry
  end
  local count = is_in_order(kept) and 0 or renumber(kept)
  if repair and (count > 0 or aside[1]) then
    call('UNLINK', K.outbox)
    if kept[1] then send('RPUSH', K.outbox, kept) elseif Outbox.is_full() then Q.uses = Q.uses - Outbox.BIT end
    for _, entry in ipairs(aside) do
      hset('damaged', 'message:' .. redis.sha1hex(entry), encode({ value = entry }))
    end
  end
  return count, #aside
end

local function deliver(keys, args)
  open(keys)
  local last = tonumber(call('HGET', K.inbox, args[1]) or 0)
  local kinds, messages, ids, headers, damaged = {}, {}, {}, {}, {}
  for i = 2, #args, 2 do
    if tonumber(args[i]) > last then
      local kind, is_read, message = sub(args[i + 1], 1, 1), pcall(decode, sub(args[i + 1], 2))
      last = tonumber(args[i])
      if is_read and is_sound(kind, message) then
        kinds[#kinds + 1], messages[#messages + 1] = kind, message
        if kind ~= 'd' then ids[#ids + 1] = message[1] end
        if kind == 'p' and message[5] then headers[message[4]] = message[5] end
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

register('undelivered', function(keys, args)
  open(keys)
  local most, count, aside = tonumber(args[1]) - 1, 0, 0
  local entries = call('LRANGE', K.outbox, 0, most)
  if not is_in_order(entries) then
    count, aside = Outbox.mend(true)
    close()
    entries = call('LRANGE', K.outbox, 0, most)
  end
  return { count, aside, spread(entries) }
end)

register('delivered', function(keys, args)
  open(keys)
  local sequence, count = tonumber(args[1]), AT_ONCE
  while count == AT_ONCE do
    local entries = call('LRANGE', K.outbox, 0, AT_ONCE - 1)
    count = 0
    while entries[count + 1] and tonumber(sub(entries[count + 1], 1, 16)) <= sequence do count = count + 1 end
    if count > 0 then
      call('LPOP', K.outbox, count)
      call('HSET', K.meta, 'delivered', sub(entries[count], 1, 16))
    end
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
