-- promote: lets scheduled jobs wait from now on.
-- arguments: ids
-- returns:   a letter per id: p promoted, n not scheduled, - not found
-- events:    promoted

register('promote', function(keys, ids)
  open(keys)
  load(ids)
  local letters = {}
  for i = 1, #ids do
    local job = job_for(ids[i])
    if job and job.state == 's' and not is_staged(job) then
      enter_waiting(job)
      emit('promoted', job)
      letters[i] = 'p'
    else
      letters[i] = job and 'n' or '-'
    end
  end
  close()
  return table.concat(letters)
end)
