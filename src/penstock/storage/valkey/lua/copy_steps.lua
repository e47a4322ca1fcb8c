-- copy_steps: copies the steps that a job recorded before another step to a job that is not active.
-- arguments: stream, number, repeated, id, id of the other job, name of the first step that is not copied (whatever its
--   key), end of the data of the event
-- returns:   c copied, a the other job is active, u no such step, - not found
-- events:    changed

-- Return the steps {name, record} in their order.
local function steps_of(id)
  local fields, steps = call('HGETALL', Steps.key(id)), {}
  for i = 1, #fields, 2 do steps[#steps + 1] = { fields[i], fields[i + 1] } end
  table.sort(steps, function(a, b) return sub(a[2], 2, 7) < sub(b[2], 2, 7) end)
  return steps
end

-- Return how many steps come before those of a name, or nil if there are none of that name.
local function count_before(steps, name)
  for i = 1, #steps do
    if steps[i][1] == name or sub(steps[i][1], 1, #name + 1) == name .. '[' then return i - 1 end
  end
end

-- Check everything that can fail before the first write. Return the number of steps to copy.
local function check(source, target, steps, before)
  for _, id in ipairs({ source.id, target.id }) do
    call('HLEN', Steps.key(id))
    call('HLEN', Steps.results_key(id))
  end
  local count = count_before(steps, before)
  for i = 1, count or 0 do
    -- A job without the step would run it again.
    if Steps.problem(source.id, steps[i][1], steps[i][2]) then refuse('STEP', source.id) end
  end
  extras_of(target)
  return count
end

local function copy(source, target, before, data)
  if not source or not target then return '-' end
  if target.state == 'a' then return 'a' end
  local steps, key = steps_of(source.id), Steps.key(target.id)
  local count = check(source, target, steps, before)
  if not count then return 'u' end
  local group, row = emit('changed', target)
  put(group, row, 'data', '{"steps":' .. digits(count) .. ',' .. data .. '}')
  for i = 1, count do
    local name, stored = steps[i][1], steps[i][2]
    if call('HSETNX', key, name, sub(stored, 1, 1) .. pack('>I6', draw()) .. sub(stored, 8)) == 1 then
      local large = call('HGET', Steps.results_key(source.id), name)
      if large then call('HSET', Steps.results_key(target.id), name, large) end
    end
  end
  if count > 0 then Steps.mark(target) end
  return 'c'
end

register('copy_steps', function(keys, args)
  open(keys)
  local kept = remembered(args[1], args[2], args[3])
  if kept then return kept end
  load({ args[4], args[5] }, true)
  local letter = copy(job_for(args[4]), job_for(args[5]), args[6], args[7])
  remember(args[1], args[2], letter)
  close()
  return letter
end, REFUSED_WHEN_FULL)
