-- What jobs know of those they depend on (flows.lua has the layout of deps:<id>), as far as the call under way has got:
-- ends are noted here, and written once for each job that was told of some.

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

-- The key, which has all that was noted: for those that read or write it themselves.
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
  local found_values = read_many('HMGET', key_of(id), fields)
  local deps = { flow = found_values[1], pending = tonumber(found_values[2] or 0), entries = {}, fields = {} }
  for i = 1, #names do deps.entries[names[i]] = found_values[i + 2] end
  Q.deps = Q.deps or {}
  Q.deps[id] = deps
  return deps
end

-- What the call has read or written of a job, without its entries.
function Flows.know_pending(id, flow, pending)
  Q.deps = Q.deps or {}
  Q.deps[id] = { flow = flow, pending = pending, entries = {}, fields = {} }
end

-- How many dependencies of a job do not count yet.
function Flows.pending(id)
  local deps = Q.deps and Q.deps[id] or read(id, {})
  return deps.pending
end

-- The job of this id may be about to tell its dependents of its end: what those know is read at once by read_expected().
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

-- What the job of this id knows, with its entry for the dependency of that name.
function Flows.deps_with(id, name)
  local deps = Q.deps and Q.deps[id]
  if deps and deps.entries[name] ~= nil then return deps end
  Flows.deps_of(id)
  return read(id, { name })
end

-- The entry is this one now. value (false: none): the result, or the failure.
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
