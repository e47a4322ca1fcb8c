-- Stages and suspensions: where a job resumes, the signal it waits for, and early signals.
--
-- An entry of signals:<id> is name_length:1 name data.

do

local SIGNALS_KEPT = BOUNDS.SIGNALS_KEPT
local IN_USE = 16
local UNKNOWN = 63 -- ?

local function signals_of(job)
  return Q.prefix .. ':signals:' .. job.id
end

-- Set the stage of a job. stage: '' to keep it, else = and its name; after a ? if this run's worker does not know the task.
function Signals.go_to(job, stage)
  if stage == '' then return end
  local extras = extras_of(job)
  if byte(stage) == UNKNOWN then
    extras.unknown_run = job.runs
    stage = sub(stage, 2)
  end
  if stage ~= '' then extras.stage = stage ~= '=' and sub(stage, 2) or nil end
  extras_changed(job)
end

-- Drop the job's signals: with the record, or when its id is queued afresh.
function Signals.drop(job)
  if not bit_of(Q.uses, IN_USE) then return end
  local extras = extras_of(job)
  if extras.received then hdel('received', job.id) end
  if extras.kept then
    call('SREM', K.signalled, job.id)
    call('UNLINK', signals_of(job))
  end
  extras.received, extras.kept = nil, nil
end

local function receive(job, name, data)
  local extras = extras_of(job)
  extras.received, extras.awaits, extras.awaits_until_ms = name, nil, nil
  hset('received', job.id, data)
  extras_changed(job)
  enter_waiting(job)
end

-- Consume the oldest early signal of that name, and return its data; nil if there is none.
local function take_kept(job, name)
  local extras, key, head = extras_of(job), signals_of(job), pack('>B', #name) .. name
  for i = 0, (extras.kept or 0) - 1 do
    local entry = call('LINDEX', key, i)
    if sub(entry, 1, #head) == head then
      call('LSET', key, i, '')
      call('LREM', key, 1, '')
      extras.kept = extras.kept > 1 and extras.kept - 1 or nil
      if not extras.kept then call('SREM', K.signalled, job.id) end
      return sub(entry, #head + 1)
    end
  end
end

-- Block the job until the signal comes. If the signal came early, let the job enter waiting.
function Signals.suspend(job, name, timeout_ms)
  if not bit_of(Q.uses, IN_USE) then Q.uses = Q.uses + IN_USE end
  local extras = extras_of(job)
  if extras.received then hdel('received', job.id) end
  extras.received, extras.timed_out, extras.awaits, extras.awaits_until_ms = nil, nil, nil, nil
  local data = take_kept(job, name)
  if data then return receive(job, name, data) end
  extras.awaits = name
  if timeout_ms > 0 then extras.awaits_until_ms = Q.now + timeout_ms end
  job.state, job.by, job.suspended_until = 'b', 'i', extras.awaits_until_ms
  if job.group_role then Groups.scheduled(job) end
  extras_changed(job)
end

-- Deliver a signal. Return the letter of the answer: r resumed, k kept, f full.
function Signals.signal(job, name, data)
  local extras = extras_of(job)
  if job.state == 'b' and job.by == 'i' and extras.awaits == name then
    receive(job, name, data)
    return 'r'
  end
  local kept = extras.kept or 0
  if kept >= SIGNALS_KEPT then return 'f' end
  if not bit_of(Q.uses, IN_USE) then Q.uses = Q.uses + IN_USE end
  call('SADD', K.signalled, job.id)
  call('RPUSH', signals_of(job), pack('>B', #name) .. name .. data)
  extras.kept = kept + 1
  extras_changed(job)
  return 'k'
end

function Signals.time_out(job)
  local extras = extras_of(job)
  extras.timed_out, extras.awaits, extras.awaits_until_ms = true, nil, nil
  extras_changed(job)
  enter_waiting(job)
  emit('unblocked', job)
end

end
