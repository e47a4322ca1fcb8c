-- retry: lets failed and cancelled jobs wait again.
-- arguments: ids
-- returns:   a letter per id: r retried, n not failed, - not found; in a list of one if the outbox is not empty
-- retry_all: the same for failed jobs, a step at a time.
-- arguments: limit, then seq, now, part, score, member of the last step ('' at first)
-- returns:   {1 if the outbox is not empty, done, seq, now, part, score, member}: part is '' at the end
-- events:    retried

local function retry(job)
  need_static(job)
  drop_outcome(job)
  Steps.forgive(job)
  job.failures, job.stalls, job.finished, job.token, job.settled = 0, 0, 0, 0, '-'
  job.cancelling = false
  job.expires = job.ttl > 0 and Q.now + job.ttl or 0
  local is_parent = Flows.is_parent(job)
  if is_parent then Flows.wait_again(job) end
  enter_waiting(job)
  emit('retried', job)
  if is_parent then Flows.conclude(job) end
end

-- Retry the job, and before it those of its dependencies in this queue that is_wanted accepts: retried later, they would
-- already have failed the job again. Return the ids. The stack is a table, because a chain may be long.
local function retry_in_order(job, is_wanted)
  local stack, opened, retried, ids = { job }, {}, {}, {}
  while stack[1] do
    local top = stack[#stack]
    if opened[top.id] or not Flows.is_parent(top) then
      stack[#stack] = nil
      if not retried[top.id] and is_wanted(top) then
        retry(top)
        retried[top.id], ids[#ids + 1] = true, top.id
      end
    else
      opened[top.id] = true
      local dependencies = Flows.ids_to_wait_for_again(top)
      load(dependencies, true)
      for i = #dependencies, 1, -1 do
        local dependency = job_for(dependencies[i])
        if dependency and not opened[dependency.id] and not retried[dependency.id] and is_wanted(dependency) then
          stack[#stack + 1] = dependency
        end
      end
    end
  end
  return ids
end

register('retry', function(keys, ids)
  open(keys)
  load(ids, true)
  local letters, to_come, ahead = {}, {}, {}
  for i = 1, #ids do to_come[ids[i]] = true end
  local function is_wanted(job)
    return to_come[job.id] and (job.state == 'f' or job.state == 'x')
  end
  for i = 1, #ids do
    local job = job_for(ids[i])
    if not job then
      letters[i] = '-'
    elseif ahead[job.id] then
      letters[i], ahead[job.id] = 'r', nil
    elseif job.state == 'f' or job.state == 'x' then
      to_come[job.id] = true
      local retried = retry_in_order(job, is_wanted)
      for j = 1, #retried do to_come[retried[j]], ahead[retried[j]] = nil, true end
      letters[i], ahead[job.id] = 'r', nil
    else
      letters[i] = 'n'
    end
  end
  close()
  return Outbox.answer(table.concat(letters))
end)

register('retry_all', function(keys, args)
  open(keys)
  local seq, now = bound_of(args[2], args[3])
  local jobs, place = step('failed', args[5], args[6], tonumber(args[1]), true)
  local function is_wanted(job)
    return job.state == 'f' and job.number <= seq and job.token <= seq and job.finished <= now
  end
  local done = 0
  for i = 1, #jobs do
    if is_wanted(jobs[i]) then done = done + #retry_in_order(jobs[i], is_wanted) end
  end
  close()
  return bulk_reply(done, seq, now, place[1] and 'failed' or '', place)
end)
