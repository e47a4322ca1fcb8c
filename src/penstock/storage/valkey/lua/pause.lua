-- pause, resume: set or clear the flag of the queue or of a group that stops claims; pause with a time parks it instead.
-- resume ends both, and wakes.
-- arguments: group ('': the queue), of pause: for how long in ms (0: until resumed)
-- returns:   1
-- events:    paused, resumed, if something changed; unblocked

local function set_group_paused(key, paused)
  local group = Groups.of(key)
  if group.paused == paused then return false end
  group.paused = paused
  Groups.use(2)
  Groups.touch(group)
  return true
end

local function set_paused(key, paused)
  if key ~= '' then return set_group_paused(key, paused) end
  local was = Q.paused
  Q.paused = paused
  return was ~= paused
end

local function pause_for(key, ms)
  if Groups.of(key).parked >= Q.now + ms then return end
  Groups.park(key, Q.now + ms)
  new_group('paused', { grp = key, data = '{"for_ms":' .. digits(ms) .. '}' }).n = 1
end

register('pause', function(keys, args)
  open(keys)
  local key, ms = args[1], tonumber(args[2])
  if ms > 0 then
    pause_for(key, ms)
  elseif set_paused(key, true) then
    emit_queue('paused', 'grp', key)
  end
  close()
  return 1
end)

register('resume', function(keys, args)
  open(keys)
  local key = args[1]
  local was_paused = set_paused(key, false)
  local was_parked = bit_of(Q.uses, key == '' and 1 or 2) and Groups.of(key).parked > Q.now
  if was_parked then Groups.park(key, 0) end
  if was_paused or was_parked then emit_queue('resumed', 'grp', key) end
  Q.wake = Q.wake or key == ''
  close()
  return 1
end)
