-- Events: what happened in a call, in columns, as one entry of the stream (core/event.py describes the format).
--
-- A group is a run of events of one type: columns, each a list with a value per event, and common, the columns that have
-- the same value for all of them. emit() writes any event; hot verbs write columns themselves.

local NUMBERS = STORED.numbers

local function new_group(kind, common)
  local group = { kind = kind, n = 0, columns = {}, common = common }
  Q.groups[#Q.groups + 1] = group
  return group
end

-- Turn the common columns into lists, because the next event has other values there.
local function spread_common(group)
  for name, value in pairs(group.common) do
    local values = {}
    for row = 1, group.n do values[row] = value end
    group.columns[name] = values
  end
  group.common = nil
end

-- Return the group for events of a type that share the values of common (compared as a table, not by content). common nil:
-- for events that share none.
local function group_for(kind, common)
  local group = Q.groups[#Q.groups]
  if not group or group.kind ~= kind then return new_group(kind, common) end
  if group.common and group.common ~= common then spread_common(group) end
  return group
end

local function put(group, row, name, value)
  local values = group.columns[name]
  if not values then
    values = {}
    group.columns[name] = values
  end
  values[row] = value
end

-- Begin an event in a group that may have lost its common columns.
local function begin_row(group, common)
  local row = group.n + 1
  group.n = row
  if not group.common then
    for name, value in pairs(common) do put(group, row, name, value) end
  end
  return row
end

-- Write an event of a job, with the state after it ('' without a record). Callers may put more columns in its row.
local function emit(kind, job, state)
  local group, options = group_for(kind, nil), options_of(job.header)
  local row = group.n + 1
  group.n, group.has_holes = row, true
  put(group, row, 'id', job.id)
  put(group, row, 'inc', job.inc)
  put(group, row, 'enq', job.enq)
  put(group, row, 'rid', job.run_id)
  put(group, row, 'task', options.task)
  put(group, row, 'ver', options.version)
  put(group, row, 'st', state or STATES[job.state])
  put(group, row, 'run', job.runs)
  if job.has_links and Groups.key_of(job) then put(group, row, 'grp', job.group_key) end
  return group, row
end

-- Write an event of the queue itself.
local function emit_queue(kind, column, value)
  local group = new_group(kind, { [column or 'id'] = value or '' })
  group.n = 1
end

-- Return the column as it is stored: one value if all are equal, nothing if that is the default.
local function collapsed(group, name, values)
  local default = NUMBERS[name] and 0 or ''
  local first, same = values[1], true
  if first == nil then first = default end
  for row = 1, group.n do
    local value = values[row]
    if value == nil then
      values[row] = default
      value = default
    end
    if value ~= first then
      same = false
      if not group.has_holes then return values end
    end
  end
  if not same then return values end
  if first ~= default then return first end
end

local function stored_group(group)
  local entry = { t = group.kind, at = Q.now, n = group.n }
  if group.common then
    for name, value in pairs(group.common) do
      if value ~= '' and value ~= 0 then entry[name] = value end
    end
  end
  for name, values in pairs(group.columns) do entry[name] = collapsed(group, name, values) end
  return entry
end

local function write_events()
  local groups, stored, last = Q.groups, {}, Q.events
  if not groups[1] then return end
  for i = 1, #groups do
    stored[i] = stored_group(groups[i])
    last = last + groups[i].n
  end
  Metrics.add(groups)
  call('XADD', K.events, digits(last) .. '-0', 'e', encode(stored))
  Q.events = last
end
