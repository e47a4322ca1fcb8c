-- obliterate: deletes all jobs. Counters, log, epoch, pause flag and settings stay.
-- arguments: force
-- returns:   how many there were; in a list of one if the outbox is not empty
-- refuses:   ACTIVE with their number, if jobs are active, without force
-- events:    obliterated

local PARTS = {
  'jobs', 'state', 'line', 'waiting', 'scheduled', 'blocked', 'active', 'completed', 'failed', 'cancelled', 'expiring',
  'results', 'failures', 'progress', 'logged', 'rerun', 'waiters', 'wake', 'options', 'annex', 'suspended', 'received',
  'signalled', 'stepped', 'errors', 'dedup', 'dedup_times', 'holders', 'held_completed', 'held_failed', 'held_cancelled',
  'parents', 'linked', 'damaged', 'damaged_at', 'instants', 'unkept',
}

local AT_ONCE = 1000

-- Remove members, starts and charges. Pauses of groups stay, for a time or not.
local function obliterate_groups()
  local stored = call('HGETALL', K.groups)
  for _, part in ipairs({ 'groups', 'group_keys', 'parked', 'fading' }) do call('UNLINK', K[part]) end
  for i = 1, #stored, 2 do
    local key, group = stored[i], Groups.new(stored[i])
    call('UNLINK', Q.prefix .. ':group:' .. key, Q.prefix .. ':starts:' .. key)
    local _, _, _, _, _, parked, paused = unpack(Groups.FORMAT, stored[i + 1])
    group.parked, group.paused, group.limit = parked, paused == 1, Groups.limit_of(key)
    Q.grouped[key] = group
    Groups.refill(group)
    if paused == 1 or parked > Q.now then Groups.touch(group) end
  end
end

-- Notify all waiters: those of open jobs (finished ones have none), and those of rerun slots.
local function tell_all()
  local ids, slots = call('HKEYS', K.waiters), call('HGETALL', K.rerun)
  for i = 1, #slots, 2 do
    for _, listener in ipairs(decode(slots[i + 1]).listeners) do add_waiter(slots[i], listener) end
    ids[#ids + 1] = slots[i]
  end
  load(ids)
  for i = 1, #ids do
    if J[ids[i]] then tell(J[ids[i]], 'x') end
  end
end

-- Notify dependents in other queues; those in this one are deleted as well.
local function tell_dependents()
  if not call('HGET', K.meta, 'tied') then return end
  local ids, here = call('HKEYS', K.jobs), Outbox.here()
  for first = 1, #ids, AT_ONCE do
    local chunk = {}
    for i = first, min(first + AT_ONCE - 1, #ids) do chunk[#chunk + 1] = ids[i] end
    load(chunk)
    for i = 1, #chunk do
      local job = job_for(chunk[i])
      if job and job.has_links and job.state ~= 'c' then Flows.tell(job, 'r', here) end
    end
    forget_buffers()
  end
  call('HDEL', K.meta, 'tied')
end

register('obliterate', function(keys, args)
  open(keys, 'any')
  if Q.is_new and Parts.any_exists() then
    call('UNLINK', K.events)
    Q.seq = Q.now -- the counters are lost: in milliseconds, the clock is above every earlier token
  end
  local active = args[1] == '1' and 0 or call('ZCARD', K.active)
  if active > 0 then refuse('ACTIVE', digits(active)) end
  local count = call('HLEN', K.jobs)
  tell_all()
  tell_dependents()
  send_news()
  for _, id in ipairs(call('SMEMBERS', K.logged)) do call('UNLINK', Q.prefix .. ':log:' .. id) end
  for _, id in ipairs(call('SMEMBERS', K.signalled)) do call('UNLINK', Q.prefix .. ':signals:' .. id) end
  for _, id in ipairs(call('SMEMBERS', K.stepped)) do call('UNLINK', Steps.key(id), Steps.results_key(id)) end
  for _, consumer in ipairs(call('HKEYS', K.holders)) do call('UNLINK', K['held:' .. consumer]) end
  for _, class in ipairs(call('HKEYS', K.errors)) do call('UNLINK', K['error:' .. class]) end
  for _, id in ipairs(call('SMEMBERS', K.parents)) do call('UNLINK', Q.prefix .. ':deps:' .. id) end
  for _, id in ipairs(call('SMEMBERS', K.linked)) do call('UNLINK', Q.prefix .. ':dependents:' .. id) end
  for _, part in ipairs(PARTS) do call('UNLINK', K[part]) end
  obliterate_groups()
  Q.waiters, Q.stale, Q.listening_changed = 0, 0, {}
  Schedulers.forget_jobs()
  emit_queue('obliterated', 'size', count)
  close()
  return Outbox.answer(count)
end)
