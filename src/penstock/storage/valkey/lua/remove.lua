-- remove: deletes records of jobs that are not active.
-- arguments: ids
-- returns:   a letter per id: r removed, a active, - not found; in a list of one if the outbox is not empty
-- remove_unchanged: the same for finished jobs that have not changed since the caller read them.
-- arguments: consumer, then id, incarnation, finished_at of each
-- returns:   a letter per id: r removed, c changed, h held by another consumer, - not found; in a list of one if the outbox
--   is not empty
-- drain:     the same for jobs that their group blocks, waiting jobs, and optionally scheduled ones, a step at a time.
-- arguments: limit, then seq, now, part, score, member of the last step ('' at first), then with scheduled
-- clean:     the same for finished jobs.
-- arguments: limit, then seq, now, part (always given), score, member, then older_than_ms
-- returns:   {1 if the outbox is not empty, done, seq, now, part, score, member}: part is '' at the end
-- events:    removed

register('remove', function(keys, ids)
  open(keys)
  load(ids)
  local letters = {}
  for i = 1, #ids do
    local job = job_for(ids[i])
    if not job or job.state == 'a' then
      letters[i] = job and 'a' or '-'
    else
      delete(job)
      letters[i] = 'r'
    end
  end
  close()
  return Outbox.answer(table.concat(letters))
end)

local function removal(job, inc, finished, consumer)
  if not job then return '-' end
  if not ENDED[job.state] or job.inc ~= inc or job.finished ~= finished then return 'c' end
  if Holds.is_held(job, consumer) then return 'h' end
  delete(job)
  return 'r'
end

register('remove_unchanged', function(keys, args)
  open(keys)
  local ids, letters = {}, {}
  for i = 2, #args, 3 do ids[#ids + 1] = args[i] end
  load(ids)
  for i = 1, #ids do
    local inc, finished = tonumber(args[3 * i]), tonumber(args[3 * i + 1])
    letters[i] = removal(job_for(ids[i]), inc, finished, args[1])
  end
  close()
  return Outbox.answer(table.concat(letters))
end)

local function delete_those(jobs, is_meant)
  local done = 0
  for i = 1, #jobs do
    if is_meant(jobs[i]) then
      delete(jobs[i])
      done = done + 1
    end
  end
  return done
end

register('drain', function(keys, args)
  open(keys)
  local seq, now = bound_of(args[2], args[3])
  local part, score, member = args[4] ~= '' and args[4] or 'blocked', args[5], args[6]
  local left, done, place = tonumber(args[1]), 0, {}
  while left > 0 and part ~= '' do
    local jobs, looked_at
    jobs, place, looked_at = step(part, score, member, left)
    done = done + delete_those(jobs, function(job)
      return job.inc <= seq and (job.state ~= 'b' or job.by == 'g')
    end)
    left = left - looked_at
    if place[1] then break end
    -- Blocked members go first, because removing a waiting one would admit the next member of its group.
    part, score, member = part == 'blocked' and 'waiting' or part == 'waiting' and args[7] == '1' and 'scheduled' or '',
      '', ''
  end
  close()
  return bulk_reply(done, seq, now, part, place)
end)

register('clean', function(keys, args)
  open(keys)
  local seq, now = bound_of(args[2], args[3])
  local jobs, place = step(args[4], args[5], args[6], tonumber(args[1]))
  local ended_by = now - tonumber(args[7])
  local done = delete_those(jobs, function(job)
    return job.finished <= ended_by and job.inc <= seq and not Holds.is_held(job)
  end)
  close()
  return bulk_reply(done, seq, now, place[1] and args[4] or '', place)
end)
