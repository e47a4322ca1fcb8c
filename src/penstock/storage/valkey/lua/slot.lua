-- Queueing afresh, updating, the rerun slot, and the end of a job. They belong together: an end may queue a job afresh.
--
-- A dispatch is a table: payload (nil: keep), header, priority, lifo, ttl (header nil: keep all four), run_at, wall_at (the
-- instant of the wall clock that run_at stands for; nil: none), rule (of run_at: always, never, if_earlier, if_later),
-- reset, run_id, write_id, listeners. The rerun hash stores it packed.

-- Begin a new life of the id. The caller has set job.body, or the fields it is made of.
local function queue_afresh(job, run_at, size)
  drop_side_values(job)
  job.inc, job.enq, job.gone, job.extras, job.group_key, job.slot_hold = draw(), Q.now, false, nil, nil, nil
  pristine(job)
  job.is_afresh = true
  Holds.notice(job)
  rewritten(job)
  changed(job) -- with a state record, so in the zset: the line is for jobs in the order of their numbers
  job.run_at = run_at
  if not (job.has_links and Flows.maybe_block(job)) then
    if run_at > Q.now then
      job.state = 's'
      if run_at >= STAGED_FROM then job.expires = 0 end
    elseif job.has_links then
      maybe_block(job)
    end
  end
  local group, row = emit('enqueued', job)
  put(group, row, 'pri', job.priority)
  put(group, row, 'size', size)
end

-- Update a pending job with the fields of a dispatch. From now on it belongs to that dispatch's run and write.
local function update(job, dispatch)
  local now = Q.now
  need_static(job)
  job.run_id, job.write_id = dispatch.run_id, dispatch.write_id
  rewritten(job)
  if dispatch.payload then job.payload = dispatch.payload end
  if dispatch.header then
    job.header, job.priority, job.lifo, job.ttl = dispatch.header, dispatch.priority, dispatch.lifo, dispatch.ttl
    job.expires = job.ttl > 0 and now + job.ttl or 0
    if job.group_role then Groups.reposition(job) end
  end
  if dispatch.reset then job.failures, job.stalls = 0, 0 end
  local rule, new, old = dispatch.rule, dispatch.run_at, job.run_at
  local is_taken = rule == 'always' or (rule == 'if_earlier' and new < old) or (rule == 'if_later' and new > old)
  if is_taken and (job.state ~= 'b' or job.by == 'h') then
    job.run_at, job.wall_at, job.wall_run_at = new, dispatch.wall_at, new
    if job.state == 'b' then
      -- It stays blocked; its time counts when its children have ended.
    elseif new > now then
      schedule(job, new)
    elseif job.state == 's' then
      enter_waiting(job)
    end
  end
  changed(job)
end

-- Merge a second dispatch into the first, by its own flags. The rule goes with the time, but an always stays.
local function merge(slot, dispatch)
  if dispatch.payload then slot.payload = dispatch.payload end
  if dispatch.header then
    slot.header, slot.priority, slot.lifo, slot.ttl = dispatch.header, dispatch.priority, dispatch.lifo, dispatch.ttl
  end
  local rule, new, old = dispatch.rule, dispatch.run_at, slot.run_at
  if rule == 'always' or (rule == 'if_earlier' and new < old) or (rule == 'if_later' and new > old) then
    slot.run_at, slot.wall_at, slot.rule = new, dispatch.wall_at, slot.rule == 'always' and 'always' or rule
  end
  slot.reset = slot.reset or dispatch.reset
  slot.run_id, slot.write_id = dispatch.run_id, dispatch.write_id
  for i = 1, #dispatch.listeners do slot.listeners[#slot.listeners + 1] = dispatch.listeners[i] end
end

local function slot_of(job)
  if job.rerun and not job.slot then
    local slot = decode(call('HGET', K.rerun, job.id))
    if slot.wall_at then slot.run_at = Clock.when(slot.wall_at) end
    job.slot = slot
  end
  return job.slot
end

local function set_slot(job, dispatch)
  local slot = slot_of(job)
  if slot then merge(slot, dispatch) else job.slot = dispatch end
  job.rerun, job.save_slot = true, true
  changed(job)
end

local function drop_slot(job)
  if job.rerun then hdel('rerun', job.id) end
  job.rerun, job.slot, job.save_slot = false, nil, false
end

local function add_waiters(job, listeners)
  for i = 1, #listeners do add_waiter(job.id, listeners[i]) end
end

-- Drop the rerun. Its listeners wait for the job itself.
local function give_up_slot(job)
  local slot = slot_of(job)
  if slot then
    drop_slot(job)
    add_waiters(job, slot.listeners)
  end
end

-- Apply the rerun slot as an update to a job that was put back.
local function absorb_slot(job)
  local slot = slot_of(job)
  if not slot then return end
  drop_slot(job)
  update(job, slot)
  add_waiters(job, slot.listeners)
end

-- Reset the extras for a later life of the id: keep what the user set, drop what happened.
local function reset_extras(job)
  local extras, new_extras = extras_of(job), {}
  Signals.drop(job)
  Steps.drop(job)
  new_extras.group, new_extras.cost, new_extras.headers = extras.group, extras.cost, extras.headers
  new_extras.holds = extras.holds
  job.extras, job.packed_extras = new_extras, next(new_extras) and encode(new_extras) or nil
  job.has_links = extras.group ~= nil or extras.cost ~= nil or extras.holds ~= nil
end

local function requeue(job, slot)
  need_static(job)
  job.payload = slot.payload or payload_of(job)
  if slot.header then
    job.header, job.priority, job.lifo, job.ttl = slot.header, slot.priority, slot.lifo, slot.ttl
  end
  job.run_id, job.write_id = slot.run_id, slot.write_id
  if job.has_links then
    if job.state == 'f' then Flows.tell(job, 'r') end
    Flows.drop_links(job)
  end
  reset_extras(job)
  local token, settled = job.token, job.settled
  queue_afresh(job, slot.run_at, #job.payload)
  job.wall_at, job.wall_run_at = slot.wall_at, slot.run_at
  job.token, job.settled = token, settled
  add_waiters(job, slot.listeners)
end

-- Delete the record. No dependent waits any longer for the retry of a job that did not complete.
local function forget(job)
  if job.has_links and job.state ~= 'c' then Flows.tell(job, 'r') end
  gone(job)
end

-- End the job as state ('c', 'f' or 'x'). Emits the event before that of a requeue. settling: under its token, so that a
-- repeated settle is recognised.
local function finish(job, state, kind, settling)
  job.state, job.finished, job.worker = state, Q.now, ''
  if settling then job.settled = state end
  local group, row = emit(kind, job)
  changed(job)
  if state == 'x' then give_up_slot(job) end
  tell(job, state)
  if state == 'f' and Q.uses >= 128 then Outbox.bury(job) end
  if job.has_links then ended(job) end
  local slot = slot_of(job)
  if slot then
    drop_slot(job)
    requeue(job, slot)
  elseif kept_until(job) <= Q.now then
    forget(job)
  end
  return group, row
end

local function expire(job, settling)
  set_failure(job, failure_of('Expired', FAILURE_TEXTS.Expired))
  local group, row = finish(job, 'f', 'expired', settling)
  put(group, row, 'et', 'Expired')
  put(group, row, 'em', FAILURE_TEXTS.Expired)
  return group, row
end

local function delete(job)
  if not ENDED[job.state] then tell(job, 'x') end
  emit('removed', job, '')
  if ENDED[job.state] then return forget(job) end
  if job.has_links then ended(job, 'r') end
  gone(job)
end
