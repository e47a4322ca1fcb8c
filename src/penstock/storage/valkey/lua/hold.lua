-- hold: keeps jobs for a consumer after they finish.
-- arguments: consumer, ttl_ms, ids
-- returns:   a letter per id: h held, - not found
-- release:   releases holds.
-- arguments: consumer, ids
-- returns:   a letter per id: r released, n not held, - not found
-- held:      finished jobs held for a consumer.
-- arguments: consumer, limit, score, member (place to go on from; '' at first)
-- returns:   {ids, score, member}: score is '' at the end
-- events:    none

-- Answer for all ids. letters: the answers so far.
local function each(ids, letters, act)
  local unknown = {}
  for i = 1, #ids do
    if not letters[i] then unknown[#unknown + 1] = ids[i] end
  end
  load(unknown, true)
  for i = 1, #ids do
    if not letters[i] then
      local job = job_for(ids[i])
      letters[i] = job and not is_over(job) and act(job) or '-'
    end
  end
  close()
  return table.concat(letters)
end

local ENDED_AS = { [99] = 'completed', [67] = 'completed', [102] = 'failed', [120] = 'cancelled' } -- c C f x

-- Return the extras, by id, of the jobs that have them in the annex hash.
local function moved_extras(ids, records)
  local moved, extras_by_id = {}, {}
  for i = 1, #ids do
    if records[i] and byte(records[i], FLAGS_AT) >= 128 then moved[#moved + 1] = ids[i] end
  end
  local packed = read_many('HMGET', K.annex, moved)
  for i = 1, #moved do extras_by_id[moved[i]] = packed[i] or nil end
  return extras_by_id
end

-- Release a finished job by splicing its state record, without a table. Return the letter for releasing it once more, or
-- nil if the job takes the long way.
local function release_ended(release, id, record, static, moved)
  local part, flags = ENDED_AS[byte(record, 1)], byte(record, FLAGS_AT)
  if not part or not bit_of(flags, 64) or flags >= 128 and not moved then return nil end
  local extras, held_ms, still_held_ms = Shortcut.release(release, static, moved)
  if not extras then return nil end
  local finished, worker_length, header_length = unpack('>I6', record, 3), unpack('>BH', record, FLAGS_AT + 7)
  local header_at = WORKER_AT + worker_length
  local options = options_of(sub(record, header_at, header_at + header_length - 1))
  local ttl = part == 'failed' and options.failure_ttl_ms or options.result_ttl_ms
  if finished + max(ttl, held_ms) <= Q.now then return nil end
  local kept_until = finished + max(ttl, still_held_ms)
  if flags < 128 then
    hset('state', id, sub(record, 1, FLAGS_AT - 1) .. string.char(flags + 128) .. sub(record, FLAGS_AT + 1))
  end
  hset('annex', id, extras)
  zadd(part, kept_until, id)
  zrem(release.part, id)
  if still_held_ms > 0 then
    zadd('held_' .. part, finished + still_held_ms, id)
  else
    zrem('held_' .. part, id)
  end
  return Clock.is_past(kept_until) and '-' or 'n'
end

-- Release the jobs that can take the shortcut. Return their letters, by place.
local function release_all(consumer, ids)
  local letters, again, release = {}, {}, { consumer = consumer, cache = {} }
  if not Holds.are_used() then return letters end
  local records, statics = read_many('HMGET', K.state, ids), read_many('HMGET', K.jobs, ids)
  local moved = moved_extras(ids, records)
  release.part = Parts.named('held:' .. consumer)
  for i = 1, #ids do
    local id = ids[i]
    if again[id] then
      letters[i] = again[id]
    elseif records[i] and statics[i] then
      again[id] = release_ended(release, id, records[i], statics[i], moved[id])
      if again[id] then letters[i] = 'r' end
    end
  end
  return letters
end

local function without(args, count)
  local ids = {}
  for i = count + 1, #args do ids[#ids + 1] = args[i] end
  return ids
end

register('hold', function(keys, args)
  open(keys)
  return each(without(args, 2), {}, function(job)
    Holds.hold(job, args[1], tonumber(args[2]))
    return 'h'
  end)
end)

register('release', function(keys, args)
  open(keys)
  local consumer, ids = args[1], without(args, 1)
  return each(ids, release_all(consumer, ids), function(job) return Holds.release(job, consumer) and 'r' or 'n' end)
end)

register('held', function(keys, args)
  open(keys)
  local limit = tonumber(args[2])
  local members, scores = members_after('held:' .. args[1], args[3], args[4], limit + 1, false)
  local ids, count, more = {}, min(#members, limit), #members > limit
  for i = 1, count do ids[i] = members[i] end
  return { ids, more and scores[count] or '', more and members[count] or '' }
end, READS)
