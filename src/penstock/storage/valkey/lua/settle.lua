-- settle: applies outcomes of leased jobs, then claims the next ones.
-- arguments: stream, number, repeated, worker, count (0: no claim), lease_ms, then id and outcome of each job
--   outcome: token:6 kind:1 rest
--   C result | F final:1 retry_in_ms:6 failure | S delay_ms:6 stage | P timeout_ms:6 name_length:1 name stage | R | W
--   | L delay_ms:6 scope:1 (q: the queue) | X
--   with a ttl of their own: K ttl:6 result | G final:1 retry_in_ms:6 ttl:6 failure
--   stage: nothing (keep it), or = and its name; of S, after a ? if the worker does not know the task
-- returns:   {letters, claim reply or nothing, 1 if the outbox is not empty}: per job the state as a letter, in upper
--   case if the outcome was not applied ('-': no record)
-- events:    completed, failed, retrying, snoozed, suspended, released, limited, cancelled, expired, enqueued, unblocked; and
--   those of claim

local HEAD = 6
local COMPLETE, ACTIVE = 67, 97 -- the letters C and a

-- Return the fields of a state record's tail, cached for the call: most jobs of a batch share it. common: what events of
-- those jobs share.
local function tail_of(tails, tail)
  local flags, _, worker_length, header_length, run_id_length = unpack('>Bi6BHH', tail)
  local header_at = WORKER_AT - FLAGS_AT + 1 + worker_length
  local options = options_of(sub(tail, header_at, header_at + header_length - 1))
  local known = {
    result_ttl = options.result_ttl_ms,
    is_plain = not (bit_of(flags, 4) or bit_of(flags, 64)) and options.result_ttl_ms > 0,
    -- It has links, and its extras are those of the static record.
    is_linked = bit_of(flags, 64) and not bit_of(flags, 4) and flags < 128 and options.result_ttl_ms > 0,
    common = {
      task = options.task, ver = options.version, st = 'completed',
      w = sub(tail, WORKER_AT - FLAGS_AT + 1, header_at - 1),
      rid = sub(tail, header_at + header_length, header_at + header_length + run_id_length - 1),
    },
  }
  tails[tail] = known
  return known
end

-- Return the lists of complete(): apart from the buffers, because every job adds to each of them.
local function new_completion()
  return {
    n = 0, tails = {}, states = list_in(set_fields, 'state'), leases = list_in(removed_members, 'active'),
    kept = list_in(added_members, 'completed'), head = 'cc' .. pack('>I6', Q.now), is_done = {},
  }
end

-- Return the extras of a job with links, for complete(); false if its end is not simple.
local function links_of(done, id, tail)
  if not tail.is_linked then return false end
  done.extras_by_id = done.extras_by_id or done.read_extras()
  local extras = done.extras_by_id[id]
  return extras and Shortcut.ends_simply(extras) and extras
end

-- Return the holds on jobs of these extras that complete in this call (holds.lua), or nil.
local function held_by(done, extras)
  if not extras.holds or not Holds.are_used() then return nil end
  done.held = done.held or {}
  local held = done.held[extras]
  if not held then
    held = Holds.of_completed(extras.holds)
    done.held[extras] = held
  end
  return held
end

-- Complete a job in the common case, without a rerun slot: only the head of its record changes. Return false if it is not
-- that simple.
local function complete(done, id, record, outcome)
  local tail_text = sub(record, FLAGS_AT)
  local tail, extras = done.tails[tail_text] or tail_of(done.tails, tail_text), nil
  if not tail.is_plain then
    extras = links_of(done, id, tail)
    if not extras then return false end
  end
  local token, inc, enq, claimed, runs = unpack('>I6I6I6I6I4', record, 9)
  local size, n, now, common = #outcome - 7, done.n + 1, Q.now, tail.common
  local at = 2 * n
  done.n, done.is_done[id] = n, true
  done.states[at - 1], done.leases[n], done.kept[at - 1], done.kept[at] = id, id, now + tail.result_ttl, id
  if size > INLINE_RESULT then
    done.states[at] = 'C' .. sub(done.head, 2) .. sub(record, 9)
    hset('results', id, sub(outcome, 8))
  else
    done.states[at] = done.head .. sub(record, 9) .. (size > 0 and sub(outcome, 8) or '')
  end
  local group = group_for('completed', common)
  local row, columns = begin_row(group, common), group.columns
  if row == 1 then
    columns.id, columns.inc, columns.enq, columns.run, columns.tok = { id }, { inc }, { enq }, { runs }, { token }
    columns.ms, columns.size = { now - claimed }, { size }
  else
    columns.id[row], columns.inc[row], columns.enq[row], columns.run[row] = id, inc, enq, runs
    columns.tok[row], columns.ms[row] = token, now - claimed
    put(group, row, 'size', size)
  end
  local held = extras and held_by(done, extras)
  if held then
    done.kept[at - 1] = now + max(tail.result_ttl, held.ms)
    Holds.add_completed(held, id)
  end
  if extras and extras.group then
    put(group, row, 'grp', extras.group)
    group.has_holes = true
  end
  if Q.listening[id] then tell({ id = id, inc = inc, result = sub(outcome, 8) }, 'c') end
  if extras then Shortcut.completed(id, inc, extras, sub(outcome, 8)) end
  return true
end

-- Put a running job back. delay_ms is the timeout if it waits for a signal. awaits: it waits for its children.
local function put_back(job, kind, delay_ms, stage, signal, awaits)
  if job.cancelling then return finish(job, 'x', 'cancelled', true) end
  local is_handed_back = kind == 'released' or kind == 'limited'
  if is_expired(job) and not is_handed_back then return expire(job, true) end
  local cause = Flows.is_parent(job) and Flows.cause(job) or awaits and Flows.await(job)
  if cause then return Flows.fail(job, cause, true) end
  job.worker = ''
  if stage then Signals.go_to(job, stage) end
  if signal then
    Signals.suspend(job, signal, delay_ms)
  elseif is_handed_back then
    enter_waiting(job, true)
  elseif delay_ms > 0 then
    schedule(job, Q.now + delay_ms)
  else
    enter_waiting(job)
  end
  absorb_slot(job)
  job.settled = job.state
  return emit(kind, job)
end

-- Give the job a ttl of its own. This is rare, so the header moves into its record.
local function keep_for(job, name, ttl)
  need_static(job)
  local options = decode(byte(job.header, 1) == 0 and call('HGET', K.options, job.header) or job.header)
  set_option(options, name, ttl)
  job.header = encode(options)
  rewritten(job)
end

local function fail(job, outcome)
  local final, retry_in_ms = unpack('>BI6', outcome, 8)
  local has_ttl = sub(outcome, 7, 7) == 'G'
  local failure = sub(outcome, has_ttl and 21 or 15)
  local fields = set_failure(job, failure)
  job.failures = job.failures + 1
  local group, row
  if final == 1 or job.failures >= options_of(job.header).attempts then
    if has_ttl then keep_for(job, 'failure_ttl_ms', (unpack('>I6', outcome, 15))) end
    group, row = finish(job, 'f', 'failed', true)
  else
    group, row = put_back(job, 'retrying', retry_in_ms)
  end
  if not (group.columns.et and group.columns.et[row]) then
    put(group, row, 'et', fields[1])
    put(group, row, 'em', fields[2])
  end
  return group, row
end

local function suspend(job, outcome)
  local timeout_ms, length = unpack('>I6B', outcome, 8)
  local name = sub(outcome, 15, 14 + length)
  local group, row = put_back(job, 'suspended', timeout_ms, sub(outcome, 15 + length), name)
  if group.kind == 'suspended' then put(group, row, 'data', '{"signal":"' .. name .. '"}') end
  return group, row
end

local function limited(job, outcome)
  Groups.park_of(job, sub(outcome, 14, 14) == 'q', Q.now + unpack('>I6', outcome, 8))
  return put_back(job, 'limited', 0)
end

local function apply(job, outcome)
  local kind = sub(outcome, 7, 7)
  if kind == 'C' or kind == 'K' then
    local result = sub(outcome, kind == 'K' and 14 or 8)
    if kind == 'K' then keep_for(job, 'result_ttl_ms', (unpack('>I6', outcome, 8))) end
    set_result(job, result)
    local group, row = finish(job, 'c', 'completed', true)
    put(group, row, 'size', #result)
    return group, row
  end
  if kind == 'F' or kind == 'G' then return fail(job, outcome) end
  if kind == 'S' then return put_back(job, 'snoozed', (unpack('>I6', outcome, 8)), sub(outcome, 14)) end
  if kind == 'P' then return suspend(job, outcome) end
  if kind == 'R' then return put_back(job, 'released', 0) end
  if kind == 'L' then return limited(job, outcome) end
  if kind == 'W' then return put_back(job, 'suspended', 0, nil, nil, true) end
  return finish(job, 'x', 'cancelled', true)
end

-- Settle one outcome with all the rules. Return its letter.
local function settle_one(id, outcome)
  local job = job_for(id)
  if not job then return '-' end
  if job.token ~= unpack('>I6', outcome) or job.token == 0 then return string.upper(job.state) end
  if job.state ~= 'a' then return job.settled ~= '-' and job.settled or string.upper(job.state) end
  local worker, run_ms = job.worker, Q.now - job.claimed
  local runs, token = job.runs, job.token
  local group, row = apply(job, outcome)
  put(group, row, 'run', runs)
  put(group, row, 'tok', token)
  put(group, row, 'w', worker)
  put(group, row, 'ms', run_ms)
  return job.settled
end

-- Return the letter of an outcome for a job that complete() has already ended in this call.
local function settled_before(record, outcome)
  return sub(record, 9, 14) == sub(outcome, 1, 6) and 'c' or 'C'
end

-- Return the static records of jobs with links: the extras are in there.
local function linked_statics(ids, records)
  local linked, statics = {}, {}
  for i = 1, #ids do
    if records[i] and bit_of(byte(records[i], FLAGS_AT), 64) then linked[#linked + 1] = ids[i] end
  end
  local records_found = read_many('HMGET', K.jobs, linked)
  for i = 1, #linked do statics[linked[i]] = records_found[i] or nil end
  return statics
end

-- Return the extras in these static records, after reading what they link to.
local function read_extras(statics)
  local extras_by_id = {}
  for id, static in pairs(statics) do extras_by_id[id] = Shortcut.extras_of_static(static) end
  Shortcut.read_links(extras_by_id)
  return extras_by_id
end

local function settle_all(ids, outcomes)
  local records, statics = read_many('HMGET', K.state, ids), nil
  local letters, done = {}, new_completion()
  local is_done = done.is_done
  function done.read_extras()
    statics = statics or linked_statics(ids, records)
    return read_extras(statics)
  end
  read_waiters(ids)
  for i = 1, #ids do
    local id, record, outcome = ids[i], records[i], outcomes[i]
    if is_done[id] then
      letters[i] = settled_before(record, outcome)
    elseif record and byte(outcome, 7) == COMPLETE and byte(record, 1) == ACTIVE and not J[id]
      and sub(record, 9, 14) == sub(outcome, 1, 6) and complete(done, id, record, outcome) then
      letters[i] = 'c'
    else
      statics = statics or linked_statics(ids, records)
      if record and not J[id] then J[id] = job_of(id, record, statics[id]) end
      if not record then load({ id }) end
      letters[i] = settle_one(id, outcome)
    end
  end
  return table.concat(letters)
end

-- Check the keys that the call will write: all keys, if an outcome is more than a short result.
local function check_first(outcomes, takes)
  for i = 1, #outcomes do
    if byte(outcomes[i], 7) ~= COMPLETE or #outcomes[i] > INLINE_RESULT then return Parts.check_all() end
  end
  Parts.check(takes and Parts.SETTLED_AND_TAKEN or Parts.SETTLED)
end

register('settle', function(keys, args)
  open(keys, Parts.HOT)
  local count = tonumber(args[5])
  local kept = remembered(args[1], args[2], args[3])
  local n = (#args - HEAD) / 2
  if kept then return { sub(kept, 1, n), count > 0 and reply_of_kept(sub(kept, n + 1)) or 0, 1 } end
  local ids, outcomes = {}, {}
  for i = 1, n do
    ids[i], outcomes[i] = args[HEAD + 2 * i - 1], args[HEAD + 2 * i]
  end
  check_first(outcomes, count > 0)
  local letters, claimed = settle_all(ids, outcomes), nil
  -- take() or close() writes the groups, unless one is due again immediately, so that its time is needed.
  if next(Q.grouped) and Groups.fill_touched() then Groups.write() end
  if count > 0 then
    write_waiters()
    flush()
    claimed = take(args[4], count, tonumber(args[6]))
  end
  if count == 0 and bit_of(Q.uses, 1) then Q.wake = Q.wake or waiting_count() > 0 end
  remember(args[1], args[2], letters .. (claimed and kept_of(claimed) or ''))
  close()
  if Outbox.is_full() then return { letters, claimed or 0, 1 } end
  return { letters, claimed }
end)
