-- renew_epoch: starts a new epoch if the counters are behind what the caller has seen: the store went back in time. seq
--   goes on from there, so that no token repeats, and only the first caller who notices changes the epoch. It also creates a
--   queue that was never written to, so that it has an epoch.
-- arguments: seq, events (the highest the caller has seen)
-- returns:   the epoch
-- recognise: notes that the queue is used on this server from now on. If it was another one, or an earlier run of this one,
--   numbers jump ahead, so that none repeats. The epoch changes if writes may have been lost: the caller saw more than there
--   is now, the server took over as a replica of the other one, or it began with a snapshot after the queue's last write.
-- arguments: run id of the server, its replication id, the one it had as a replica, how many ms ago it began with a
--   snapshot (-1: it did not), run id and replication id of the server that the caller knew the queue on ('': none),
--   seq, events (the highest the caller has seen)
-- returns:   1 if the epoch has changed, else 0
-- meta:      server  run id and replication id;  resumed  seq:6 events:6 at the time of the change: for callers that come
--   later
-- shift_clock: moves the queue's clock forward, for tests.
-- arguments: ms, '1' to let the clock jump without telling the queue
-- returns:   the clock
-- events:    none

register('renew_epoch', function(keys, args)
  open(keys)
  local seq, events = tonumber(args[1]), tonumber(args[2])
  local is_damaged = not Steps.is_text(call('HGET', K.meta, 'epoch') or '')
  if not Q.is_new and (Q.seq < seq or Q.events < events or is_damaged) then
    call('HSET', K.meta, 'epoch', new_epoch())
  end
  Q.seq = max(Q.seq, seq)
  close()
  return call('HGET', K.meta, 'epoch')
end)

-- Return whether a caller from another server saw more than existed when the queue came to this one.
local function saw_more(seq, events)
  local resumed = call('HGET', K.meta, 'resumed')
  if not resumed then return false end
  local last_seq, last_events = unpack('>I6I6', resumed)
  if seq <= last_seq and events <= last_events then return false end
  call('HSET', K.meta, 'resumed', pack('>I6I6', max(seq, last_seq), max(events, last_events)))
  return true
end

-- Return whether the server may lack the last writes of the one before. The time of the last event is known to the minute.
local function may_lack(before, earlier, began)
  if sub(before, 41) == earlier then return true end
  local last = Q.minute ~= '' and unpack('>I4', Q.minute) * BOUNDS.MINUTE_MS or 0
  return began >= 0 and Q.now - began >= last
end

register('recognise', function(keys, args)
  open(keys, Parts.HOT)
  local here, known, seq, events = args[1] .. args[2], args[5], tonumber(args[6]), tonumber(args[7])
  Q.server = here -- in all later calls too: new queues note it
  if Q.is_new then return 0 end
  local before = call('HGET', K.meta, 'server') or known
  if sub(before, 1, 40) == args[1] then
    if before ~= here then call('HSET', K.meta, 'server', here) end
    if known == '' or sub(known, 1, 40) == args[1] or not saw_more(seq, events) then return 0 end
    Q.is_renewed = true
  else
    call('HSET', K.meta, 'server', here, 'resumed', pack('>I6I6', Q.seq, Q.events))
    if before ~= '' then
      local lost = Q.seq < seq or Q.events < events
      Q.is_renewed = Q.is_renewed or lost or may_lack(before, args[3], tonumber(args[4]))
      Q.seq = max(Q.seq, seq) + Parts.JUMP
    end
  end
  close()
  return Q.is_renewed and 1 or 0
end)

register('shift_clock', function(keys, args)
  open(keys)
  local ms, c = tonumber(args[1]), Clock.record()
  Q.shift, c.moved, c.changed = Q.shift + ms, c.moved + ms, true
  if args[2] ~= '1' then Q.now = Q.now + ms end
  close()
  return Q.now
end)
