-- record_steps: records steps of running jobs and extends their leases.
-- arguments: stream, number, repeated, lease_ms (0: the leases stay as they are), then per step id, head, name, body, result
--   (if it is not in the body), data of the event, class and message of the error
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
local ACTIVE = 97 -- the letter a

-- Return what events of jobs with this tail of their state records share (settle.lua), and whether they have links.
local function tail_of(tails, tail)
  local flags, _, worker_length, header_length, run_id_length = unpack('>Bi6BHH', tail)
  local header_at = WORKER_AT - FLAGS_AT + 1 + worker_length
  local options = options_of(sub(tail, header_at, header_at + header_length - 1))
  local known = {
    has_links = bit_of(flags, 64),
    common = {
      task = options.task, ver = options.version, st = 'active',
      w = sub(tail, WORKER_AT - FLAGS_AT + 1, header_at - 1),
      rid = sub(tail, header_at + header_length, header_at + header_length + run_id_length - 1),
    },
  }
  tails[tail] = known
  return known
end

-- Read what is stored of a step: everything that can fail, before the first write.
local function read_stored(step, steps, large)
  local tail = sub(step.record, FLAGS_AT)
  step.tail, step.place = steps.tails[tail] or tail_of(steps.tails, tail), step.id .. '\0' .. step.name
  local stored = call('HGET', Steps.key(step.id), step.name) or nil
  steps.known[step.place] = stored
  if large ~= '' or stored and Steps.is_final(stored) then call('HLEN', Steps.results_key(step.id)) end
  if step.tail.has_links or not step.is_marked then
    load({ step.id })
    extras_of(job_for(step.id))
  end
end

-- Read the steps from the arguments, and what is stored of them and their jobs.
local function read_steps(args)
  local steps, ids = { tails = {}, known = {} }, {}
  for at = 5, #args, EACH do ids[#ids + 1] = args[at] end
  local records, marked = read_many('HMGET', K.state, ids), read_many('SMISMEMBER', K.stepped, ids)
  for i = 1, #ids do
    local at, record = 5 + EACH * (i - 1), records[i]
    local token, status, delay_ms, run_ms, size, replaces = unpack(HEAD, args[at + 1])
    local step = { id = ids[i], name = args[at + 2], at = at, status = status, delay_ms = delay_ms, run_ms = run_ms }
    if record and byte(record, 1) == ACTIVE and sub(record, 9, 14) == sub(args[at + 1], 1, 6) then
      step.record, step.token, step.size, step.replaces = record, token, size, replaces == 1
      step.is_marked = marked[i] == 1
      read_stored(step, steps, args[at + 4])
    end
    steps[i] = step
  end
  return steps
end

local function write(step, known, body, large)
  local id, stored = step.id, known[step.place]
  local number = stored and sub(stored, 2, 7) or pack('>I6', draw())
  local until_ms = step.delay_ms > 0 and Q.now + step.delay_ms or 0
  known[step.place] = step.status .. number .. pack('>I6I6', Q.now, until_ms) .. body
  call('HSET', Steps.key(id), step.name, known[step.place])
  if large ~= '' then
    call('HSET', Steps.results_key(id), step.name, large)
  elseif stored and Steps.is_final(stored) then
    call('HDEL', Steps.results_key(id), step.name)
  end
  if not step.is_marked then Steps.mark(job_for(id)) end
end

-- Begin the event of a step, without a table for its job unless that has links.
local function begin_event(step)
  local tail = step.tail
  if tail.has_links then
    local group, row = emit('recorded', job_for(step.id))
    put(group, row, 'w', tail.common.w)
    return group, row
  end
  local inc, enq, _, runs = unpack('>I6I6I6I4', step.record, 15)
  local group = group_for('recorded', tail.common)
  local row = begin_row(group, tail.common)
  put(group, row, 'id', step.id)
  put(group, row, 'inc', inc)
  put(group, row, 'enq', enq)
  put(group, row, 'run', runs)
  return group, row
end

local function note(step, args)
  local group, row = begin_event(step)
  put(group, row, 'tok', step.token)
  put(group, row, 'ms', step.run_ms)
  put(group, row, 'size', step.size)
  put(group, row, 'data', args[step.at + 5])
  if args[step.at + 6] ~= '' then
    group.has_holes = true
    put(group, row, 'et', args[step.at + 6])
    put(group, row, 'em', args[step.at + 7])
  end
end

local function answer_of(step, stored)
  if step.status == 'u' then return stored and 'r' or 'k' end
  return stored and Steps.is_final(stored) and not step.replaces and 'k' or 'r'
end

local function extend(steps, lease_ms)
  local deadlines, at, deadline = {}, 0, digits(Q.now + lease_ms)
  for i = 1, #steps do
    if steps[i].record then deadlines[at + 1], deadlines[at + 2], at = deadline, steps[i].id, at + 2 end
  end
  for first = 1, at, CHUNK do call('ZADD', K.active, 'GT', spread(deadlines, first, min(first + CHUNK - 1, at))) end
end

register('record_steps', function(keys, args)
  open(keys, Parts.HOT)
  local kept = remembered(args[1], args[2], args[3])
  if kept then return kept end
  Parts.check(Parts.RECORDED)
  local lease_ms, steps, letters = tonumber(args[4]), read_steps(args), {}
  for i = 1, #steps do
    local step = steps[i]
    letters[i] = step.record and answer_of(step, steps.known[step.place]) or 'l'
    if letters[i] == 'r' then
      if step.status ~= 'u' then write(step, steps.known, args[step.at + 3], args[step.at + 4]) end
      note(step, args)
    end
  end
  if lease_ms > 0 then extend(steps, lease_ms) end
  local reply = table.concat(letters)
  remember(args[1], args[2], reply)
  close()
  return reply
end)

-- Read a key of steps. A damaged one is refused, and the job stays: a caller could not tell that some steps are missing.
local function read(id, command, ...)
  local reply = redis.pcall(command, ...)
  if type(reply) == 'table' and reply.err then refuse('STEP', id) end
  return reply
end

register('steps', function(keys, args)
  open(keys)
  local id = args[1]
  if #args == 1 then return read(id, 'HGETALL', Steps.key(id)) end
  local rows = {}
  for i = 2, #args do
    local stored = read(id, 'HGET', Steps.key(id), args[i])
    if stored then
      rows[#rows + 1], rows[#rows + 2] = args[i], stored
      rows[#rows + 1] = read(id, 'HGET', Steps.results_key(id), args[i]) or ''
    end
  end
  return rows
end, READS)

local function reset(job, name, data)
  if not job then return '-' end
  if job.state == 'a' then return 'a' end
  if call('HEXISTS', Steps.key(job.id), name) == 0 then return 'u' end
  call('HLEN', Steps.results_key(job.id)) -- checks the type before the first write
  local group, row = emit('changed', job)
  put(group, row, 'data', data)
  call('HDEL', Steps.key(job.id), name)
  call('HDEL', Steps.results_key(job.id), name)
  return 'r'
end

register('reset_step', function(keys, args)
  open(keys)
  load({ args[1] })
  local letter = reset(job_for(args[1]), args[2], args[3])
  close()
  return letter
end)
