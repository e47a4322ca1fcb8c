-- cancel: ends pending jobs, asks active ones to stop.
-- arguments: ids
-- returns:   a letter per id: x cancelled, r requested, c completed, f failed, a already cancelled, - not found; in a list of
--   one if the outbox is not empty
-- events:    cancelled, cancelling
-- cancel_rerun: drops the reruns that wait behind active jobs.
-- arguments: ids
-- returns:   a letter per id: d dropped, n no rerun, - not found
-- events:    changed

local ANSWERS = { c = 'c', f = 'f', x = 'a' }

local function cancel(job)
  if not job then return '-' end
  if ANSWERS[job.state] then return ANSWERS[job.state] end
  if job.state ~= 'a' then
    if is_staged(job) then job.run_at = Q.now end -- a retry must not stage it again
    finish(job, 'x', 'cancelled')
    return 'x'
  end
  give_up_slot(job)
  if not job.cancelling then
    job.cancelling = true
    emit('cancelling', job)
  end
  changed(job)
  return 'r'
end

local function cancel_rerun(job)
  if not job then return '-' end
  if not job.rerun then return 'n' end
  give_up_slot(job)
  changed(job)
  emit('changed', job)
  return 'd'
end

register('cancel', function(keys, ids)
  open(keys)
  load(ids)
  local letters = {}
  for i = 1, #ids do letters[i] = cancel(job_for(ids[i])) end
  close()
  return Outbox.answer(table.concat(letters))
end)

register('cancel_rerun', function(keys, ids)
  open(keys)
  load(ids)
  local letters = {}
  for i = 1, #ids do letters[i] = cancel_rerun(job_for(ids[i])) end
  close()
  return table.concat(letters)
end)
