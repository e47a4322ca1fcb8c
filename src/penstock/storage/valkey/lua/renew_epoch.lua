-- renew_epoch: a new epoch if the counters are behind what the caller has seen: the store went back in time. seq goes
--   on from there, so that no token comes back, and only the first caller who notices changes the epoch. Also makes a
--   queue that nobody has written to, so that it has an epoch.
-- arguments: seq, events (the highest the caller has seen)
-- returns:   the epoch
-- shift_clock: moves the queue's clock forward, for tests.
-- arguments: ms, '1' if the queue is not told: then its clock jumps
-- returns:   the clock
-- events:    none

register('renew_epoch', function(keys, args)
  open(keys)
  local seq, events = tonumber(args[1]), tonumber(args[2])
  if not Q.is_new and (Q.seq < seq or Q.events < events) then call('HSET', K.meta, 'epoch', new_epoch()) end
  Q.seq = max(Q.seq, seq)
  close()
  return call('HGET', K.meta, 'epoch')
end)

register('shift_clock', function(keys, args)
  open(keys)
  local ms, c = tonumber(args[1]), Clock.record()
  Q.shift, c.moved, c.changed = Q.shift + ms, c.moved + ms, true
  if args[2] ~= '1' then Q.now = Q.now + ms end
  close()
  return Q.now
end)
