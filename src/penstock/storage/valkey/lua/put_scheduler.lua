-- put_scheduler: creates a scheduler, or changes the one of that name.
-- arguments: name, next, keep_next, limit, end, repeat_ms (-1: not after completion), spec
-- returns:   c created, u updated, s unchanged: the spec is the same
-- pause_scheduler, resume_scheduler, remove_scheduler
-- arguments: name; resume: and next ('': none)
-- returns:   1 if a scheduler has that name
-- move_slot: changes the next slot, if it still is the one that the caller knows.
-- arguments: name, slot, next
-- returns:   1 if it was
-- schedulers: {the clock, name, record (schedulers.lua) ...}
-- arguments: '1' and names, or nothing for all
-- events:    none

register('put_scheduler', function(keys, args)
  open(keys)
  local name, spec = args[1], args[7]
  local s = Schedulers.read(name)
  if s and s.spec == spec then return 's' end
  local answer = s and 'u' or 'c'
  if not s then s = { name = name, fired = 0, paused = false, last_id = '' } end
  if answer == 'c' or args[3] ~= '1' then s.next_ms, s.awaits = tonumber(args[2]), 0 end
  s.limit, s.end_ms, s.repeat_ms, s.spec = tonumber(args[4]), tonumber(args[5]), tonumber(args[6]), spec
  Schedulers.save(s)
  close()
  return answer
end, REFUSED_WHEN_FULL)

register('pause_scheduler', function(keys, args)
  open(keys)
  local s = Schedulers.read(args[1])
  if not s then return 0 end
  s.paused = true
  Schedulers.save(s)
  close()
  return 1
end)

register('resume_scheduler', function(keys, args)
  open(keys)
  local s = Schedulers.read(args[1])
  if not s then return 0 end
  s.paused = false
  if args[2] ~= '' and s.next_ms > 0 and s.next_ms <= Clock.wall() then s.next_ms = tonumber(args[2]) end
  Schedulers.save(s)
  close()
  return 1
end)

register('move_slot', function(keys, args)
  open(keys)
  local s = Schedulers.read(args[1])
  if not s or s.next_ms ~= tonumber(args[2]) then return 0 end
  s.next_ms = tonumber(args[3])
  Schedulers.save(s)
  close()
  return 1
end)

register('remove_scheduler', function(keys, args)
  open(keys)
  local removed = call('HDEL', K.schedulers, args[1])
  call('ZREM', K.slots, args[1])
  if bit_of(Q.uses, 8) and call('HLEN', K.schedulers) == 0 then Q.uses = Q.uses - 8 end
  close()
  return removed
end)

register('schedulers', function(keys, args)
  open(keys)
  if args[1] ~= '1' then return { Clock.wall(), call('HGETALL', K.schedulers) } end
  local names, reply = {}, {}
  for i = 2, #args do names[i - 1] = args[i] end
  local records = read_many('HMGET', K.schedulers, names)
  for i = 1, #names do
    if records[i] then
      local at = #reply
      reply[at + 1], reply[at + 2] = names[i], records[i]
    end
  end
  return { Clock.wall(), reply }
end, READS)
