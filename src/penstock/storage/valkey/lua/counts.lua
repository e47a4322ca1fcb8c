-- counts: the number of jobs by state.
-- arguments: none
-- returns:   {scheduled, waiting, blocked, active, completed, failed, cancelled, paused, oldest_waiting_ms, due,
--   next_ms (-1: none), staged}
-- leases_of: the leases that a worker holds.
-- arguments: worker
-- returns:   {id, token, id, token ...}
-- workers:   {now, worker, seen_at .. info ...}
-- metrics:   {now, the current minute, minutes before it (metrics.lua) ...}
-- clock:     {now, the wall clock}

local function next_ms()
  local first
  for _, part in ipairs({ 'scheduled', 'parked', 'suspended' }) do
    local at = tonumber(call('ZRANGE', K[part], 0, 0, 'WITHSCORES')[2])
    if at and at < STAGED_FROM and (not first or at < first) then first = at end
  end
  return first and max(0, first - Q.now) or -1
end

register('counts', function(keys)
  open(keys)
  local reply = {}
  for i, part in ipairs({ 'scheduled', 'waiting', 'blocked', 'active', 'completed', 'failed', 'cancelled' }) do
    reply[i] = part == 'waiting' and waiting_count() or call('ZCARD', K[part])
  end
  local first, oldest = members_after('waiting', '', '', 1, false)[1], 0
  if first then
    local id = sub(first, 9)
    load({ id })
    if job_for(id) then oldest = max(0, Q.now - J[id].ready_at) end
  end
  local due = call('ZCOUNT', K.scheduled, '-inf', digits(Q.now))
  if due > 0 then oldest = max(oldest, Q.now - tonumber(call('ZRANGE', K.scheduled, 0, 0, 'WITHSCORES')[2])) end
  local staged = call('ZCOUNT', K.scheduled, digits(STAGED_FROM), '+inf')
  reply[1] = reply[1] - staged
  reply[8], reply[9], reply[10], reply[11], reply[12] = Q.paused and 1 or 0, oldest, due, next_ms(), staged
  return reply
end, READS)

register('leases_of', function(keys, args)
  open(keys)
  local ids, reply = call('ZRANGE', K.active, 0, -1), {}
  local states = read_many('HMGET', K.state, ids)
  for i = 1, #ids do
    local job = states[i] and job_of(ids[i], states[i])
    if job and job.state == 'a' and job.worker == args[1] then
      reply[#reply + 1] = ids[i]
      reply[#reply + 1] = job.token
    end
  end
  return reply
end, READS)

register('workers', function(keys)
  open(keys)
  return { Q.now, call('HGETALL', K.workers) }
end, READS)

register('metrics', function(keys)
  open(keys)
  return { Q.now, Q.minute, call('HVALS', K.metrics) }
end, READS)

register('clock', function(keys)
  open(keys)
  return { Q.now, Clock.wall() }
end, READS)
