-- pause, resume: set or clear the flag that claim looks at; resume wakes.
-- arguments: none
-- returns:   1
-- events:    paused, resumed, if the flag changed

local function set_paused(paused, kind)
  if Q.paused ~= paused then
    Q.paused = paused
    emit_queue(kind)
  end
  Q.wake = not paused
  close()
  return 1
end

register('pause', function(keys)
  open(keys)
  return set_paused(true, 'paused')
end)

register('resume', function(keys)
  open(keys)
  return set_paused(false, 'resumed')
end)
