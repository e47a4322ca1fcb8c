-- pause, resume: set or clear the flag that claim looks at, of the queue or of a group; resume wakes.
-- arguments: group ('': the queue)
-- returns:   1
-- events:    paused, resumed, if the flag changed; unblocked

local function set_group_paused(key, paused, kind)
  local group = Groups.of(key)
  if group.paused ~= paused then
    group.paused = paused
    emit_queue(kind, 'grp', key)
    Groups.use(2)
    Groups.touch(group)
  end
  close()
  return 1
end

local function set_paused(paused, kind)
  if Q.paused ~= paused then
    Q.paused = paused
    emit_queue(kind)
  end
  Q.wake = not paused
  close()
  return 1
end

register('pause', function(keys, args)
  open(keys)
  if args[1] ~= '' then return set_group_paused(args[1], true, 'paused') end
  return set_paused(true, 'paused')
end)

register('resume', function(keys, args)
  open(keys)
  if args[1] ~= '' then return set_group_paused(args[1], false, 'resumed') end
  return set_paused(false, 'resumed')
end)
