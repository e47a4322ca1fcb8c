-- record_steps: records steps of running jobs and extends their leases.
-- arguments: lane, number, repeated, lease_ms (0: the leases stay as they are), then per step id, head, name, body, result (if it is not in the
--   body), data of the event, class and message of the error
--   head     token:6 status:1 delay_ms:6 run_ms:6 size:4 replaces:1; status u: record nothing, write the event
-- returns:   a letter per step: r recorded, k known, l lease lost
-- events:    recorded
-- steps:     the steps of a job.
-- arguments: id, then names (none: all steps)
-- returns:   name and record of each; with names, name, record and large result ('' for none)
-- reset_step: forgets a step of a job that is not active.
-- arguments: id, name, data of the event
-- returns:   r reset, a active, u no such step, - not found
-- events:    changed

local EACH = 8
local HEAD = '>I6c1I6I6I4B'

-- Read what is stored of the steps, before the first write.
local function read_known(steps)
  local known = {}
  for i = 1, #steps do
    local step = steps[i]
    if step.job then
      step.place = step.job.id .. '\0' .. step.name
      known[step.place] = call('HGET', Steps.key(step.job.id), step.name) or nil
    end
  end
  return known
end

local function write(step, known, body, large)
  local id, stored = step.job.id, known[step.place]
  local number = stored and sub(stored, 2, 7) or pack('>I6', draw())
  local until_ms = step.delay_ms > 0 and Q.now + step.delay_ms or 0
  known[step.place] = step.status .. number .. pack('>I6I6', Q.now, until_ms) .. body
  call('HSET', Steps.key(id), step.name, known[step.place])
  if large ~= '' then
    call('HSET', Steps.results_key(id), step.name, large)
  elseif stored and Steps.is_final(stored) then
    call('HDEL', Steps.results_key(id), step.name)
  end
  Steps.mark(step.job)
end

local function note(step, args)
  local job, at = step.job, step.at
  local group, row = emit('recorded', job)
  put(group, row, 'tok', job.token)
  put(group, row, 'w', job.worker)
  put(group, row, 'ms', step.run_ms)
  put(group, row, 'size', step.size)
  put(group, row, 'data', args[at + 5])
  if args[at + 6] ~= '' then
    put(group, row, 'et', args[at + 6])
    put(group, row, 'em', args[at + 7])
  end
end

local function answer_of(step, stored)
  if step.status == 'u' then return stored and 'r' or 'k' end
  return stored and Steps.is_final(stored) and not step.replaces and 'k' or 'r'
end

local function extend(steps, lease_ms)
  local deadlines, at = {}, 0
  for i = 1, #steps do
    if steps[i].job then
      deadlines[at + 1], deadlines[at + 2], at = digits(Q.now + lease_ms), steps[i].job.id, at + 2
    end
  end
  for first = 1, at, CHUNK do call('ZADD', K.active, 'GT', spread(deadlines, first, min(first + CHUNK - 1, at))) end
end

register('record_steps', function(keys, args)
  open(keys, Parts.HOT)
  local memo = remembered(args[1], args[2], args[3])
  if memo then return memo end
  local lease_ms, steps, ids, letters = tonumber(args[4]), {}, {}, {}
  for at = 5, #args, EACH do
    local token, status, delay_ms, run_ms, size, replaces = unpack(HEAD, args[at + 1])
    ids[#ids + 1] = args[at]
    steps[#ids] = {
      at = at, token = token, status = status, delay_ms = delay_ms, run_ms = run_ms, size = size, name = args[at + 2],
      replaces = replaces == 1,
    }
  end
  load(ids)
  for i = 1, #steps do
    local job = job_for(ids[i])
    if job and job.state == 'a' and job.token == steps[i].token then steps[i].job = job end
  end
  local known = read_known(steps)
  for i = 1, #steps do
    local step = steps[i]
    letters[i] = step.job and answer_of(step, known[step.place]) or 'l'
    if letters[i] == 'r' then
      if step.status ~= 'u' then write(step, known, args[step.at + 3], args[step.at + 4]) end
      note(step, args)
    end
  end
  if lease_ms > 0 then extend(steps, lease_ms) end
  local reply = table.concat(letters)
  remember(args[1], args[2], reply)
  close()
  return reply
end)

register('steps', function(keys, args)
  open(keys)
  local id = args[1]
  if #args == 1 then return call('HGETALL', Steps.key(id)) end
  local rows = {}
  for i = 2, #args do
    local stored = call('HGET', Steps.key(id), args[i])
    if stored then
      rows[#rows + 1], rows[#rows + 2] = args[i], stored
      rows[#rows + 1] = call('HGET', Steps.results_key(id), args[i]) or ''
    end
  end
  return rows
end, READS)

local function reset(job, name, data)
  if not job then return '-' end
  if job.state == 'a' then return 'a' end
  if call('HDEL', Steps.key(job.id), name) == 0 then return 'u' end
  call('HDEL', Steps.results_key(job.id), name)
  local group, row = emit('changed', job)
  put(group, row, 'data', data)
  return 'r'
end

register('reset_step', function(keys, args)
  open(keys)
  load({ args[1] })
  local letter = reset(job_for(args[1]), args[2], args[3])
  close()
  return letter
end)
