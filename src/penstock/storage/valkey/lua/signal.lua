-- signal: resumes a job that waits for it, or keeps it for later.
-- arguments: stream, number, repeated, id, name, data
-- returns:   r resumed, k kept, f full, e ended, - not found
-- events:    signalled

local function signal(job, name, data)
  if not job or is_over(job) then return '-' end
  if ENDED[job.state] then return 'e' end
  local letter = Signals.signal(job, name, data)
  if letter ~= 'f' then
    local group, row = emit('signalled', job)
    put(group, row, 'data', '{"signal":"' .. name .. '"}')
  end
  return letter
end

register('signal', function(keys, args)
  open(keys)
  local kept = remembered(args[1], args[2], args[3])
  if kept then return kept end
  load({ args[4] }, true)
  local letter = signal(job_for(args[4]), args[5], args[6])
  remember(args[1], args[2], letter)
  close()
  return letter
end, REFUSED_WHEN_FULL)
