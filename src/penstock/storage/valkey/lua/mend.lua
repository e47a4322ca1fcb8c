-- mend: finds values beside the records of jobs that cannot be read.
-- arguments: repair (1: drop them, or set their defaults), with counters (1: compare the counters with the records, which
--   must be sound)
-- returns:   {problem, count, problem, count ...}
-- restore_meta: rebuilds counters that cannot be read, from the queue's other keys.
-- arguments: repair
-- returns:   1 if they could not be read
-- events:    none

local COUNTERS_LENGTH, MINUTE_LENGTH, GROUP_LENGTH = MINUTE_AT - 1, 48, 63
local BEYOND = 2 ^ 20
local KINDS_OF_SETTINGS = { dead_letter = 'string', dead_letter_task = 'string', dead_letter_options = 'string' }

-- Return how many entries of the line are stale according to the records.
local function count_stale()
  local stale, length = 0, call('LLEN', K.line)
  Q.stale = max(Q.stale, 1)
  for first = 0, length - 1, CHUNK do
    local entries = call('LRANGE', K.line, first, first + CHUNK - 1)
    stale = stale + #entries - #fresh_entries(entries)
  end
  return stale
end

-- Check the types of keys. A string found in place of another type is kept among the damaged values.
local function check_types(repair, note)
  for part, kind in pairs(Parts.TYPES) do
    local reply = redis.pcall(Parts.SIZES[kind], K[part])
    if type(reply) == 'table' and reply.err then
      note('wrong_type')
      if repair then
        local text = redis.pcall('GET', K[part])
        call('UNLINK', K[part])
        if type(text) == 'string' and part ~= 'damaged' then hset('damaged', 'key:' .. part, encode({ value = text })) end
      end
    end
  end
end

local function check_settings(repair, note)
  local stored = call('HGET', K.meta, 'settings')
  if not stored then return end
  local is_read, settings = pcall(cjson.decode, stored)
  local is_sound = is_read and type(settings) == 'table'
  for name, value in pairs(is_sound and settings or {}) do
    if value ~= cjson.null and type(value) ~= (KINDS_OF_SETTINGS[name] or 'number') then is_sound = false end
  end
  if is_sound and type(settings.events_hard_cap) ~= 'number' then is_sound = false end
  if not is_sound then
    note('damaged_settings')
    if repair then call('HDEL', K.meta, 'settings') end
  end
end

-- Check the other fields of meta. Without the history of the clock, it counts as regular.
local function check_meta(repair, note)
  local stored = call('HMGET', K.meta, 'clock', 'epoch', 'trimmed')
  if stored[1] and #stored[1] < Clock.LENGTH then
    note('damaged_clock')
    if repair then call('HDEL', K.meta, 'clock') end
  end
  if stored[2] and not Steps.is_text(stored[2]) then
    note('damaged_epoch')
    Q.is_renewed = repair
  end
  if stored[3] and not string.find(stored[3], '^%d+$') then
    note('damaged_log_start')
    if repair then call('HSET', K.meta, 'trimmed', digits(Parts.trimmed_to())) end
  end
end

local function check_hash(part, is_sound, kind, repair, note, dropped)
  local stored = call('HGETALL', K[part])
  for i = 1, #stored, 2 do
    local is_read, sound = pcall(is_sound, stored[i + 1], stored[i])
    if not (is_read and sound) then
      note(kind)
      if repair then
        call('HDEL', K[part], stored[i])
        if dropped then dropped(stored[i], stored[i + 1]) end
      end
    end
  end
end

local function is_limit(packed)
  local fields = decode(packed)
  for place = 1, 6 do
    if type(fields[place]) ~= 'number' or fields[place] < 0 then return false end
  end
  return #fields == 6
end

local function is_scheduler(record, name)
  local s = Schedulers.parse(name, record)
  return #record >= 39 and #s.last_id == unpack('>H', record, 38) and byte(record, 37) <= 1
end

local function is_names(packed)
  for _, name in ipairs(decode(packed)) do
    if type(name) ~= 'string' then return false end
  end
  return true
end

local function is_budget(packed, name)
  local budget = decode(packed)
  for place = 1, 4 do
    if type(budget[place]) ~= 'number' then return false end
  end
  return string.find(name, '%z') ~= nil
end

local function check_values(repair, note)
  check_hash('limits', is_limit, 'damaged_limits', repair, note)
  check_hash('groups', function(record) return #record == GROUP_LENGTH and byte(record, 29) <= 1 end, 'damaged_groups',
    repair, note)
  check_hash('schedulers', is_scheduler, 'damaged_schedulers', repair, note, function(name, record)
    call('ZREM', K.slots, name)
    hset('damaged', 'scheduler:' .. name, encode({ value = record }))
  end)
  check_hash('dedup', function(record) return #record > 12 end, 'damaged_dedup', repair, note, function(key)
    call('ZREM', K.dedup_times, key)
  end)
  check_hash('waiters', is_names, 'damaged_waiters', repair, note)
  check_hash('budgets', is_budget, 'damaged_budgets', repair, note)
  check_hash('workers', function(record) return #record >= 6 end, 'damaged_workers', repair, note)
  check_hash('consumers', function(record) return #record == 12 end, 'damaged_consumers', repair, note)
  check_hash('metrics', function(record) return #record == MINUTE_LENGTH end, 'damaged_minutes', repair, note)
  check_hash('inbox', function(text) return tonumber(text) end, 'damaged_inbox', repair, note)
  check_hash('meta', function(value, name) return sub(name, 1, 2) ~= 'm:' or #value >= 12 end, 'damaged_memos', repair, note)
  local numbers, messages = Outbox.mend(repair)
  for _ = 1, numbers + messages do note('damaged_messages') end
  if #Q.minute ~= 0 and #Q.minute ~= MINUTE_LENGTH then
    note('damaged_minutes')
    Q.minute = ''
  end
end

-- Return the highest number drawn, as far as the records show it.
local function highest()
  local seq = 0
  for part, places in pairs({ jobs = { 1 }, state = { 9, 15, 37 } }) do
    local cursor = '0'
    repeat
      local reply = call('HSCAN', K[part], cursor, 'COUNT', CHUNK)
      cursor = reply[1]
      for i = 2, #reply[2], 2 do
        for _, at in ipairs(places) do
          if #reply[2][i] >= at + 5 then seq = max(seq, (unpack('>I6', reply[2][i], at))) end
        end
      end
    until cursor == '0'
  end
  return seq
end

local function last_event()
  local last = redis.pcall('XREVRANGE', K.events, '+', '-', 'COUNT', 1)
  return type(last) == 'table' and last[1] and tonumber((string.match(last[1][1], '^%d+'))) or 0
end

-- Check counters that are behind the numbers in use, and the counts of stale entries and of waiters.
local function check_counters(repair, note)
  local known, events = Q.stale, last_event()
  local stale, waiters = count_stale(), call('HLEN', K.waiters)
  Q.stale = known
  if stale ~= known or waiters ~= Q.waiters then note('wrong_counts') end
  if events > Q.events then note('wrong_counters') end
  if repair then Q.stale, Q.waiters, Q.events = stale, waiters, max(Q.events, events) end
end

register('mend', function(keys, args)
  open(keys, 'any')
  local repair, problems, reply = args[1] == '1', {}, {}
  local function note(kind) problems[kind] = (problems[kind] or 0) + 1 end
  check_types(repair, note)
  if not repair and problems.wrong_type then return { 'wrong_type', problems.wrong_type } end
  check_settings(repair, note)
  check_meta(repair, note)
  check_values(repair, note)
  if args[2] == '1' then check_counters(repair, note) end
  if repair and next(problems) then close() end
  for kind, count in pairs(problems) do
    reply[#reply + 1], reply[#reply + 2] = kind, count
  end
  return reply
end)

register('restore_meta', function(keys, args)
  if not call then bind() end
  K = keys_of(keys[1])
  local counters = redis.pcall('HGET', K.meta, 'counters')
  local is_wrong_type = type(counters) == 'table'
  if not is_wrong_type and not counters and not Parts.any_exists() then return 0 end
  if not is_wrong_type and counters and (#counters >= COUNTERS_LENGTH or byte(counters, 1) and byte(counters, 1) > FORMAT) then
    return 0
  end
  if args[1] ~= '1' then return 1 end
  if is_wrong_type then call('UNLINK', K.meta) else call('HDEL', K.meta, 'counters') end
  open(keys, 'any')
  check_types(true, function() end)
  -- Leave a margin, because tokens must not repeat. Any feature may be in use.
  Q.seq, Q.events, Q.uses = highest() + BEYOND, last_event(), 255
  Q.waiters, Q.stale = call('HLEN', K.waiters), count_stale()
  call('HSET', K.meta, 'epoch', new_epoch())
  Q.is_new = false
  close()
  return 1
end)
