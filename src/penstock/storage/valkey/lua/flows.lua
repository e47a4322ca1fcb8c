-- Flows: jobs that depend on others (docs/verbs.md).
--
-- deps:<id>   hash, of a job with dependencies; all fields but those of edges begin with a control character
--   queue '\0' id            MessagePack of {number, policy letter, state letter}: policy f fail, i ignore, w wait; state
--                            '' pending, c completed, f failed, x cancelled, r removed
--   '\1' queue '\0' id       the result, or MessagePack of the failure
--   '\2' number              queue '\0' id: their order
--   '\3flow' '\3given' '\3pending' '\3failed'     given: how many there are; pending: how many do not count yet; failed:
--                            the first that fails the job
--   '\3awaited'              how many there were when the job last waited for them
-- dependents:<id>   list of MessagePack of {queue, id, flow}: dependents that were added after the job
--
-- A block, because the library has no room for more names at its top. The verbs in enqueue.lua add Flows.put.

do

local FLOW, GIVEN, PENDING, FAILED, AWAITED = '\3flow', '\3given', '\3pending', '\3failed', '\3awaited'
local BY_DEPENDENCY = 'DependencyFailed'

local deps_of = Flows.deps_of

local function counts(policy, state)
  if policy == 'w' then return state == 'c' or state == 'r' end
  return state ~= ''
end

function Flows.is_parent(job)
  return job.has_links and extras_of(job).has_dependencies
end

-- Block the job if some of its dependencies do not count yet.
function Flows.maybe_block(job)
  if not Flows.is_parent(job) or Flows.pending(job.id) == 0 then return false end
  if job.group_role then Groups.wait_elsewhere(job) end
  job.state, job.by = 'b', 'h'
  changed(job)
  return true
end

-- Notifying dependents

-- Pass an end on. For dependents of this queue it is queued, so that long chains do not nest.
local function tell_dependent(dependent, id, state, value)
  if dependent[1] ~= Outbox.here() then
    return Outbox.send(dependent[1],
      'd' .. encode({ dependent[2], dependent[3], Outbox.here(), id, state, value or false }))
  end
  Q.ends = Q.ends or {}
  Q.ends[#Q.ends + 1] = { dependent[2], dependent[3], Outbox.here(), id, state, value or false }
end

function Flows.dependents(job)
  local extras, dependents = extras_of(job), {}
  for i = 1, #(extras.dependents or {}) do dependents[i] = extras.dependents[i] end
  if extras.has_later_dependents then
    local later = call('LRANGE', Q.prefix .. ':dependents:' .. job.id, 0, -1)
    for i = 1, #later do dependents[#dependents + 1] = decode(later[i]) end
  end
  return dependents
end

-- Return the result, or the failure without its traceback.
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

local function deliver_ends()
  if Q.is_delivering then return end
  Q.is_delivering = true
  local at = 1
  while Q.ends and Q.ends[at] do
    Flows.dependency_ended(Q.ends[at])
    Q.ends[at] = false
    at = at + 1
  end
  Q.ends, Q.is_delivering = false, false
end

function Flows.tell_all(dependents, id, state, value, but_not)
  for i = 1, #dependents do
    if dependents[i][1] ~= but_not then tell_dependent(dependents[i], id, state, value) end
  end
  deliver_ends()
end

-- Notify all dependents (except those of the queue named but_not) that the job has ended as state.
function Flows.tell(job, state, but_not)
  local extras = extras_of(job)
  if not (extras.dependents or extras.has_later_dependents) then return end
  Flows.tell_all(Flows.dependents(job), job.id, state, value_of(job, state), but_not)
end

-- Notify the dependents of a job that was refused.
function Flows.tell_refused(id, extras, text)
  local failure = encode({ 'CostTooHigh', text, '' })
  for i = 1, #(extras.dependents or {}) do tell_dependent(extras.dependents[i], id, 'r', failure) end
  deliver_ends()
end

-- Add dependents to a job that exists. If it has ended, notify them now.
function Flows.link_to(job, dependents)
  local extras, new = extras_of(job), {}
  for i = 1, #dependents do
    local is_known = false
    for j = 1, #(extras.dependents or {}) do
      local known = extras.dependents[j]
      if known[1] == dependents[i][1] and known[2] == dependents[i][2] and known[3] == dependents[i][3] then
        is_known = true
      end
    end
    if not is_known then new[#new + 1] = encode(dependents[i]) end
  end
  if new[1] and job.state ~= 'c' then
    send('RPUSH', Q.prefix .. ':dependents:' .. job.id, new)
    call('SADD', K.linked, job.id)
    call('HSET', K.meta, 'tied', '1')
    if not extras.has_later_dependents then
      need_static(job)
      extras.has_later_dependents, job.has_links = true, true
      extras_changed(job)
    end
  end
  if ENDED[job.state] then
    local value = value_of(job, job.state)
    for i = 1, #dependents do tell_dependent(dependents[i], job.id, job.state, value) end
  end
  deliver_ends()
end

function Flows.link(id, dependent)
  load({ id })
  local job = job_for(id)
  if job and not is_over(job) then return Flows.link_to(job, { dependent }) end
  local message = message_of('DependencyNotFound', Outbox.here() .. '/' .. id)
  tell_dependent(dependent, id, 'r', failure_of('DependencyNotFound', message))
  deliver_ends()
end

-- Dependencies

-- Register the job of this id as a dependent of others (queue '\0' id). Those that have ended count immediately; the caller
-- handles the consequences for the job itself.
local function link_dependencies(id, flow, edges)
  local here = Outbox.here()
  Q.adding_to = id
  for i = 1, #edges do
    local queue, on = string.match(edges[i], '^(.-)%z(.*)$')
    if queue == here then
      Flows.link(on, { here, id, flow })
    else
      Outbox.send(queue, 'l' .. encode({ on, { here, id, flow } }))
    end
  end
  Q.adding_to = false
end

-- Give the job of this id entries for after: {queue, id, policy letter, whether it will report by itself} each. Return
-- whether some of them may have ended.
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
      local dependency, at = after[i - 3], #fields
      seen[names[i]], given = true, given + 1
      fields[at + 1], fields[at + 2] = names[i], encode({ given, dependency[3], '' })
      fields[at + 3], fields[at + 4] = '\2' .. digits(given), names[i]
      if not dependency[4] then edges[#edges + 1] = names[i] end
    end
  end
  if given > first then
    local at = #fields
    fields[at + 1], fields[at + 2] = GIVEN, digits(given)
    fields[at + 3], fields[at + 4] = PENDING, digits(pending + given - first)
  end
  if fields[1] then send('HSET', key, fields) end
  Flows.know_pending(id, known[1] or flow, pending + given - first)
  link_dependencies(id, flow, edges)
  return edges[1] ~= nil
end

-- Refuse the call if a dependency in this queue of the job of this id has no record. known: ids that will have one. Also
-- check the types of the keys that link them, before the first write.
function Flows.refuse_unknown(dependent, after, known)
  call('HLEN', deps_of(dependent))
  for i = 1, #after do
    local queue, id, _, is_to_come = spread(after[i])
    if queue == Outbox.here() and not is_to_come and not known[id] then
      call('LLEN', Q.prefix .. ':dependents:' .. id)
      load({ id })
      if not job_for(id) or is_over(J[id]) then refuse('NOTFOUND', id) end
    end
  end
end

-- Return the names and entries of all dependencies of a job, in their order.
local function entries_of(key)
  local numbers, given = {}, tonumber(call('HGET', key, GIVEN) or 0)
  for i = 1, given do numbers[i] = '\2' .. digits(i) end
  local names = read_many('HMGET', key, numbers)
  return names, read_many('HMGET', key, names)
end

-- Return the names and entries of dependencies that ended without success, and counted: a retry waits for them again.
local function unfinished(key)
  local names, entries = entries_of(key)
  local unfinished_names, unfinished_entries = {}, {}
  for i = 1, #names do
    local entry = decode(entries[i])
    if counts(entry[2], entry[3]) and entry[3] ~= 'c' and entry[2] ~= 'i' then
      unfinished_names[#unfinished_names + 1], unfinished_entries[#unfinished_entries + 1] = names[i], entry
    end
  end
  return unfinished_names, unfinished_entries
end

-- Return the ids of the unfinished dependencies in this queue.
function Flows.ids_to_wait_for_again(job)
  local ids, names = {}, unfinished(deps_of(job.id))
  for i = 1, #names do
    local queue, id = string.match(names[i], '^(.-)%z(.*)$')
    if queue == Outbox.here() then ids[#ids + 1] = id end
  end
  return ids
end

function Flows.wait_again(job)
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
    link_dependencies(job.id, call('HGET', key, FLOW), names)
  end
end

local MESSAGES = { f = 'DependencyFailed', x = 'DependencyCancelled', r = 'DependencyRemoved' }

-- Return the packed failure of a job that one of its dependencies has failed, or nil.
function Flows.cause(job)
  local key = deps_of(job.id)
  local name = call('HGET', key, FAILED)
  if not name then return nil end
  local values = call('HMGET', key, name, '\1' .. name)
  local state, failure = decode(values[1])[3], values[2] and decode(values[2])
  if failure and failure[1] == BY_DEPENDENCY then return values[2] end
  local ref, message = string.gsub(name, '%z', '/', 1), nil
  if not failure then
    message = message_of(MESSAGES[state], ref)
  elseif state == 'f' then
    message = message_of('DependencyFailedWith', ref, failure[1], failure[2])
  elseif failure[1] == 'DependencyNotFound' then
    message = message_of('DependencyUnknown', ref)
  else
    message = message_of('DependencyRefused', ref, failure[2])
  end
  return failure_of(BY_DEPENDENCY, message)
end

-- Fail a job because of a dependency. settling: as in finish().
function Flows.fail(job, cause, settling)
  set_failure(job, cause)
  local group, row = finish(job, 'f', 'failed', settling)
  local failure = decode(cause)
  put(group, row, 'et', failure[1])
  put(group, row, 'em', failure[2])
  return group, row
end

-- Let a running job wait for its dependencies. Return a packed failure if it must not: it has waited for all of them
-- before, and would run again forever.
function Flows.await(job)
  if Flows.is_parent(job) then
    local key = deps_of(job.id)
    local known = call('HMGET', key, GIVEN, PENDING, AWAITED)
    if known[1] then -- else no dependency was ever attached
      call('HSET', key, AWAITED, known[1])
      if tonumber(known[2]) > 0 or known[1] ~= known[3] then return nil end
    end
  end
  return failure_of('NothingToWaitFor', FAILURE_TEXTS.NothingToWaitFor)
end

-- Fail the job if a dependency has failed it, unless it is active. Call it after the event of the job.
function Flows.conclude(job)
  if job.gone or job.state == 'a' or ENDED[job.state] then return end
  local cause = Flows.cause(job)
  if cause then Flows.fail(job, cause) end
end

local function unblock(job)
  if job.run_at > Q.now then schedule(job, job.run_at) else enter_waiting(job) end
  emit('unblocked', job)
end

-- A dependency of a job of this queue has ended. ending: {id, flow, queue, id of the dependency, state, value}.
function Flows.dependency_ended(ending)
  local id, state = ending[1], ending[5]
  local name = ending[3] .. '\0' .. ending[4]
  local deps = Flows.deps_with(id, name)
  if deps.flow ~= ending[2] or not deps.entries[name] then return end
  local entry = decode(deps.entries[name])
  local policy, fails = entry[2], state ~= 'c' and entry[2] ~= 'i'
  if counts(policy, entry[3]) then return end
  local is_final = counts(policy, state)
  local pending = deps.pending - (is_final and 1 or 0)
  deps.pending = pending
  Flows.note_entry(deps, name, { entry[1], policy, state }, ending[6])
  if not ending[6] and entry[3] ~= '' then call('HDEL', deps_of(id), '\1' .. name) end
  if not is_final then return end
  if fails then call('HSETNX', deps_of(id), FAILED, name) end
  if Q.adding_to == id or (pending > 0 and not fails) then return end
  load({ id })
  local job = job_for(id)
  if not job then return end
  if fails then
    Flows.conclude(job)
  elseif job.state == 'b' and job.by == 'h' then
    unblock(job)
  end
end

-- Send the dead letter of a job that has failed for good, if the queue has a dead_letter queue.
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

-- Note that jobs of this queue have dependents in others, for obliterate.
function Flows.note_links(extras)
  local dependents = extras.dependents or {}
  for i = 1, #dependents do
    if dependents[i][1] ~= Outbox.here() and not Q.noted_links then
      Q.noted_links = call('HSET', K.meta, 'tied', '1')
    end
  end
end

-- Drop what a job stores about its dependencies and dependents: with its record, or with this life of its id.
function Flows.drop_links(job)
  local extras = extras_of(job)
  if extras.has_dependencies then
    call('UNLINK', deps_of(job.id))
    call('SREM', K.parents, job.id)
  end
  if extras.has_later_dependents then
    call('UNLINK', Q.prefix .. ':dependents:' .. job.id)
    call('SREM', K.linked, job.id)
  end
end

end
