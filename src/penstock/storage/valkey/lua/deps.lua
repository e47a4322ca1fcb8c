-- The dependencies of jobs (flows.lua describes deps:<id>), as this call knows them: ends are noted here, and written once
-- for each dependent.

do

local FLOW, PENDING = '\3flow', '\3pending'

local function key_of(id)
  return Q.prefix .. ':deps:' .. id
end

local function write(id, deps)
  if not deps.fields[1] then return end
  local fields = deps.fields
  fields[#fields + 1] = PENDING
  fields[#fields + 1] = digits(deps.pending)
  send('HSET', key_of(id), fields)
end

-- Return the key, after writing everything noted: for callers that read or write it themselves.
function Flows.deps_of(id)
  local deps = Q.deps and Q.deps[id]
  if deps then
    Q.deps[id] = nil
    write(id, deps)
  end
  return key_of(id)
end

function Flows.write_deps()
  for id, deps in pairs(Q.deps) do write(id, deps) end
  Q.deps = false
end

local function read(id, names)
  local fields = { FLOW, PENDING }
  for i = 1, #names do fields[i + 2] = names[i] end
  local values = read_many('HMGET', key_of(id), fields)
  local deps = { flow = values[1], pending = tonumber(values[2] or 0), entries = {}, fields = {} }
  for i = 1, #names do deps.entries[names[i]] = values[i + 2] end
  Q.deps = Q.deps or {}
  Q.deps[id] = deps
  return deps
end

-- Note what the call has read or written of a job's dependencies, without the entries.
function Flows.know_pending(id, flow, pending)
  Q.deps = Q.deps or {}
  Q.deps[id] = { flow = flow, pending = pending, entries = {}, fields = {} }
end

-- Return how many dependencies of a job are still pending.
function Flows.pending(id)
  local deps = Q.deps and Q.deps[id] or read(id, {})
  return deps.pending
end

-- The job of this id may end and notify its dependents: read_expected() reads their dependencies together.
function Flows.expect(id, dependents)
  local here = Outbox.here()
  Q.expected = Q.expected or {}
  for i = 1, #dependents do
    if dependents[i][1] == here then
      local names = list_in(Q.expected, dependents[i][2])
      names[#names + 1] = here .. '\0' .. id
    end
  end
end

function Flows.read_expected()
  for id, names in pairs(Q.expected or {}) do
    if not (Q.deps and Q.deps[id]) then read(id, names) end
  end
  Q.expected = false
end

-- Return the dependencies of the job of this id, with the entry of that name.
function Flows.deps_with(id, name)
  local deps = Q.deps and Q.deps[id]
  if deps and deps.entries[name] ~= nil then return deps end
  Flows.deps_of(id)
  return read(id, { name })
end

-- Replace an entry. value (false: none): the result, or the failure.
function Flows.note_entry(deps, name, entry, value)
  local fields, packed = deps.fields, encode(entry)
  deps.entries[name] = packed
  fields[#fields + 1] = name
  fields[#fields + 1] = packed
  if value then
    fields[#fields + 1] = '\1' .. name
    fields[#fields + 1] = value
  end
end

end
