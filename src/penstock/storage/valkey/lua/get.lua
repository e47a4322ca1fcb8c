-- get: jobs by id.
-- arguments: ids
-- returns:   per id {static, state or '', lease_until or '', result or '', failure or '', progress or '',
--   extras or '' [, the bytes of a damaged record]}, or ''
-- list:      jobs of an index, in its order.
-- arguments: part, limit, reverse, score, member (place to go on from; '' at first)
-- returns:   {ids, as get, score, member}: score is '' at the end
-- scan:      jobs of any state, a step at a time.
-- arguments: cursor ('0' at first), limit, part, parts, letters of the states to return ('': all), light (1: static
--   records without payload, no long results)
-- returns:   {cursor, ids, as get}: the cursor is '0' at the end

local LOOKED_AT = 10000
local LETTERS = { C = 'c', g = 'b', h = 'b', i = 'b', j = 'b', k = 'b', l = 'b', m = 'b', t = 's' }

local function fields_of(part, ids, has_field)
  local field_ids, at = {}, {}
  for i = 1, #ids do
    if has_field(i) then
      field_ids[#field_ids + 1] = ids[i]
      at[#field_ids] = i
    end
  end
  local values, stored = {}, read_many(part == 'active' and 'ZMSCORE' or 'HMGET', K[part], field_ids)
  for i = 1, #field_ids do values[at[i]] = stored[i] end
  return values
end

-- Return a static record without its payload.
local function without_payload(static)
  if not static then return static end
  if byte(static, 13) == 0 then return sub(static, 1, 19) end
  return sub(static, 1, 11 + read_body({}, sub(static, 13)).payload_at)
end

local function read_jobs(ids, is_light)
  local states, statics = read_many('HMGET', K.state, ids), read_many('HMGET', K.jobs, ids)
  local function has(flag)
    return function(i) return states[i] and bit_of(byte(states[i], FLAGS_AT) or 0, flag) end
  end
  local function is(letter)
    return function(i) return states[i] and byte(states[i], 1) == letter end
  end
  local leases, results = fields_of('active', ids, is(97)), is_light and {} or fields_of('results', ids, is(67))
  local failures, progress = fields_of('failures', ids, has(8)), fields_of('progress', ids, has(16))
  local extras_by_place = fields_of('annex', ids, has(128))
  local damaged = fields_of('damaged', ids, function(i)
    return states[i] and byte(states[i], 1) == 102 and sub(states[i], -7) == 'Damaged'
  end)
  local jobs = {}
  for i = 1, #ids do
    if is_light then statics[i] = without_payload(statics[i]) end
    jobs[i] = statics[i] and {
      statics[i], states[i] or '', leases[i] or '', results[i] or '', failures[i] or '', progress[i] or '',
      extras_by_place[i] or '', damaged[i] or nil,
    } or ''
  end
  return jobs
end

register('get', function(keys, ids)
  open(keys)
  return read_jobs(ids)
end, READS)

register('list', function(keys, args)
  open(keys)
  local part, limit = args[1], tonumber(args[2])
  local members, scores = members_after(part, args[4], args[5], limit + 1, args[3] == '1')
  local ids, count, more = {}, min(#members, limit), #members > limit
  for i = 1, count do ids[i] = id_of(part, members[i]) end
  return { ids, read_jobs(ids), more and scores[count] or '', more and members[count] or '' }
end, READS)

-- Servers before Valkey 8 and Redis 7.4 cannot omit the values.
local can_leave_out = true

local function scan_ids(cursor, count)
  local reply = can_leave_out and redis.pcall('HSCAN', K.jobs, cursor, 'COUNT', count, 'NOVALUES')
  if reply and not reply.err then return reply[1], reply[2] end
  can_leave_out = false
  reply = call('HSCAN', K.jobs, cursor, 'COUNT', count)
  local ids, fields = {}, reply[2]
  for i = 1, #fields, 2 do ids[#ids + 1] = fields[i] end
  return reply[1], ids
end

-- Return the ids of a part. The hash depends on the id alone, so an id is always in the same part.
local function ids_of_part(ids, part, parts)
  if parts == 1 then return ids end
  local chosen = {}
  for i = 1, #ids do
    if tonumber(sub(redis.sha1hex(ids[i]), 1, 8), 16) % parts == part then chosen[#chosen + 1] = ids[i] end
  end
  return chosen
end

local function ids_in_states(ids, letters)
  if letters == '' then return ids end
  local states, chosen = read_many('HMGET', K.state, ids), {}
  for i = 1, #ids do
    local letter = states[i] and sub(states[i], 1, 1) or 'w'
    if string.find(letters, LETTERS[letter] or letter, 1, true) then chosen[#chosen + 1] = ids[i] end
  end
  return chosen
end

register('scan', function(keys, args)
  open(keys)
  local cursor, limit, parts = args[1], tonumber(args[2]), tonumber(args[4])
  local chosen, seen, looked_at, count = {}, {}, 0, min(limit * parts, LOOKED_AT)
  repeat
    local ids
    cursor, ids = scan_ids(cursor, count)
    looked_at = looked_at + max(#ids, count)
    for _, id in ipairs(ids_in_states(ids_of_part(ids, tonumber(args[3]), parts), args[5])) do
      if not seen[id] then
        seen[id] = true
        chosen[#chosen + 1] = id
      end
    end
  until cursor == '0' or #chosen >= limit or looked_at >= LOOKED_AT
  return { cursor, chosen, read_jobs(chosen, args[6] == '1') }
end, READS)
