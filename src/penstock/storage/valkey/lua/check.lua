-- check: compares records with indexes, a step at a time; each step is atomic.
-- arguments: part ('jobs', 'state', an index, 'groups', a hash of side values, or a set of ids), cursor, repair
-- returns:   {cursor ('0': done), looked at, problem, count, problem, count ...}
-- events:    none

local AT_ONCE = 500
local COUNTED_AT_MOST = 100000
local SIDE_HASHES = { results = true, failures = true, progress = true, rerun = true, waiters = true, annex = true,
  received = true }

local KEYS_OF = { parents = ':deps:', linked = ':dependents:', stepped = ':steps:' }

local function count_in(problems, kind)
  problems[kind] = (problems[kind] or 0) + 1
end

local function is_indexed(job)
  if job.was_in_line then return is_in_line(job) end
  return call('ZSCORE', K[STATES[job.state]], job.was_member)
end

local function check_holds(job, repair, problems)
  local is_whole = call('ZSCORE', K['held_' .. STATES[job.state]], job.id)
  for consumer in pairs(extras_of(job).holds) do
    is_whole = is_whole and call('ZSCORE', K['held:' .. consumer], job.id)
  end
  if not is_whole then
    count_in(problems, 'not_in_held')
    if repair then changed(job) end
  end
end

local function is_rightly_held(part, job)
  if not ENDED[job.state] or Holds.ms(job) == 0 then return false end
  local consumer = string.match(part, '^held:(.*)$')
  if consumer then return extras_of(job).holds[consumer] end
  return part == 'held_' .. STATES[job.state]
end

-- Check records, and those that no index points to: return these to where their state says. A lease without a deadline ends.
local function check_records(ids, repair, problems)
  load(ids, true)
  for i = 1, #ids do
    local job = job_for(ids[i])
    if job and not is_indexed(job) then
      count_in(problems, 'not_in_' .. STATES[job.state])
      if repair then
        job.was, job.lease_until = nil, Q.now
        changed(job)
      end
    elseif job and job.was_expiring and not call('ZSCORE', K.expiring, job.id) then
      count_in(problems, 'not_in_expiring')
      if repair then zadd('expiring', job.expires, job.id) end
    elseif job and job.was_suspended and extras_of(job).awaits_until_ms and not call('ZSCORE', K.suspended, job.id) then
      count_in(problems, 'not_in_suspended')
      if repair then zadd('suspended', job.extras.awaits_until_ms, job.id) end
    end
    if job and job.was_error and not call('ZSCORE', K['error:' .. job.was_error], job.id) then
      count_in(problems, 'not_in_errors')
      if repair then changed(job) end
    end
    if job and ENDED[job.state] and Holds.ms(job) > 0 then check_holds(job, repair, problems) end
  end
end

-- Return whether a job belongs in an index other than that of its state.
local function is_rightly_in(part, job)
  if part == 'expiring' then return job.was_expiring end
  if part == 'suspended' then return job.was_suspended end
  if part == 'instants' then return job.was_run_at end
  if sub(part, 1, 6) == 'error:' then return job.was_error == sub(part, 7) end
  return sub(part, 1, 4) == 'held' and is_rightly_held(part, job)
end

local function check_index(part, members, repair, problems)
  local ids = {}
  for i = 1, #members do ids[i] = id_of(part, members[i]) end
  load(ids)
  for i = 1, #members do
    local job = job_for(ids[i])
    local is_right = job and (is_rightly_in(part, job)
      or STATES[job.was] == part and job.was_member == members[i] and not job.was_in_line)
    if not is_right then
      count_in(problems, 'stray_in_' .. part)
      if repair then zrem(part, members[i]) end
    end
  end
end

local function check_fields(part, ids, repair, problems)
  local statics = read_many('HMGET', K.jobs, ids)
  for i = 1, #ids do
    if not statics[i] then
      count_in(problems, 'stray_in_' .. part)
      if repair then hdel(part, ids[i]) end
      if part == 'waiters' and repair then Q.waiters = Q.waiters - 1 end
    end
  end
end

-- Check dedup records whose job is gone, and times without a record.
local function check_dedup(part, names, repair, problems)
  for i = 1, #names do
    local record = Dedup.read(names[i])
    local job = record and Dedup.job_of(record)
    local is_right = record and (record.until_ms > 0 or part == 'dedup' and job and not ENDED[job.state])
    if not is_right then
      count_in(problems, 'stray_in_' .. part)
      if repair and part == 'dedup' then Dedup.put(names[i], false) end
      if repair then zrem('dedup_times', names[i]) end
    end
  end
end

local function waits_for_ever(s)
  if s.awaits == 0 then return false end
  local job = Dedup.job_of({ id = s.last_id, inc = s.awaits })
  return not job or ENDED[job.state]
end

-- Check schedulers whose next slot is not in the index, or that wait for a job that will not report its end.
local function check_schedulers(names, repair, problems)
  for i = 1, #names do
    local s = Schedulers.read(names[i])
    local slot, is_stuck = tonumber(call('ZSCORE', K.slots, s.name) or 0), waits_for_ever(s)
    if slot ~= Schedulers.slot_of(s) or is_stuck then
      count_in(problems, 'stray_in_schedulers')
      if is_stuck then Schedulers.go_on(s) end
      if repair then Schedulers.save(s) end
    end
  end
end

local function check_slots(names, repair, problems)
  for i = 1, #names do
    if not Schedulers.read(names[i]) then
      count_in(problems, 'stray_in_slots')
      if repair then zrem('slots', names[i]) end
    end
  end
end

local function ids_in(part)
  local ids = {}
  if part == 'line' then
    local entries = fresh_entries(call('LRANGE', K.line, 0, -1))
    for i = 1, #entries do ids[i] = sub(entries[i], 7) end
  else
    local members = call('ZRANGE', K[part], 0, -1)
    for i = 1, #members do ids[i] = id_of(part, members[i]) end
  end
  return ids
end

local function count_members(part, counted)
  local members = ids_in(part)
  for first = 1, #members, CHUNK do
    local ids = {}
    for i = first, min(first + CHUNK - 1, #members) do ids[#ids + 1] = members[i] end
    load(ids)
    for i = 1, #ids do
      local job = job_for(ids[i])
      if job and job.group_role and Groups.key_of(job) then
        local list = list_in(counted, job.group_key)
        list[#list + 1] = job
      end
    end
  end
end

-- Return a group as its members show it, and its blocked members.
local function recounted(key, jobs)
  local group, line = Groups.new(key), {}
  for i = 1, #jobs do
    local job, role = jobs[i], jobs[i].group_role
    if role == 'w' then group.w, group.cost = group.w + 1, group.cost + Groups.cost_of(job) end
    if role == 'a' then group.a = group.a + 1 end
    if role == 'h' or role == 'k' then group.h = group.h + 1 end
    if role == 'b' or role == 'k' then
      group.b = group.b + 1
      line[job.group_member] = job
    end
  end
  return group, line
end

local function is_right(group, line, stored)
  for _, name in ipairs({ 'w', 'a', 'h', 'b', 'cost' }) do
    if group[name] ~= stored[name] then return false end
  end
  local members = call('ZRANGE', Groups.set_of(group), 0, -1)
  for i = 1, #members do
    if not line[members[i]] then return false end
  end
  return #members == group.b
end

-- Check the counts of groups and their blocked members, in one step because members move. Skip it if there are many jobs.
local function check_groups(repair, problems)
  local counted, total = {}, 0
  local parts = { 'waiting', 'active', 'scheduled', 'blocked' }
  for _, part in ipairs(parts) do total = total + call('ZCARD', K[part]) end
  total = total + call('LLEN', K.line)
  parts[#parts + 1] = 'line'
  if total > COUNTED_AT_MOST then return end
  for _, part in ipairs(parts) do count_members(part, counted) end
  for _, key in ipairs(call('HKEYS', K.groups)) do
    if key ~= '' then list_in(counted, key) end
  end
  for key, jobs in pairs(counted) do
    local group, line = recounted(key, jobs)
    local stored = Groups.of(key)
    if not is_right(group, line, stored) then
      count_in(problems, 'wrong_in_groups')
      if repair then
        for _, name in ipairs({ 'w', 'a', 'h', 'b', 'cost' }) do stored[name] = group[name] end
        call('UNLINK', Groups.set_of(stored))
        for _, job in pairs(line) do Groups.add_blocked(job, stored) end
        Groups.touch(stored)
      end
    end
  end
end

-- Check ids that have a key of their own, but no record.
local function check_sets(part, ids, repair, problems)
  local statics = read_many('HMGET', K.jobs, ids)
  for i = 1, #ids do
    if not statics[i] then
      count_in(problems, 'stray_in_' .. part)
      if repair then
        call('UNLINK', Q.prefix .. KEYS_OF[part] .. ids[i])
        call('SREM', K[part], ids[i])
        if part == 'stepped' then call('UNLINK', Steps.results_key(ids[i])) end
      end
    end
  end
end

local function check_part(part, names, repair, problems)
  if KEYS_OF[part] then
    check_sets(part, names, repair, problems)
  elseif part == 'jobs' then
    check_records(names, repair, problems)
  elseif part == 'state' or SIDE_HASHES[part] then
    check_fields(part, names, repair, problems)
  elseif part == 'dedup' or part == 'dedup_times' then
    check_dedup(part, names, repair, problems)
  elseif part == 'schedulers' then
    check_schedulers(names, repair, problems)
  elseif part == 'slots' then
    check_slots(names, repair, problems)
  else
    check_index(part, names, repair, problems)
  end
end

register('check', function(keys, args)
  open(keys, 'any')
  local part, repair = args[1], args[3] == '1'
  if part == 'groups' then
    local problems = {}
    if bit_of(Q.uses, 2) then check_groups(repair, problems) end
    if repair then close() end
    if not problems.wrong_in_groups then return { '0', 0 } end
    return { '0', 0, 'wrong_in_groups', problems.wrong_in_groups }
  end
  local is_hash = part == 'jobs' or part == 'state' or part == 'dedup' or part == 'schedulers' or SIDE_HASHES[part]
  local answer = KEYS_OF[part] and call('SSCAN', K[part], args[2], 'COUNT', AT_ONCE)
    or call(is_hash and 'HSCAN' or 'ZSCAN', K[part], args[2], 'COUNT', AT_ONCE)
  local names, problems = {}, {}
  for i = 1, #answer[2], KEYS_OF[part] and 1 or 2 do names[#names + 1] = answer[2][i] end
  check_part(part, names, repair, problems)
  if repair then close() end
  local reply = { answer[1], #names }
  for kind, count in pairs(problems) do
    reply[#reply + 1], reply[#reply + 2] = kind, count
  end
  return reply
end)
