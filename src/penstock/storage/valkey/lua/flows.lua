-- Flows: jobs that depend on others (docs/verbs.md).
--
-- deps:<id>   hash, of a job with dependencies; all fields but those of edges begin with a control character
--   queue '\0' id            MessagePack of {number, policy letter, state letter}: policy f fail, i ignore, w wait; state
--                            '' pending, c completed, f failed, x cancelled, r removed
--   '\1' queue '\0' id       the result, or MessagePack of the failure
--   '\2' number              queue '\0' id: their order
--   '\3flow' '\3given' '\3pending' '\3failed'     pending: how many do not count yet; failed: the first that fails it
--   '\3awaited'              how many there were when the job last waited for them
-- dependents:<id>   list of MessagePack of {queue, id, flow}: those that came after the job itself
--
-- In the annex: fl flow, dn dependents, dl there are later ones, dp there are dependencies.
--
-- In a block of its own: the library has no room for more names. The verbs in enqueue.lua add Flows.put.

do

local FLOW, GIVEN, PENDING, FAILED, AWAITED = '\3flow', '\3given', '\3pending', '\3failed', '\3awaited'
local BY_DEPENDENCY = 'DependencyFailed'

local deps_of = Flows.deps_of

local function counts(policy, state)
  if policy == 'w' then return state == 'c' or state == 'r' end
  return state ~= ''
end

function Flows.is_parent(job)
  return job.binds and annex_of(job).dp
end

-- Blocks the job if some of its dependencies do not count yet.
function Flows.hold_back(job)
  if not Flows.is_parent(job) or Flows.pending(job.id) == 0 then return false end
  if job.part then Groups.wait_elsewhere(job) end
  job.state, job.by = 'b', 'h'
  changed(job)
  return true
end

-- Telling others

-- Passes an end on: in this queue it waits in line, so that long chains do not nest.
local function tell_dependent(dependent, id, state, value)
  if dependent[1] ~= Outbox.here() then
    return Outbox.send(dependent[1],
      'd' .. encode({ dependent[2], dependent[3], Outbox.here(), id, state, value or false }))
  end
  Q.ends = Q.ends or {}
  Q.ends[#Q.ends + 1] = { dependent[2], dependent[3], Outbox.here(), id, state, value or false }
end

function Flows.dependents(job)
  local annex, found_dependents = annex_of(job), {}
  for i = 1, #(annex.dn or {}) do found_dependents[i] = annex.dn[i] end
  if annex.dl then
    local later = call('LRANGE', Q.prefix .. ':dependents:' .. job.id, 0, -1)
    for i = 1, #later do found_dependents[#found_dependents + 1] = decode(later[i]) end
  end
  return found_dependents
end

-- The result, or the failure without its traceback.
local function value_of(job, state)
  if state == 'c' then
    need_result(job)
    return job.result or ''
  end
  if state ~= 'f' then return false end
  local failure = job.failure or call('HGET', K.failures, job.id)
  if not failure then return false end
  failure = decode(failure)
  return encode({ failure[1], failure[2], '' })
end

local function work_off()
  if Q.works_off then return end
  Q.works_off = true
  local at = 1
  while Q.ends and Q.ends[at] do
    Flows.done(Q.ends[at])
    Q.ends[at] = false
    at = at + 1
  end
  Q.ends, Q.works_off = false, false
end

function Flows.tell_all(dependents, id, state, value, but_not)
  for i = 1, #dependents do
    if dependents[i][1] ~= but_not then tell_dependent(dependents[i], id, state, value) end
  end
  work_off()
end

-- Says to all dependents, or to those of other queues than that of this name, that the job has ended as state.
function Flows.tell(job, state, but_not)
  local annex = annex_of(job)
  if not (annex.dn or annex.dl) then return end
  Flows.tell_all(Flows.dependents(job), job.id, state, value_of(job, state), but_not)
end

-- A job that others were to depend on cannot be put in.
function Flows.tell_refused(id, annex, text)
  local failure = encode({ 'CostTooHigh', text, '' })
  for i = 1, #(annex.dn or {}) do tell_dependent(annex.dn[i], id, 'r', failure) end
  work_off()
end

-- Has the dependents told of the end of a job that is there: now, if it has ended.
function Flows.link_to(job, dependents)
  local annex, new = annex_of(job), {}
  for i = 1, #dependents do
    local is_known = false
    for j = 1, #(annex.dn or {}) do
      local one = annex.dn[j]
      if one[1] == dependents[i][1] and one[2] == dependents[i][2] and one[3] == dependents[i][3] then
        is_known = true
      end
    end
    if not is_known then new[#new + 1] = encode(dependents[i]) end
  end
  if new[1] and job.state ~= 'c' then
    send('RPUSH', Q.prefix .. ':dependents:' .. job.id, new)
    call('SADD', K.linked, job.id)
    call('HSET', K.meta, 'tied', '1')
    if not annex.dl then
      need_static(job)
      annex.dl, job.binds = true, true
      keep_annex(job)
    end
  end
  if ENDED[job.state] then
    local value = value_of(job, job.state)
    for i = 1, #dependents do tell_dependent(dependents[i], job.id, job.state, value) end
  end
  work_off()
end

function Flows.link(id, dependent)
  load({ id })
  local job = found(id)
  if job and not is_over(job) then return Flows.link_to(job, { dependent }) end
  local here = Outbox.here()
  tell_dependent(dependent, id, 'r', encode({ 'DependencyNotFound',
    'job ' .. here .. '/' .. id .. ' is not known: it never was, or is no longer kept', '' }))
  work_off()
end

-- What a job waits for

-- Looks at dependencies (queue '\0' id) of the job of this id. Those that have ended count; what follows for the job
-- itself is the caller's to see to.
local function look_at(id, flow, edges)
  local here = Outbox.here()
  Q.giving = id
  for i = 1, #edges do
    local queue, on = string.match(edges[i], '^(.-)%z(.*)$')
    if queue == here then
      Flows.link(on, { here, id, flow })
    else
      Outbox.send(queue, 'l' .. encode({ on, { here, id, flow } }))
    end
  end
  Q.giving = false
end

-- Gives the job of this id entries for after: {queue, id, policy letter, whether it will tell by itself} each. Returns
-- whether there are some that may have ended.
function Flows.depend(id, flow, after)
  local key, fields, edges = deps_of(id), {}, {}
  local names, seen = { FLOW, GIVEN, PENDING }, {}
  for i = 1, #after do names[i + 3] = after[i][1] .. '\0' .. after[i][2] end
  local known = read_many('HMGET', key, names)
  if not known[1] then
    call('SADD', K.parents, id)
    fields[1], fields[2] = FLOW, flow
  end
  local first, pending = tonumber(known[2] or 0), tonumber(known[3] or 0)
  local given = first
  for i = 4, #names do
    if not known[i] and not seen[names[i]] then
      local said, at = after[i - 3], #fields
      seen[names[i]], given = true, given + 1
      fields[at + 1], fields[at + 2] = names[i], encode({ given, said[3], '' })
      fields[at + 3], fields[at + 4] = '\2' .. digits(given), names[i]
      if not said[4] then edges[#edges + 1] = names[i] end
    end
  end
  if given > first then
    local at = #fields
    fields[at + 1], fields[at + 2] = GIVEN, digits(given)
    fields[at + 3], fields[at + 4] = PENDING, digits(pending + given - first)
  end
  if fields[1] then send('HSET', key, fields) end
  Flows.know_pending(id, known[1] or flow, pending + given - first)
  look_at(id, flow, edges)
  return edges[1] ~= nil
end

-- Refuses the call if a dependency of this queue that the job of this id is to wait for has no record. known: ids that are
-- about to have one. Looks at the types of the keys that tie them, too, before the first write.
function Flows.refuse_unknown(dependent, after, known)
  call('HLEN', deps_of(dependent))
  for i = 1, #after do
    local queue, id, _, is_to_come = spread(after[i])
    if queue == Outbox.here() and not is_to_come and not known[id] then
      call('LLEN', Q.prefix .. ':dependents:' .. id)
      load({ id })
      if not found(id) or is_over(J[id]) then refuse('NOTFOUND', id) end
    end
  end
end

-- All entries of a job: names, and what is in them, in their order.
local function entries_of(key)
  local numbers, given = {}, tonumber(call('HGET', key, GIVEN) or 0)
  for i = 1, given do numbers[i] = '\2' .. digits(i) end
  local names = read_many('HMGET', key, numbers)
  return names, read_many('HMGET', key, names)
end

-- Dependencies whose end counted, but was no success: a retry waits for them once more. Names and entries.
local function unfinished(key)
  local names, entries = entries_of(key)
  local some, theirs = {}, {}
  for i = 1, #names do
    local entry = decode(entries[i])
    if counts(entry[2], entry[3]) and entry[3] ~= 'c' and entry[2] ~= 'i' then
      some[#some + 1], theirs[#theirs + 1] = names[i], entry
    end
  end
  return some, theirs
end

-- The ids of those of this queue.
function Flows.to_look_at_again(job)
  local ids, names = {}, unfinished(deps_of(job.id))
  for i = 1, #names do
    local queue, id = string.match(names[i], '^(.-)%z(.*)$')
    if queue == Outbox.here() then ids[#ids + 1] = id end
  end
  return ids
end

function Flows.look_again(job)
  local key = deps_of(job.id)
  local names, entries = unfinished(key)
  local fields, values = {}, {}
  for i = 1, #names do
    values[i] = '\1' .. names[i]
    fields[2 * i - 1], fields[2 * i] = names[i], encode({ entries[i][1], entries[i][2], '' })
  end
  call('HDEL', key, FAILED, AWAITED)
  if names[1] then
    send('HSET', key, fields)
    send('HDEL', key, values)
    call('HINCRBY', key, PENDING, #names)
    look_at(job.id, call('HGET', key, FLOW), names)
  end
end

local SAID = { f = 'failed', x = 'was cancelled', r = 'was removed' }

-- Why the job has to fail, packed, if one of its dependencies has failed it.
function Flows.cause(job)
  local key = deps_of(job.id)
  local name = call('HGET', key, FAILED)
  if not name then return nil end
  local found_values = call('HMGET', key, name, '\1' .. name)
  local state, failure = decode(found_values[1])[3], found_values[2] and decode(found_values[2])
  if failure and failure[1] == BY_DEPENDENCY then return found_values[2] end
  local said = SAID[state]
  if failure and state == 'r' then
    said = failure[1] == 'DependencyNotFound' and 'is not known' or 'was refused: ' .. failure[2]
  elseif failure then
    said = 'failed: ' .. failure[1] .. ': ' .. failure[2]
  end
  return failure_of(BY_DEPENDENCY, 'dependency ' .. string.gsub(name, '%z', '/', 1) .. ' ' .. said)
end

-- Ends a job that a dependency has failed. settling: as finish().
function Flows.fail(job, cause, settling)
  set_failure(job, cause)
  local group, row = finish(job, 'f', 'failed', settling)
  local said = decode(cause)
  put(group, row, 'et', said[1])
  put(group, row, 'em', said[2])
  return group, row
end

-- A running job is to wait for its dependencies. Why it has to fail instead, packed: it has waited for all of them
-- before, and would run again for ever.
function Flows.await(job)
  if Flows.is_parent(job) then
    local key = deps_of(job.id)
    local known = call('HMGET', key, GIVEN, PENDING, AWAITED)
    if known[1] then -- else it was attached to nothing
      call('HSET', key, AWAITED, known[1])
      if tonumber(known[2]) > 0 or known[1] ~= known[3] then return nil end
    end
  end
  return failure_of('NothingToWaitFor', FAILURE_TEXTS.NothingToWaitFor)
end

-- After its event: fails a job that a dependency has failed, unless it is active.
function Flows.conclude(job)
  if job.gone or job.state == 'a' or ENDED[job.state] then return end
  local cause = Flows.cause(job)
  if cause then Flows.fail(job, cause) end
end

local function unblock(job)
  if job.run_at > Q.now then schedule(job, job.run_at) else enter_waiting(job) end
  emit('unblocked', job)
end

-- A dependency of a job of this queue has ended: {id, flow, queue, id of the dependency, state, value}.
function Flows.done(said)
  local id, state = said[1], said[5]
  local name = said[3] .. '\0' .. said[4]
  local deps = Flows.deps_with(id, name)
  if deps.flow ~= said[2] or not deps.entries[name] then return end
  local entry = decode(deps.entries[name])
  local policy, fails = entry[2], state ~= 'c' and entry[2] ~= 'i'
  if counts(policy, entry[3]) then return end
  local is_final = counts(policy, state)
  local pending = deps.pending - (is_final and 1 or 0)
  deps.pending = pending
  Flows.note_entry(deps, name, { entry[1], policy, state }, said[6])
  if not said[6] and entry[3] ~= '' then call('HDEL', deps_of(id), '\1' .. name) end
  if not is_final then return end
  if fails then call('HSETNX', deps_of(id), FAILED, name) end
  if Q.giving == id or (pending > 0 and not fails) then return end
  load({ id })
  local job = found(id)
  if not job then return end
  if fails then
    Flows.conclude(job)
  elseif job.state == 'b' and job.by == 'h' then
    unblock(job)
  end
end

-- The job has failed for good: its letter goes to the queue's dead_letter, if it has one.
function Outbox.bury(job)
  if not Q.dead_letter then Q.dead_letter = read_settings() end
  local target, handled_by = Q.dead_letter.dead_letter, Q.dead_letter.dead_letter_options or ''
  if not target then return end
  if handled_by == '' then handled_by = Q.dead_letter.dead_letter_task or '' end
  need_static(job)
  local failure, task = job.failure or call('HGET', K.failures, job.id) or '', options_of(job.header).task
  Outbox.send(target, 'x' .. pack('>I6I6I4HHHI4', job.inc, Q.now, job.failures, #job.id, #handled_by, #task, #failure)
    .. job.id .. handled_by .. task .. failure .. payload_of(job))
end

-- Remembers that jobs of this queue have dependents in others, for obliterate.
function Flows.note_ties(annex)
  local dependents = annex.dn or {}
  for i = 1, #dependents do
    if dependents[i][1] ~= Outbox.here() and not Q.tied then
      Q.tied = call('HSET', K.meta, 'tied', '1')
    end
  end
end

-- What a job knows of others goes with its record, or with this life of its id.
function Flows.untie(job)
  local annex = annex_of(job)
  if annex.dp then
    call('UNLINK', deps_of(job.id))
    call('SREM', K.parents, job.id)
  end
  if annex.dl then
    call('UNLINK', Q.prefix .. ':dependents:' .. job.id)
    call('SREM', K.linked, job.id)
  end
end

end
