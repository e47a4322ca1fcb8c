-- Taking jobs: the work of claim, and of settle after it has settled.
--
-- Returns the reply {why (1: paused, 2: over budget, 3: a limit of the queue), wait_ms (-1: none), now, first token, ids,
-- static records, details}. Leases have consecutive tokens, and are on their first run as they were enqueued, unless the
-- details say otherwise. Details are a place in the lists and a string, and so on:
--   token:6 claimed_at:6 runs:4 failures:4 stalls:4 expires_at:6 priority:6 flags:1 [length:4 extras [steps] [signal]]
--   flags: 1 cancelling, 2 the data of a signal follows, 4 steps follow (Steps.sent). The extras are there if they
--   differ from those in the static record.

-- A block, because the library has at most 200 names at its top; other files need only these.
local promote_due, until_next, take, kept_of, reply_of_kept

do

local EXPIRED_PER_CLAIM = 10000

-- Let up to limit due jobs enter waiting, and write them.
function promote_due(limit)
  if Q.clock and Q.clock.follow > 0 then Clock.follow(limit) end
  local ids = call('ZRANGEBYSCORE', K.scheduled, '-inf', digits(Q.now), 'LIMIT', 0, limit)
  if not ids[1] then return 0 end
  load(ids)
  local promoted = 0
  for i = 1, #ids do
    local job = job_for(ids[i])
    if job then
      enter_waiting(job)
      emit('promoted', job)
      promoted = promoted + 1
    end
  end
  flush()
  return promoted
end

-- Return the extras and the data of the received signal, as details have them, and the flag.
local function moved_extras(job)
  local packed = packed_extras(job)
  local signal = job.extras.received and call('HGET', K.received, job.id)
  local steps = job.extras.has_steps and Steps.sent(job)
  return pack('>I4', #packed) .. packed .. (steps or '') .. (signal or ''), (signal and 2 or 0) + (steps and 4 or 0)
end

local function details_of(job)
  local extras, flags = '', 0
  if job.extras_moved then extras, flags = moved_extras(job) end
  return pack('>I6I6I4I4I4I6i6B', job.token, job.claimed, job.runs, job.failures, job.stalls, job.expires,
    job.priority, flags + (job.cancelling and 1 or 0)) .. extras
end

function until_next(key, otherwise)
  local first = call('ZRANGE', key, 0, 0, 'WITHSCORES')
  local at = tonumber(first[2])
  return at and at < STAGED_FROM and max(0, at - Q.now) or otherwise
end

-- Return the collection of new leases, which lease_*() fill and reply_of() turns into the reply.
local function new_leases(worker, lease_ms)
  return {
    worker = worker, lease_until = digits(Q.now + lease_ms), first_token = Q.seq + 1, n = 0,
    ids = {}, statics = {}, details = {}, first_runs = {}, began = pack('>I6I4', Q.now, 1),
  }
end

-- Note a token that is not consecutive, because something else drew a number in between.
local function tell_token(leases, n, token)
  leases.details[#leases.details + 1] = n
  leases.details[#leases.details + 1] = pack('>I6I6I4I4I4I6i6B', token, Q.now, 1, 0, 0, 0, 0, 0)
end

-- Return what jobs share on their first run: the end of the state record, and columns of the event. named: the header, then
-- the length and the run_id, if there is one.
local function first_run(leases, named)
  local header, run_id = sub(named, 1, 6), sub(named, 9)
  local options = options_of(header)
  local owner = pack('>i6BHH', 0, #leases.worker, #header, #run_id) .. leases.worker .. header .. run_id
  local untouched = pack('>I6I6I6I6I4I4', 0, 0, 0, 0, 0, 0)
  local shared = {
    tail = leases.began .. untouched .. '\0' .. owner, linked_tail = leases.began .. untouched .. '@' .. owner,
    owner = '@' .. owner, -- flag 64: it has links
    common = { task = options.task, ver = options.version, st = 'active', run = 1, w = leases.worker, rid = run_id },
  }
  leases.first_runs[named] = shared
  return shared
end

local BEFORE_TOKEN = 'a-\0\0\0\0\0\0'

-- Lease a job on its first run, with its event: a few strings, no table. birth and rest: what its state record has after
-- the token.
local function lease_first(leases, id, static, shared, birth, rest, ready_at)
  local inc, enq = unpack('>I6I6', static)
  local token, n, common = Q.seq + 1, leases.n + 1, shared.common
  Q.seq, leases.n, leases.ids[n], leases.statics[n] = token, n, id, static
  local states, deadlines = leases.states, leases.deadlines
  local at = #states
  states[at + 1], states[at + 2] = id, BEFORE_TOKEN .. pack('>I6', token) .. birth .. rest
  deadlines[at + 1], deadlines[at + 2] = leases.lease_until, id
  if token ~= leases.first_token + n - 1 then tell_token(leases, n, token) end
  local group, wait = group_for('claimed', common), Q.now - (ready_at or enq)
  local row, columns = begin_row(group, common), group.columns
  if row == 1 then
    columns.id, columns.inc, columns.enq, columns.tok, columns.wait = { id }, { inc }, { enq }, { token }, { wait }
  else
    columns.id[row], columns.inc[row], columns.enq[row], columns.tok[row] = id, inc, enq, token
    columns.wait[row] = wait
  end
  return group, row
end

-- Lease a fresh job with extras (shortcut.lua). Return false, having done nothing, if it is not fresh or must not start.
local function lease_fresh(leases, id, state, static)
  local flags, extras = byte(static, 13), nil
  if flags ~= 192 and not Shortcut.MAY_BE_FRESH[flags] then return false end
  if state and not Shortcut.is_waiting(state) then return false end
  if flags >= 128 then
    extras = Shortcut.extras_of_static(static)
    if extras.flow and bit_of(Q.uses, Usage.BIT) and Usage.is_over('f:' .. extras.flow) then return false end
    if extras.group and not Shortcut.start(extras) then return false end
  end
  local named_to, _ = 19, nil
  if flags ~= 192 and flags ~= 64 then _, named_to = Shortcut.places(static, 13) end
  local named = sub(static, 14, named_to)
  local shared = leases.first_runs[named] or first_run(leases, named)
  local ready_at, rest = 0, extras and shared.linked_tail or shared.tail
  if state then
    ready_at = unpack('>I6', state, 49)
    rest = leases.began .. sub(state, 37, 68) .. shared.owner
  end
  local group, row =
    lease_first(leases, id, static, shared, sub(static, 1, 12), rest, ready_at > 0 and ready_at or nil)
  if extras and extras.group then
    put(group, row, 'grp', extras.group)
    group.has_holes = true
  end
  return true
end

local function lease_any(leases, id, job, static)
  if job.state ~= 'w' then return false end -- the entry is not its own
  job.is_popped = true
  J[id] = job
  if is_expired(job) then
    expire(job)
    return false
  end
  local refusal = job.has_links and bit_of(Q.uses, Usage.BIT) and Usage.refusal(job)
  if refusal then
    Flows.fail(job, refusal)
    return false
  end
  if job.has_links and not Groups.start(job) then return false end
  local wait = Q.now - job.ready_at
  job.state, job.token, job.runs, job.claimed = 'a', draw(), job.runs + 1, Q.now
  job.settled, job.worker, job.lease_until = '-', leases.worker, leases.lease_until
  changed(job)
  local n = leases.n + 1
  leases.n, leases.ids[n], leases.statics[n] = n, id, static
  leases.details[#leases.details + 1] = n
  leases.details[#leases.details + 1] = details_of(job)
  local group, row = emit('claimed', job)
  put(group, row, 'tok', job.token)
  put(group, row, 'w', job.worker)
  put(group, row, 'wait', wait)
  put(group, row, 'pri', job.priority)
  return true
end

-- Read the groups of the jobs.
local function read_groups(statics)
  if not bit_of(Q.uses, 2) then return end
  local keys = {}
  for i = 1, #statics do
    local extras = statics[i] and Shortcut.extras_of_static(statics[i])
    if extras and extras.group then keys[#keys + 1] = extras.group end
  end
  Groups.read_for(keys)
end

-- Lease up to count jobs from the head of the line. Return how many were popped, and how many of them had expired or went
-- back to their groups.
local function take_head(leases, count)
  local ids, is_line, numbers = pop_waiting(count)
  local statics, states = read_many('HMGET', K.jobs, ids), {}
  if not is_line or Q.stale > 0 then states = read_many('HMGET', K.state, ids) end
  local expired, has_stale, first_runs = 0, Q.stale > 0, leases.first_runs
  read_groups(statics)
  leases.states, leases.deadlines = list_in(set_fields, 'state'), list_in(added_members, 'active')
  for i = 1, #ids do
    local static, state = statics[i], states[i]
    if has_stale and numbers[i] and is_stale(sub(numbers[i], 1, 6), static, state) then
      Q.stale = Q.stale - 1
    elseif static and not state and byte(static, 13) == 0 then -- as enqueued and without flags, like most jobs
      local header = sub(static, 14, 19)
      local shared = first_runs[header] or first_run(leases, header)
      lease_first(leases, ids[i], static, shared, sub(static, 1, 12), shared.tail)
    elseif static and not lease_fresh(leases, ids[i], state, static)
      and not lease_any(leases, ids[i], job_of(ids[i], state, static), static) then
      expired = expired + 1
    end
  end
  flush()
  return #ids, expired
end

local function reply_of(leases, wait_ms, why)
  return { why or 0, wait_ms, Q.now, leases.first_token, leases.ids, leases.statics, leases.details }
end

local function take_up_to(leases, count)
  local expired = 0
  while leases.n < count and expired < EXPIRED_PER_CLAIM do
    local popped, ended_count = take_head(leases, min(count - leases.n, CHUNK))
    expired = expired + ended_count
    if popped == 0 then break end
  end
end

local function until_due()
  local wait_ms = until_next(K.scheduled, -1)
  local look_ms = bit_of(Q.uses, 2) and until_next(K.parked, -1) or -1
  if wait_ms < 0 or look_ms < 0 then return max(wait_ms, look_ms) end
  return min(wait_ms, look_ms)
end

-- Take jobs where the queue has limits of its own. A worker that they hold back learns when to return, and wakes no other.
function Groups.take(leases, count)
  local allowed = Groups.allowance(count)
  take_up_to(leases, allowed)
  if leases.n > 0 then Groups.charge(Groups.of(''), leases.n, 0) end
  Groups.settle()
  flush()
  local waiting, room, wait_ms = waiting_count(), Groups.allowance(1)
  Q.wake = waiting > 0 and room > 0
  if not Q.wake then
    call('DEL', K.wake)
    Q.wake_tokens = 0
  end
  if waiting > 0 and room == 0 and leases.n < count then return reply_of(leases, wait_ms, 3) end
  return reply_of(leases, (leases.n == count or waiting > 0) and 0 or until_due())
end

function take(worker, count, lease_ms)
  if Q.paused then return { 1, -1, Q.now, 0, {}, {}, {} } end
  if bit_of(Q.uses, Usage.BIT) then
    local over, wait = Usage.is_over('')
    if over then return { 2, wait, Q.now, 0, {}, {}, {} } end
  end
  promote_due(BOUNDS.PROMOTED_PER_CLAIM)
  if bit_of(Q.uses, 2) then Groups.look_again(BOUNDS.GROUPS_PER_CLAIM) end
  local leases = new_leases(worker, lease_ms)
  if bit_of(Q.uses, 1) then return Groups.take(leases, count) end
  take_up_to(leases, count)
  if next(Q.grouped) then
    Groups.settle()
    flush()
  end
  local waiting = waiting_count()
  Q.wake = waiting > 0
  if waiting == 0 then
    call('DEL', K.wake)
    Q.wake_tokens = 0
  end
  if leases.n == count or waiting > 0 then return reply_of(leases, 0) end
  return reply_of(leases, until_due())
end

-- Return the answer to a repeated claim: the leases of those tokens that are still held.
local function retaken(first_token, count, wait_ms, paused)
  local ids = call('ZRANGE', K.active, 0, -1)
  local leases = new_leases('', 0)
  local held = {}
  if count > 0 then load(ids, true) end
  for i = 1, #ids do
    local job = job_for(ids[i])
    if job and job.token >= first_token and job.token < first_token + count then held[#held + 1] = job end
  end
  table.sort(held, function(a, b) return a.token < b.token end)
  for n = 1, #held do
    leases.ids[n], leases.statics[n] = held[n].id, static_of(held[n])
    leases.details[2 * n - 1], leases.details[2 * n] = n, details_of(held[n])
  end
  return { paused, wait_ms, Q.now, first_token, leases.ids, leases.statics, leases.details }
end

function kept_of(reply)
  return pack('>BI6I6I4', reply[1], reply[2] + 1, reply[4], #reply[5])
end

function reply_of_kept(kept)
  local paused, wait_ms, first_token, count = unpack('>BI6I6I4', kept)
  return retaken(first_token, count, wait_ms - 1, paused)
end

end
