-- get: jobs by id.
-- arguments: ids
-- returns:   per id {static, state or '', lease_until or '', result or '', failure or '', progress or '',
--   annex or ''}, or ''
-- list:      jobs of an index, in its order.
-- arguments: part, limit, reverse, score, member (place to go on from; '' at first)
-- returns:   {ids, as get, score, member}: score is '' at the end

local function fields_of(part, ids, wanted)
  local asked, at = {}, {}
  for i = 1, #ids do
    if wanted(i) then
      asked[#asked + 1] = ids[i]
      at[#asked] = i
    end
  end
  local values, found_values = {}, read_many(part == 'active' and 'ZMSCORE' or 'HMGET', K[part], asked)
  for i = 1, #asked do values[at[i]] = found_values[i] end
  return values
end

local function read_jobs(ids)
  local states, statics = read_many('HMGET', K.state, ids), read_many('HMGET', K.jobs, ids)
  local function has(flag)
    return function(i) return states[i] and bit_of(byte(states[i], FLAGS_AT), flag) end
  end
  local function is(letter)
    return function(i) return states[i] and byte(states[i], 1) == letter end
  end
  local leases, results = fields_of('active', ids, is(97)), fields_of('results', ids, is(67))
  local failures, progress = fields_of('failures', ids, has(8)), fields_of('progress', ids, has(16))
  local annexes = fields_of('annex', ids, has(128))
  local jobs = {}
  for i = 1, #ids do
    jobs[i] = statics[i] and {
      statics[i], states[i] or '', leases[i] or '', results[i] or '', failures[i] or '', progress[i] or '',
      annexes[i] or '',
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
