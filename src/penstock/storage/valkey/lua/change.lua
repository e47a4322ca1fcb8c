-- change: changes payload, priority, time or result ttl of one job; all of it, or nothing.
-- arguments: id, given (a letter per part: p y d r), payload, priority, delay_ms, header, new
--   reference (or header), new header: options with the new result ttl, which the client makes from the current header
-- returns:   c changed, w wrong state, - not found; h and the current header, if the client has another one
-- events:    changed

local function allowed(job, given)
  if given.d and (job.state ~= 'w' and job.state ~= 's' or is_staged(job)) then return false end
  if given.y and job.state == 'a' then return false end
  return not ((given.p or given.y) and ENDED[job.state])
end

local function apply(job, given, args)
  if given.p then
    job.payload = args[3]
    rewritten(job)
  end
  if given.y then
    job.priority = tonumber(args[4])
    if job.group_role then Groups.reposition(job) end
  end
  if given.d then
    local delay_ms = tonumber(args[5])
    if delay_ms > 0 then
      schedule(job, Q.now + delay_ms)
    elseif job.state == 's' then
      enter_waiting(job)
    end
  end
  if given.r then
    if byte(args[7], 1) == 0 then call('HSET', K.options, args[7], args[8]) end
    job.header = args[7]
    rewritten(job)
  end
  changed(job)
end

register('change', function(keys, args)
  open(keys)
  load({ args[1] }, true)
  local job, given = job_for(args[1]), {}
  for letter in string.gmatch(args[2], '%a') do given[letter] = true end
  if not job then return '-' end
  if not allowed(job, given) then return 'w' end
  local header = byte(job.header, 1) == 0 and call('HGET', K.options, job.header) or job.header
  if given.r and args[6] ~= header then return 'h' .. header end
  apply(job, given, args)
  emit('changed', job)
  close()
  return 'c'
end)
