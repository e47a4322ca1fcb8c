-- Durable steps: the recorded parts of a job's runs.
--
-- steps:<id> has a field per step: status:1 number:6 at:6 until:6 body. The body is MessagePack of core.step.StepBody.
-- step_results:<id> has the results that are too large for it, under the same names.
-- status   c completed, f failed, r retrying, w waiting, s started; c and f are final

do

local COMPLETED, FAILED, STARTED = 99, 102, 115 -- the letters c, f and s

function Steps.key(id)
  return Q.prefix .. ':steps:' .. id
end

function Steps.results_key(id)
  return Q.prefix .. ':step_results:' .. id
end

-- Return whether a stored record never changes again.
function Steps.is_final(stored)
  local status = byte(stored, 1)
  return status == COMPLETED or status == FAILED
end

-- Note in the extras that the job has steps.
function Steps.mark(job)
  if extras_of(job).has_steps then return end
  job.extras.has_steps = true
  extras_changed(job)
  call('SADD', K.stepped, job.id)
end

-- Return the steps that a lease carries: their number, then name_length:2 name length:4 record of each; nil if there are
-- none or too many.
function Steps.sent(job)
  local key = Steps.key(job.id)
  local count = call('HLEN', key)
  if count == 0 or count > BOUNDS.SENT_STEPS then return nil end
  local fields, packed = call('HGETALL', key), { pack('>I4', count) }
  for i = 1, #fields, 2 do
    packed[#packed + 1] = pack('>H', #fields[i]) .. fields[i] .. pack('>I4', #fields[i + 1]) .. fields[i + 1]
  end
  return table.concat(packed)
end

-- Forget the steps that have not completed, because the job is retried.
function Steps.forgive(job)
  if not (job.extras_moved and extras_of(job).has_steps) then return end
  local fields, names = call('HGETALL', Steps.key(job.id)), {}
  for i = 1, #fields, 2 do
    if byte(fields[i + 1], 1) ~= COMPLETED then names[#names + 1] = fields[i] end
  end
  if not names[1] then return end
  call('HLEN', Steps.results_key(job.id)) -- checks the type before the first write
  send('HDEL', Steps.key(job.id), names)
  send('HDEL', Steps.results_key(job.id), names)
end

-- Return the last step that the current run has started and not ended, if it has said so.
function Steps.under_way(job)
  if not (job.extras_moved and extras_of(job).has_steps) then return nil end
  local fields, last, name = call('HGETALL', Steps.key(job.id)), '', nil
  for i = 1, #fields, 2 do
    local stored = fields[i + 1]
    if byte(stored, 1) == STARTED and unpack('>I6', stored, 8) >= job.claimed and sub(stored, 2, 7) > last then
      last, name = sub(stored, 2, 7), fields[i]
    end
  end
  return name
end

-- Drop all steps: with the record, or when its id is queued afresh.
function Steps.drop(job)
  if not job.extras_moved then return end
  if Q.has_steps == nil then Q.has_steps = call('EXISTS', K.stepped) == 1 end
  if Q.has_steps and call('SREM', K.stepped, job.id) == 1 then
    call('UNLINK', Steps.key(job.id), Steps.results_key(job.id))
  end
  if job.extras then job.extras.has_steps = nil end
end

end
