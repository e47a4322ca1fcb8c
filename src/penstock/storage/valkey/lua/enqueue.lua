-- enqueue: adds jobs, as if one after the other.
-- arguments: stream, number, repeated, specials, number of headers, reference and header of each, then id and body
--   (record.lua) of each job
--   specials: '' or MessagePack of a map: place -> {delay_ms, run_at_ms (-1: none), unchecked, notify, mode,
--   keep payload, rule of run_at, keep options, reset_counts, dedup key (false: none), its mode, its ttl_ms, after
--   (flows.lua; nil: none)}; or notify alone, if there is nothing else; or a number, an earlier place with the same special
-- returns:   {first incarnation, exceptions}: a job was queued as waiting, with the next incarnation, unless the
--   exceptions say otherwise: place, status letter and state letter, incarnation, result ('' if none), and so on. A
--   duplicate by its dedup key has the letter e, the state letter - if that job is gone, and {id, result} as its result.
--   A third value is 1 if the outbox is not empty
-- refuses:   COST, if a job costs more than its group's bucket holds; NOTFOUND with the id, if a dependency in this queue
--   does not exist; nothing is written then
-- events:    enqueued, changed, cancelled, failed, unblocked
-- fire:      adds the job of a scheduler's slot, and moves the scheduler to the next.
-- arguments: scheduler, slot, next (0: none), then as enqueue from specials on, with one job
-- returns:   {} if that slot is no longer the scheduler's next, or not due; else as enqueue
-- refuses:   as enqueue

local HEAD = 5
local NONE = {}

-- Return a special in full.
local function in_full(special)
  if type(special) == 'table' then return special end
  return { 0, -1, false, special or '', 'default', false, 'always', false, false }
end

local function answer(exceptions, place, status, job)
  need_result(job)
  local at = #exceptions
  exceptions[at + 1], exceptions[at + 2], exceptions[at + 3] = place, status .. job.state, job.inc
  exceptions[at + 4] = job.state == 'c' and (job.result or '') or ''
end

-- Add an answer to a new job that the reply must state: the one that was numbered last.
local function answer_queued(exceptions, place, waits)
  local at = #exceptions
  exceptions[at + 1], exceptions[at + 2], exceptions[at + 3] = place, waits and 'qw' or 'qb', Q.seq
  exceptions[at + 4] = ''
end

-- Add the answer to a duplicate by its dedup key: the record, and the record's job (nil: gone).
local function answer_elsewhere(exceptions, place, record, job)
  if job then need_result(job) end
  local at = #exceptions
  exceptions[at + 1], exceptions[at + 2], exceptions[at + 3] = place, 'e' .. (job and job.state or '-'), record.inc
  exceptions[at + 4] = { record.id, job and job.state == 'c' and job.result or '' }
end

-- Return the instant of the wall clock at which a job is due, if one is given.
function Clock.instant_of(special)
  local instant = special[2]
  return instant >= 0 and instant < STAGED_FROM and instant or nil
end

-- Return a dispatch, without the fields that the job keeps.
local function dispatch_of(incoming, special, run_at)
  local dispatch = {
    run_at = run_at, wall_at = Clock.instant_of(special), rule = special[7], reset = special[9], run_id = incoming.run_id,
    write_id = incoming.write_id,
    listeners = special[4] ~= '' and { special[4] } or {},
  }
  if not special[6] then dispatch.payload = payload_of(incoming) end
  if not special[8] then
    dispatch.header, dispatch.priority = incoming.header, incoming.priority
    dispatch.lifo, dispatch.ttl = incoming.lifo, incoming.ttl
  end
  return dispatch
end

-- End the links of an earlier life of the id.
local function replace(job)
  if job.state == 'f' or job.state == 'x' or is_staged(job) then Flows.tell(job, 'r') end
  Flows.drop_links(job)
end

local function put_in(id, incoming, special, run_at)
  local job = J[id]
  if not job then
    job = { id = id }
    J[id] = job
  elseif job.has_links then
    Holds.drop(job)
    replace(job)
  end
  local after = special[13]
  if job.group_role then Groups.leave(job) end -- an open job was replaced: the promise that the id is new was broken
  local may_conclude = after and Flows.depend(id, Shortcut.extras_of_packed(incoming.packed_extras).flow, after)
  job.header, job.priority, job.lifo, job.ttl = incoming.header, incoming.priority, incoming.lifo, incoming.ttl
  job.run_id, job.write_id, job.payload = incoming.run_id, incoming.write_id, payload_of(incoming)
  job.packed_extras, job.has_links = incoming.packed_extras, incoming.has_links
  queue_afresh(job, run_at, #job.payload)
  job.wall_at, job.wall_run_at = Clock.instant_of(special), run_at
  return job, may_conclude
end

local function redispatch(job, incoming, special, run_at)
  local dispatch = dispatch_of(incoming, special, run_at)
  if job.state == 'a' then
    set_slot(job, dispatch)
    emit('changed', job)
    return 'r'
  end
  update(job, dispatch)
  emit('changed', job)
  add_waiters(job, dispatch.listeners)
  return 'u'
end

-- Queue the job afresh, unless its dedup key makes it a duplicate of another.
local function admit(id, incoming, special, run_at)
  local key, mode = special[10], special[11]
  local record, earlier
  if key then record, earlier = Dedup.meet(id, key, mode) end
  if record then return 'e', earlier, record end
  local job, may_conclude = put_in(id, incoming, special, run_at)
  if key then Dedup.note(job, key, mode, special[12]) end
  if may_conclude then Flows.conclude(job) end
  return 'q', job
end

-- The job of a dispatch with links was not added: link the existing one.
local function link_existing(job, incoming)
  local extras = incoming.packed_extras and decode(incoming.packed_extras)
  if extras and extras.dependents then Flows.link_to(job, extras.dependents) end
end

-- Return whether the job's newest dispatch, which may wait in its slot, is of the same write.
local function repeats(job, incoming)
  return incoming.write_id ~= '' and incoming.write_id == (slot_of(job) or job).write_id
end

-- Add a listener to the dispatch that waits in the slot.
local function join_slot(job, listener)
  local listeners = slot_of(job).listeners
  listeners[#listeners + 1] = listener
  job.save_slot = true
  touch(job)
end

-- Enqueue one job with all the rules (verbs.md). Return the status letter: queued, duplicate, completed, updated, rerun; or
-- elsewhere, with the record of the dedup key.
local function enqueue_one(id, incoming, special)
  local job, mode, notify = job_for(id), special[5], special[4]
  if job then need_static(job) end -- it may have been loaded without, as a dependency in this call
  local run_at = special[2] >= 0 and Clock.when(special[2]) or Q.now + special[1]
  local status, record = 'q', nil
  if not job or is_over(job) or special[3] or (is_staged(job) and incoming.write_id ~= job.write_id) then
    status, job, record = admit(id, incoming, special, run_at)
  elseif repeats(job, incoming) then
    status = 'd'
    if job.rerun and notify ~= '' then
      join_slot(job, notify)
      notify = ''
    end
  elseif mode == 'absent' then
    status = 'd'
  elseif mode == 'redispatch' and not ENDED[job.state] then
    status = redispatch(job, incoming, special, run_at)
    notify = ''
  elseif mode == 'default' and not ENDED[job.state] then
    status = 'd'
  elseif mode == 'default' and job.state == 'c' then
    status = 'c'
  else
    status, job, record = admit(id, incoming, special, run_at)
  end
  if status ~= 'q' and job and incoming.has_links then link_existing(job, incoming) end
  if notify ~= '' and job and not ENDED[job.state] then add_waiter(job.id, notify) end
  return status, job, record
end

-- Enqueue a job of this queue for a flow. Return as enqueue_one(); or nothing if it was refused, after notifying its
-- dependents. Flows have no dedup keys. intake (nil: none): if the job is added that way, nothing is returned either.
function Flows.put(id, body, special, intake)
  load({ id }, true)
  local simple = intake and J[id] == false and type(special) ~= 'table' and Shortcut.extras_of_body(body)
  if simple then
    Flows.note_links(simple)
    Intake.put(intake, id, body, simple, special)
    return
  end
  local incoming = read_body({}, body)
  local extras = incoming.has_links and Shortcut.extras_of_packed(incoming.packed_extras)
  if extras then Flows.note_links(extras) end
  local refusal = extras and Groups.cost_refused(id, extras)
  if refusal then return Flows.tell_refused(id, extras, refusal) end
  special = in_full(special)
  special[10] = false
  return enqueue_one(id, incoming, special)
end

-- Store headers that the queue does not have yet, once each.
local function store_headers(args, count)
  local references, missing = {}, {}
  for i = 1, count do references[i] = args[HEAD + 2 * i - 1] end
  local known = read_many('HMGET', K.options, references)
  for i = 1, count do
    local header = args[HEAD + 2 * i]
    if not known[i] then
      missing[#missing + 1] = references[i]
      missing[#missing + 1] = header
    elseif known[i] ~= header then
      refuse('CLASH', 'two sets of options have the same hash; change any of them a little')
    end
  end
  if missing[1] then send('HSET', K.options, missing) end
end

-- Return whether some jobs have dependencies; refuse the call if those do not exist.
local function has_flows(ids, specials)
  local before, has_any = {}, false
  for place = 1, #ids do
    local special = specials[place]
    if type(special) == 'table' and special[13] then
      Flows.refuse_unknown(ids[place], special[13], before)
      has_any = true
    end
    before[ids[place]] = true
  end
  return has_any
end

-- Enqueue one job that is new and to run now: the same as Intake and close() do, without lists of one. Return false if it is
-- not that simple.
local function enqueue_alone(reference, header, id, body, notify)
  if byte(body, 1) ~= 0 or call('HEXISTS', K.jobs, id) == 1 then return false end
  if call('HGET', K.options, reference) ~= header then return false end
  local seq, now, options = draw(), Q.now, options_of(reference)
  local number, last = pack('>I6', seq), Q.events + 1
  call('RPUSH', K.line, number .. id)
  Metrics.add_one()
  call('HSET', K.jobs, id, number .. pack('>I6', now) .. body)
  call('XADD', K.events, digits(last) .. '-0', 'e', encode({ {
    t = 'enqueued', at = now, n = 1, id = id, inc = seq, enq = now, st = 'waiting', size = #body - 7,
    task = options.task ~= '' and options.task or nil, ver = options.version ~= '' and options.version or nil,
  } }))
  Q.events = last
  if notify then Q.waiters = Q.waiters + call('HSET', K.waiters, id, encode({ notify })) end
  wake_one()
  write_meta()
  return seq
end

-- Return the specials by place. Jobs with the same special share a table.
local function specials_of(packed)
  if packed == '' then return NONE end
  local specials = decode(packed)
  for place, special in pairs(specials) do
    if type(special) == 'number' then specials[place] = specials[special] end
  end
  return specials
end

-- Check the keys that the call will write: all keys, if a job has a special that is more than a listener.
local function check_first(specials, count)
  for _, special in pairs(specials) do
    if type(special) == 'table' then return Parts.check_all() end
  end
  Parts.check(specials ~= NONE and Parts.ADDED_MANY or Parts.ADDED)
end

register('enqueue', function(keys, args)
  open(keys, Parts.HOT)
  local kept = remembered(args[1], args[2], args[3])
  if kept then return decode(kept) end
  local specials = specials_of(args[4])
  check_first(specials, #args)
  if #args == 9 and args[5] == '1' and type(specials[1]) ~= 'table' then
    remember(args[1], args[2], encode({ Q.seq + 1, NONE }))
    local incarnation = enqueue_alone(args[6], args[7], args[8], args[9], specials[1])
    if incarnation then return { incarnation, NONE } end
  end
  local headers = tonumber(args[5])
  local first_at, ids, n = HEAD + 2 * headers, {}, 0
  for at = first_at + 1, #args, 2 do
    n = n + 1
    ids[n] = args[at]
  end
  local hard, extras_by_place = Intake.sort(ids, specials, args, first_at, args[4] ~= '' and has_flows(ids, specials))
  local groups = (next(hard) or next(extras_by_place)) and Intake.check_costs(ids, hard, extras_by_place, args, first_at)
  store_headers(args, headers)
  if groups then Groups.read_for(groups) end
  local exceptions, first, intake = {}, Q.seq + 1, Intake.new()
  local put_plain, expected = Intake.put_plain, first -- the incarnation that the reply implies without an exception
  for place = 1, n do
    local id, body = ids[place], args[first_at + 2 * place]
    if hard[place] then
      local status, job, record = enqueue_one(id, read_body({}, body), in_full(specials[place]))
      if record then
        answer_elsewhere(exceptions, place, record, job)
      else
        answer(exceptions, place, status, job)
      end
      expected = max(expected, exceptions[#exceptions - 1] + 1)
    else
      local extras, special, waits = extras_by_place[place], specials[place], true
      if extras or special then waits = Intake.put(intake, id, body, extras, special) else put_plain(intake, id, body) end
      if not waits or Q.seq ~= expected then answer_queued(exceptions, place, waits) end
      expected = Q.seq + 1
    end
  end
  Intake.finish(intake)
  local reply = { first, exceptions }
  remember(args[1], args[2], encode(reply))
  close()
  if Outbox.is_full() then reply[3] = 1 end
  return reply
end, REFUSED_WHEN_FULL)

register('fire', function(keys, args)
  open(keys)
  local s = Schedulers.read(args[1])
  if not s or not Schedulers.is_due(s) or s.next_ms ~= tonumber(args[2]) then return NONE end
  local headers = tonumber(args[5])
  local id, body = args[HEAD + 2 * headers + 1], args[HEAD + 2 * headers + 2]
  Intake.check_costs({ id }, { true }, NONE, args, HEAD + 2 * headers)
  load({ id }, true)
  store_headers(args, headers)
  local specials = args[4] ~= '' and decode(args[4]) or NONE
  local exceptions, first = {}, Q.seq + 1
  local status, job, record = enqueue_one(id, read_body({}, body), in_full(specials[1]))
  if record then
    answer_elsewhere(exceptions, 1, record, job)
  else
    answer(exceptions, 1, status, job)
  end
  Schedulers.move_on(s, tonumber(args[3]), record and record.id or id, exceptions[3], status == 'q')
  close()
  return { first, exceptions, Outbox.is_full() and 1 or nil }
end, REFUSED_WHEN_FULL)
