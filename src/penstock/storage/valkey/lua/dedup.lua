-- Dedup keys: the job that stands for each key, and until when.
--
-- dedup  key -> inc:6 until:6 id; until 0: as long as its job is open. A record past its until counts as absent.
-- When a job with a key in its extras (d) ends, the record goes too, if it still names that job.

local Dedup = {}

-- Remove a record's time, also if this very call wrote it: removals are sent before additions.
function Dedup.forget_time(key, record)
  zrem('dedup_times', key)
  local added = record.is_new and list_in(added_members, 'dedup_times') or {}
  for i = #added, 2, -2 do
    if added[i] == key then
      table.remove(added, i)
      table.remove(added, i - 1)
    end
  end
end

-- Take back this call's buffered write of a key: the buffers send removals first.
function Dedup.without(list, key)
  local rest = {}
  for i = 1, #(list or rest), 2 do
    if list[i] ~= key then
      local n = #rest
      rest[n + 1], rest[n + 2] = list[i], list[i + 1]
    end
  end
  return rest
end

function Dedup.put(key, record)
  local old = Q.dedup[key]
  if old and old.until_ms > 0 then Dedup.forget_time(key, old) end
  if record then
    record.is_new = true
    if not bit_of(Q.uses, 32) then Q.uses = Q.uses + 32 end
    hset('dedup', key, pack('>I6I6', record.inc, record.until_ms) .. record.id)
    if record.until_ms > 0 then zadd('dedup_times', record.until_ms, key) end
  else
    if old and old.is_new then set_fields.dedup = Dedup.without(set_fields.dedup, key) end
    hdel('dedup', key)
  end
  Q.dedup[key] = record
end

function Dedup.parse(stored)
  if not stored then return false end
  local inc, until_ms = unpack('>I6I6', stored)
  return { inc = inc, until_ms = until_ms, id = sub(stored, 13) }
end

-- Return the record of a key, as this call knows it, or false. It may be past its time.
function Dedup.read(key)
  if not Q.dedup then Q.dedup = {} end
  local record = Q.dedup[key]
  if record == nil then
    record = Dedup.parse(call('HGET', K.dedup, key))
    Q.dedup[key] = record
  end
  return record
end

-- Read the records of many keys; without it, read() would ask for each.
function Dedup.read_all(keys)
  local records = read_many('HMGET', K.dedup, keys)
  Q.dedup = Q.dedup or {}
  for i = 1, #keys do
    if Q.dedup[keys[i]] == nil then Q.dedup[keys[i]] = Dedup.parse(records[i]) end
  end
end

-- Read the jobs of those records; without it, job_of() would ask for each.
function Dedup.load_all(keys)
  local ids = {}
  for i = 1, #keys do
    local record = Q.dedup[keys[i]]
    if record then ids[#ids + 1] = record.id end
  end
  load(ids, true)
end

function Dedup.stands(record)
  return record and (record.until_ms == 0 or record.until_ms > Q.now)
end

-- Return the job of a record, if that life of it still exists.
function Dedup.job_of(record)
  load({ record.id }, true)
  local job = job_for(record.id)
  return job and job.inc == record.inc and not is_over(job) and job or nil
end

-- Cancel a job that has not begun, because a newer one replaces it.
function Dedup.replace(job, id)
  local message = 'by job ' .. id
  set_failure(job, failure_of('Replaced', message))
  local group, row = finish(job, 'x', 'cancelled')
  put(group, row, 'et', 'Replaced')
  put(group, row, 'em', message)
end

-- As meet, for a mode with the letters of states, such as 'simple:sw'. A job that is gone has completed.
function Dedup.meet_in_states(id, record, job, mode, states)
  local state = job and job.state or 'c'
  if mode == 'debounce' and job and not ENDED[state] and state ~= 'a' then
    Dedup.replace(job, id)
    return nil
  end
  if string.find(states, state, 1, true) then return record, job end
  return nil
end

-- A job is about to be queued under a key. Return the record that makes it a duplicate, and the record's job (nil: gone).
function Dedup.meet(id, key, mode)
  local record = Dedup.read(key)
  if not Dedup.stands(record) then return nil end
  local job = Dedup.job_of(record)
  if mode == 'throttle' then return record, job end
  local colon = string.find(mode, ':', 1, true)
  if colon then return Dedup.meet_in_states(id, record, job, sub(mode, 1, colon - 1), sub(mode, colon + 1)) end
  if not job or ENDED[job.state] then return nil end
  if mode == 'simple' then return record, job end
  if job.state ~= 'a' then Dedup.replace(job, id) end
  return nil
end

-- Note that the job was queued under the key.
function Dedup.note(job, key, mode, ttl_ms)
  local until_ms = sub(mode, 1, 8) ~= 'debounce' and ttl_ms > 0 and Q.now + ttl_ms or 0
  Dedup.put(key, { inc = job.inc, until_ms = until_ms, id = job.id })
end

-- Forget the key of the job of this incarnation, which has ended.
function Dedup.ended(inc, key)
  local record = Dedup.read(key)
  if record and record.inc == inc then Dedup.put(key, false) end
end

-- Forget up to limit records that are past their time. Return how many were considered.
function Dedup.forget(limit)
  if not bit_of(Q.uses, 32) then return 0 end
  local keys = call('ZRANGEBYSCORE', K.dedup_times, '-inf', digits(Q.now), 'LIMIT', 0, limit)
  for i = 1, #keys do
    local record = Dedup.read(keys[i])
    zrem('dedup_times', keys[i])
    if record and not Dedup.stands(record) then Dedup.put(keys[i], false) end
  end
  flush()
  if call('HLEN', K.dedup) == 0 then Q.uses = Q.uses - 32 end
  return #keys
end

function Dedup.drop(key)
  local record = Dedup.read(key)
  if record then Dedup.put(key, false) end
  return Dedup.stands(record)
end
