-- unstage: releases or removes staged jobs of a write, a step at a time.
-- arguments: limit, then seq, now, part, score, member of the last step ('' at first), then the write_id, its instant
--   (core/staging.py), discard
-- returns:   {done, seq, now, part, score, member}: part is '' at the end
-- events:    promoted, changed, removed

-- Release a staged job: its time begins now.
local function release(job)
  local delay = extras_of(job).staged_delay_ms or 0
  job.expires = job.ttl > 0 and Q.now + job.ttl or 0
  if delay > 0 then
    schedule(job, Q.now + delay)
    emit('changed', job)
  else
    job.run_at = Q.now
    enter_waiting(job, true)
    emit('promoted', job)
  end
end

register('unstage', function(keys, args)
  open(keys)
  local seq, now = bound_of(args[2], args[3])
  local at, done = tonumber(args[8]), 0
  local score, member = args[5] ~= '' and args[5] or args[8], args[6]
  local jobs, place = step('scheduled', score, member, tonumber(args[1]), true)
  for i = 1, #jobs do
    local job = jobs[i]
    if job.run_at == at and job.write_id == args[7] and job.inc <= seq then
      if args[9] == '1' then delete(job) else release(job) end
      done = done + 1
    end
  end
  close()
  if tonumber(place[1] or 0) ~= at then place = {} end
  return bulk_reply(done, seq, now, place[1] and 'scheduled' or '', place)
end)
