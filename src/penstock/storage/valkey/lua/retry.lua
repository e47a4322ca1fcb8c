-- retry: failed and cancelled jobs wait again.
-- arguments: ids
-- returns:   a letter per id: r retried, n not failed, - not found; as a list of one if the outbox is not empty
-- retry_all: the same for failed jobs, a step at a time.
-- arguments: limit, then seq, now, part, score, member of the last step ('' at first)
-- returns:   {done, seq, now, part, score, member}: part is '' at the end
-- events:    retried

local function retry(job)
  need_static(job)
  drop_outcome(job)
  job.failures, job.stalls, job.finished, job.token, job.settled = 0, 0, 0, 0, '-'
  job.cancelling = false
  job.expires = job.ttl > 0 and Q.now + job.ttl or 0
  local is_parent = Flows.is_parent(job)
  if is_parent then Flows.look_again(job) end
  enter_waiting(job)
  emit('retried', job)
  if is_parent then Flows.conclude(job) end
end

register('retry', function(keys, ids)
  open(keys)
  load(ids, true)
  local letters = {}
  for i = 1, #ids do
    local job = found(ids[i])
    if not job then
      letters[i] = '-'
    elseif job.state == 'f' or job.state == 'x' then
      retry(job)
      letters[i] = 'r'
    else
      letters[i] = 'n'
    end
  end
  close()
  return Outbox.told(table.concat(letters))
end)

register('retry_all', function(keys, args)
  open(keys)
  local seq, now = bound_of(args[2], args[3])
  local jobs, place = step('failed', args[5], args[6], tonumber(args[1]), true)
  local done = 0
  for i = 1, #jobs do
    local job = jobs[i]
    if job.token <= seq and job.inc <= seq and job.finished <= now then
      retry(job)
      done = done + 1
    end
  end
  close()
  return bulk_reply(done, seq, now, place[1] and 'failed' or '', place)
end)
