-- Steps and suspensions: where a job goes on, the signal it waits for, signals that came before it did.
--
-- In the annex: st the step, sw the signal it awaits, su until when, sr the signal received, so timed out, sk signals kept,
-- ur the last run whose worker did not know the task.
-- An entry of signals:<id> is name_length:1 name data.

do

local SIGNALS_KEPT = 100
local IN_USE = 16
local UNKNOWN = 63 -- ?

local function signals_of(job)
  return Q.prefix .. ':signals:' .. job.id
end

-- step: '' for where the job is, else = and its name; after a ? if the worker of this run does not know the task.
function Steps.go_to(job, step)
  if step == '' then return end
  local annex = annex_of(job)
  if byte(step) == UNKNOWN then
    annex.ur = job.runs
    step = sub(step, 2)
  end
  if step ~= '' then annex.st = step ~= '=' and sub(step, 2) or nil end
  keep_annex(job)
end

-- What came of signals goes: with the record, or when its id is queued afresh.
function Steps.drop(job)
  if not bit_of(Q.uses, IN_USE) then return end
  local annex = annex_of(job)
  if annex.sr then hdel('received', job.id) end
  if annex.sk then
    call('SREM', K.signalled, job.id)
    call('UNLINK', signals_of(job))
  end
  annex.sr, annex.sk = nil, nil
end

local function receive(job, name, data)
  local annex = annex_of(job)
  annex.sr, annex.sw, annex.su = name, nil, nil
  hset('received', job.id, data)
  keep_annex(job)
  enter_waiting(job)
end

-- The data of the oldest kept signal of that name, which is consumed; nil if there is none.
local function take_kept(job, name)
  local annex, key, head = annex_of(job), signals_of(job), pack('>B', #name) .. name
  for i = 0, (annex.sk or 0) - 1 do
    local entry = call('LINDEX', key, i)
    if sub(entry, 1, #head) == head then
      call('LSET', key, i, '')
      call('LREM', key, 1, '')
      annex.sk = annex.sk > 1 and annex.sk - 1 or nil
      if not annex.sk then call('SREM', K.signalled, job.id) end
      return sub(entry, #head + 1)
    end
  end
end

-- The job is blocked until the signal comes; if it came early, the job enters waiting.
function Steps.suspend(job, name, timeout_ms)
  if not bit_of(Q.uses, IN_USE) then Q.uses = Q.uses + IN_USE end
  local annex = annex_of(job)
  if annex.sr then hdel('received', job.id) end
  annex.sr, annex.so, annex.sw, annex.su = nil, nil, nil, nil
  local data = take_kept(job, name)
  if data then return receive(job, name, data) end
  annex.sw = name
  if timeout_ms > 0 then annex.su = Q.now + timeout_ms end
  job.state, job.by, job.suspended_until = 'b', 'i', annex.su
  if job.part then Groups.scheduled(job) end
  keep_annex(job)
end

-- Returns the letter of the answer: r resumed, k kept, f full.
function Steps.signal(job, name, data)
  local annex = annex_of(job)
  if job.state == 'b' and job.by == 'i' and annex.sw == name then
    receive(job, name, data)
    return 'r'
  end
  local kept = annex.sk or 0
  if kept >= SIGNALS_KEPT then return 'f' end
  if not bit_of(Q.uses, IN_USE) then Q.uses = Q.uses + IN_USE end
  call('SADD', K.signalled, job.id)
  call('RPUSH', signals_of(job), pack('>B', #name) .. name .. data)
  annex.sk = kept + 1
  keep_annex(job)
  return 'k'
end

function Steps.time_out(job)
  local annex = annex_of(job)
  annex.so, annex.sw, annex.su = true, nil, nil
  keep_annex(job)
  enter_waiting(job)
  emit('unblocked', job)
end

end
