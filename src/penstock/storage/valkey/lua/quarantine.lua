-- quarantine: puts jobs aside whose records cannot be read: they fail with the error Damaged, and their bytes are kept.
-- arguments: most (how many within a minute; 0: no bound), part ('': what claims and sweeps read first; 'jobs', 'state':
--   a step of a walk; 'ids'), cursor, why (not empty: the caller cannot read the records, even if they look sound), ids
-- returns:   {cursor ('0': the walk is over), number put aside, number not put aside because of the bound, ids of jobs
--   whose dependents in other queues are unknown}
-- end_dependency: notifies dependents in this queue that a job of another queue, which cannot do it itself, has failed.
-- arguments: queue, id, failure
-- events:    failed, and what follows

local AT_ONCE = 500
local HEADS = 200
local NO_OPTIONS = '\144' -- an empty list: the defaults
local BY_ID = { 'scheduled', 'blocked', 'active', 'completed', 'failed', 'cancelled', 'expiring', 'suspended',
  'held_completed', 'held_failed', 'held_cancelled', 'instants' }
local SLOT_TYPES = { run_at = 'number', rule = 'string', run_id = 'string', write_id = 'string', listeners = 'table' }

local is_text = Steps.is_text

local function must(condition, why)
  if not condition then error({ why = why }) end
end

local function must_be_texts(list, count, why)
  must(type(list) == 'table', why)
  for i = 1, count do must(type(list[i]) == 'string' and is_text(list[i]), why) end
end

-- Check the stored options: those that this server has cached may differ.
local function examine_options(header)
  local stored = header
  if byte(header, 1) == 0 then stored = call('HGET', K.options, header) end
  must(stored, 'the options are missing')
  local options = decode(stored)
  must(type(options) == 'table', 'the options are not a list')
  for place, default in ipairs(STORED.defaults) do
    local value = options[place]
    must(value == nil or type(value) == type(default), 'the options have a value of a wrong type')
    must(type(default) ~= 'string' or is_text(value or ''), 'the options are not UTF-8')
  end
end

local function examine_extras(packed)
  local extras = decode(packed)
  must(type(extras) == 'table', 'the extras are not a map')
  for name, value in pairs(extras) do
    must(type(name) == 'string', 'the extras are not a map')
    must(not STORED.extras[name] or type(value) == STORED.extras[name], 'the extras have a value of a wrong type')
    must(type(value) ~= 'string' or is_text(value), 'the extras are not UTF-8')
  end
  for _, dependent in ipairs(extras.dependents or {}) do must_be_texts(dependent, 3, 'a dependent cannot be read') end
  for consumer, ms in pairs(extras.holds or {}) do
    must(type(consumer) == 'string' and type(ms) == 'number', 'a hold cannot be read')
  end
  return extras
end

local function examine_body(job)
  must(job.payload_at <= #job.body + 1, 'the record is too short')
  must(is_text(job.run_id) and is_text(job.write_id), 'the record is not UTF-8')
  examine_options(job.header)
  if job.packed_extras then examine_extras(job.packed_extras) end
end

local function examine_deps(id)
  local fields = call('HGETALL', Q.prefix .. ':deps:' .. id)
  local known = {}
  for i = 1, #fields, 2 do
    local name, value = fields[i], fields[i + 1]
    known[name] = value
    if byte(name, 1) > 3 then
      local entry = decode(value)
      must(type(entry) == 'table' and type(entry[1]) == 'number' and string.find(entry[2], '^[fiw]$')
        and string.find(entry[3], '^[cfxr]?$'), 'a dependency cannot be read')
      if byte(name, 1) > 3 and string.find(entry[3], '^[fxr]$') and known['\1' .. name] then
        must_be_texts(decode(known['\1' .. name]), 2, 'the failure of a dependency cannot be read')
      end
    elseif string.find(name, '^\3[gp]') then
      must(tonumber(value), 'the number of dependencies cannot be read')
    end
  end
  must(known['\3flow'], 'the dependencies are missing')
end

local function examine_state(job, record, inc)
  must(#record >= WORKER_AT - 1, 'the state is too short')
  local rest = { unpack('>BHH', record, WORKER_AT - 5) }
  must(#record >= WORKER_AT - 1 + rest[1] + rest[2] + rest[3], 'the state is too short')
  must(rest[2] > 0, 'the state has no options')
  must(string.find(sub(record, 1, 1), '^[swacCfxghijklmt]$'), 'unknown state')
  must(string.find(sub(record, 2, 2), '^[%-swbacfx]$'), 'unknown state')
  read_state(job, record)
  must(not inc or job.inc == inc, 'the state is that of another job')
  must(is_text(job.worker) and is_text(job.run_id) and is_text(job.error_type or ''), 'the state is not UTF-8')
  examine_options(job.header)
end

local function examine_slot(slot)
  local why = 'the rerun cannot be read'
  must(type(slot) == 'table', why)
  for name, kind in pairs(SLOT_TYPES) do must(type(slot[name]) == kind, why) end
  must(type(slot.payload or '') == 'string' and type(slot.header or '') == 'string', why)
  must(is_text(slot.run_id) and is_text(slot.write_id), why)
  must_be_texts(slot.listeners, #slot.listeners, why)
  if slot.header then
    must(type(slot.priority) == 'number' and type(slot.lifo) == 'boolean' and type(slot.ttl) == 'number', why)
    examine_options(slot.header)
  end
end

local function examine_side_values(job)
  local extras
  if job.extras_moved then
    local packed = call('HGET', K.annex, job.id)
    must(packed, 'the extras are missing')
    extras = examine_extras(packed)
  elseif job.packed_extras then
    extras = examine_extras(job.packed_extras)
  end
  if job.has_failure then
    local failure = call('HGET', K.failures, job.id)
    must(failure, 'the failure is missing')
    must_be_texts(decode(failure), 2, 'the failure cannot be read')
  end
  if job.rerun then
    local slot = call('HGET', K.rerun, job.id)
    must(slot, 'the rerun is missing')
    examine_slot(decode(slot))
  end
  if job.big_result then must(call('HEXISTS', K.results, job.id) == 1, 'the result is missing') end
  if extras and extras.has_steps then
    local problem = Steps.damage(job.id)
    must(not problem, problem)
  end
  if extras and extras.has_dependencies then examine_deps(job.id) end
  if extras and extras.has_later_dependents then
    for _, packed in ipairs(call('LRANGE', Q.prefix .. ':dependents:' .. job.id, 0, -1)) do
      must_be_texts(decode(packed), 3, 'a dependent cannot be read')
    end
  end
end

local function examine(id, state, static)
  must(static, 'the record is missing')
  must(#static >= 14, 'the record is too short')
  local job = { id = id }
  local inc, enq = unpack('>I6I6', static)
  job.inc, job.enq = inc, enq
  must(inc <= Q.seq, 'the incarnation is in the future')
  read_body(job, sub(static, 13))
  examine_body(job)
  if state then
    local packed_extras = job.packed_extras
    examine_state(job, state, inc)
    job.packed_extras = packed_extras
  end
  examine_side_values(job)
end

-- Return why the job cannot be read, or nil.
local function problem_of(id, state, static)
  local is_read, raised = pcall(examine, id, state, static)
  if is_read then return nil end
  return type(raised) == 'table' and raised.why or 'it cannot be decoded'
end

-- Salvage

local function tried(examination, ...)
  local is_read, value = pcall(examination, ...)
  return is_read and value or nil
end

local function readable_static(id, static)
  local job = { id = id }
  job.inc, job.enq = unpack('>I6I6', static)
  must(job.inc <= Q.seq, '')
  read_body(job, sub(static, 13))
  examine_body(job)
  return job
end

local function readable_state(id, state)
  local job = { id = id }
  examine_state(job, state)
  return job
end

-- Return a record with nothing but its id.
local function bare(id, static)
  local inc, enq = 0, Q.now
  if static and #static >= 12 then inc, enq = unpack('>I6I6', static) end
  if inc == 0 or inc > Q.seq then inc, enq = draw(), Q.now end
  return {
    id = id, inc = inc, enq = enq, header = NO_OPTIONS, lifo = false, priority = 0, ttl = 0, run_id = '', write_id = '',
    has_links = false, payload = '',
  }
end

-- Keep the job long enough for a person to look at it.
local function keep_long(job)
  local stored = byte(job.header, 1) == 0 and call('HGET', K.options, job.header) or job.header
  local options = decode(stored)
  local place = STORED.options.failure_ttl_ms
  if (options[place] or STORED.defaults[place]) >= BOUNDS.DAMAGED_KEPT_MS then return end
  set_option(options, 'failure_ttl_ms', BOUNDS.DAMAGED_KEPT_MS)
  job.header = encode(options)
end

-- Return the job with every field that can be read, and whether its extras can be read.
local function salvaged(id, state, static)
  local whole = static and tried(readable_static, id, static)
  local job = whole or bare(id, static)
  local was = state and tried(readable_state, id, state)
  local is_linked = job.has_links
  pristine(job)
  job.pristine = false
  if was then
    job.runs, job.failures, job.stalls, job.token = was.runs, was.failures, was.stalls, was.token
    job.has_progress, job.has_log = was.has_progress, was.has_log
  end
  local moved = (was and was.extras_moved or not was) and call('HGET', K.annex, id)
  local extras = moved and tried(examine_extras, moved)
  if extras then
    job.extras, job.extras_moved, job.has_links = extras, true, true
  elseif whole then
    job.extras, job.has_links = job.packed_extras and decode(job.packed_extras) or {}, is_linked
  end
  -- A retry must not run recorded steps again.
  if call('SISMEMBER', K.stepped, id) == 1 then
    job.extras = job.extras or {}
    job.extras.has_steps, job.extras_moved, job.save_extras = true, true, true
  end
  keep_long(job)
  return job, (whole or extras) and true or false
end

-- Freeing what the job holds

local function leave_waiting(id)
  local cursor, pattern = '0', '*' .. string.gsub(id, '[%*%?%[%]\\]', '\\%0')
  repeat
    local reply = call('ZSCAN', K.waiting, cursor, 'MATCH', pattern, 'COUNT', CHUNK)
    cursor = reply[1]
    for i = 1, #reply[2], 2 do
      if sub(reply[2][i], 9) == id then call('ZREM', K.waiting, reply[2][i]) end
    end
  until cursor == '0'
end

-- Remove the job's entry from the line. Only a job without a state record has an entry that is not stale.
local function leave_line(id)
  local last
  for first = 0, call('LLEN', K.line) - 1, CHUNK do
    for _, entry in ipairs(call('LRANGE', K.line, first, first + CHUNK - 1)) do
      if sub(entry, 7) == id then last = entry end
    end
  end
  if last then call('LREM', K.line, -1, last) end
end

local function leave_indexes(id, state)
  for _, part in ipairs(BY_ID) do call('ZREM', K[part], id) end
  for _, class in ipairs(call('HKEYS', K.errors)) do call('ZREM', K['error:' .. class], id) end
  for _, consumer in ipairs(call('HKEYS', K.holders)) do call('ZREM', K['held:' .. consumer], id) end
  leave_waiting(id)
  if not state then leave_line(id) end
end

-- Notify the jobs of this queue that depend on a job.
local function tell_parents(queue, id, failure)
  local name = queue .. '\0' .. id
  for _, parent in ipairs(call('SMEMBERS', K.parents)) do
    local known = call('HMGET', Q.prefix .. ':deps:' .. parent, name, '\3flow')
    if known[1] and known[2] then pcall(Flows.dependency_ended, { parent, known[2], queue, id, 'f', failure }) end
  end
end

local function forget_dedup(id)
  local cursor = '0'
  repeat
    local reply = call('HSCAN', K.dedup, cursor, 'COUNT', CHUNK)
    cursor = reply[1]
    for i = 1, #reply[2], 2 do
      local record = tried(Dedup.parse, reply[2][i + 1])
      if record and record.id == id and record.until_ms == 0 then call('HDEL', K.dedup, reply[2][i]) end
    end
  until cursor == '0'
end

local function free_schedulers(id)
  local stored = call('HGETALL', K.schedulers)
  for i = 1, #stored, 2 do
    local s = tried(Schedulers.parse, stored[i], stored[i + 1])
    if s and s.awaits > 0 and s.last_id == id then
      Schedulers.go_on(s)
      Schedulers.save(s)
    end
  end
end

-- Free a job whose links are unknown, by its id.
local function free_by_id(id, failure)
  for _, packed in ipairs(call('LRANGE', Q.prefix .. ':dependents:' .. id, 0, -1)) do
    local dependent = tried(decode, packed)
    if dependent then pcall(Flows.tell_all, { dependent }, id, 'f', failure) end
  end
  tell_parents(Outbox.here(), id, failure)
  forget_dedup(id)
  free_schedulers(id)
  call('HDEL', K.received, id)
  call('HDEL', K.annex, id)
  for part, prefix in pairs({ signalled = ':signals:', parents = ':deps:', linked = ':dependents:' }) do
    call('SREM', K[part], id)
    call('UNLINK', Q.prefix .. prefix .. id)
  end
end

local function free(job, failure)
  pcall(Flows.tell, job, 'f')
  if job.extras.dedup then pcall(Dedup.ended, job.inc, job.extras.dedup) end
  if job.extras.repeats and job.extras.scheduler then pcall(Schedulers.ended, job, job.extras.scheduler) end
  if job.extras.has_dependencies and not tried(function()
    examine_deps(job.id)
    return true
  end) then
    call('SREM', K.parents, job.id)
    call('UNLINK', Q.prefix .. ':deps:' .. job.id)
    job.extras.has_dependencies = nil
    extras_changed(job)
  end
end

local function tell_listeners(job, rerun)
  local slot = rerun and tried(decode, rerun)
  for _, listener in ipairs(type(slot) == 'table' and type(slot.listeners) == 'table' and slot.listeners or {}) do
    pcall(add_waiter, job.id, listener)
  end
  pcall(tell, job, 'f')
end

-- Return MessagePack of the stored values, as bytes: cmsgpack would write them as text.
local function packed_parts(parts)
  local names = {}
  for name in pairs(parts) do names[#names + 1] = name end
  table.sort(names)
  local packed = { string.char(128 + #names) }
  for _, name in ipairs(names) do
    packed[#packed + 1] = string.char(160 + #name) .. name .. '\198' .. pack('>I4', #parts[name]) .. parts[name]
  end
  return table.concat(packed)
end

-- Put a job aside. Return whether its links were known.
local function bury(id, state, static, why)
  local parts = { jobs = static or nil, state = state or nil }
  for _, part in ipairs({ 'annex', 'failures', 'rerun' }) do parts[part] = call('HGET', K[part], id) or nil end
  parts.steps = Steps.take_damaged(id)
  local job, is_known = salvaged(id, state, static)
  leave_indexes(id, state)
  call('HDEL', K.rerun, id)
  J[id] = job
  local message = message_of('Damaged', why)
  local failure = failure_of('Damaged', message)
  set_failure(job, failure)
  job.state, job.finished = 'f', Q.now
  changed(job)
  rewritten(job)
  local group, row = emit('failed', job)
  put(group, row, 'et', 'Damaged')
  put(group, row, 'em', message)
  tell_listeners(job, parts.rerun)
  if Q.uses >= 128 then pcall(Outbox.bury, job) end
  if is_known then free(job, failure) else free_by_id(id, failure) end
  hset('damaged', id, packed_parts(parts))
  zadd('damaged_at', Q.now, id)
  write_waiters()
  flush()
  return is_known
end

-- Choosing the jobs to check

local function heads()
  local ids, seen = {}, {}
  local function add(id)
    if not seen[id] then ids[#ids + 1], seen[id] = id, true end
  end
  for _, entry in ipairs(call('LRANGE', K.line, 0, HEADS - 1)) do add(sub(entry, 7)) end
  for _, member in ipairs(call('ZRANGE', K.waiting, 0, HEADS - 1)) do add(sub(member, 9)) end
  for _, part in ipairs(BY_ID) do
    for _, id in ipairs(call('ZRANGE', K[part], 0, HEADS - 1)) do add(id) end
  end
  return ids
end

local function scanned(part, cursor)
  local reply, ids = call('HSCAN', K[part], cursor, 'COUNT', AT_ONCE), {}
  for i = 1, #reply[2], 2 do ids[#ids + 1] = reply[2][i] end
  return reply[1], ids
end

local function candidates(args)
  if args[2] == '' then return '0', heads() end
  if args[2] ~= 'ids' then return scanned(args[2], args[3]) end
  local ids = {}
  for i = 5, #args do ids[#ids + 1] = args[i] end
  return '0', ids
end

local function damaged_among(ids, why)
  local states, statics = read_many('HMGET', K.state, ids), read_many('HMGET', K.jobs, ids)
  local damaged = {}
  for i = 1, #ids do
    local problem = (states[i] or statics[i]) and (problem_of(ids[i], states[i], statics[i]) or why ~= '' and why)
    if problem then damaged[#damaged + 1] = { ids[i], states[i], statics[i], problem } end
  end
  return damaged
end

register('quarantine', function(keys, args)
  open(keys, 'any')
  local most, cursor, ids = tonumber(args[1]), candidates(args)
  local damaged = damaged_among(ids, args[4])
  local room = #damaged
  if most > 0 then room = max(0, most - call('ZCOUNT', K.damaged_at, '(' .. digits(Q.now - BOUNDS.MINUTE_MS), '+inf')) end
  local done, untold = min(#damaged, room), {}
  for i = 1, done do
    local id, state, static, why = spread(damaged[i], 1, 4)
    if not bury(id, state, static, why) then untold[#untold + 1] = id end
  end
  if done > 0 then close() end
  return { cursor, done, #damaged - done, untold }
end)

-- Return how many there are, for check.
register('count_damaged', function(keys, args)
  open(keys, 'any')
  local cursor, ids = scanned(args[1], args[2])
  return { cursor, #damaged_among(ids, '') }
end, READS)

register('end_dependency', function(keys, args)
  open(keys, 'any')
  tell_parents(args[1], args[2], args[3])
  close()
  return Outbox.is_full() and 1 or 0
end)
