-- Shortcuts: the way of jobs that have an annex, but nothing else out of the common. Their records are spliced and their
-- events written as columns, without a table for each; what is not that simple goes the long way, to the same end.
--
-- A job is fresh if it never ran and has neither priority, ttl, run_id nor anything that came of it: its state record
-- then has FRESH_END from expires_at up to the header, which is a reference.

do

local ANNEXES_KNOWN, ANNEX_KEPT = 1000, 256
local BOUND = 192 -- the flags of a body: an annex that binds, and nothing else
Shortcut.FRESH_END = '\0\0\0\0\0\0\0\0\0\0\0\0\0\0@\0\0\0\0\0\0\0\0\6\0\0'
local NO_RUNS = '\0\0\0\0'
local BLOCKED, WAITING = 103, 119 -- the letters g and w
local STATIC_FLAGS_AT = 13

local known_annexes, annexes_count = {}, 0

-- What a packed annex says: a table that others have, too, so it is not to be changed.
local function annex_of_packed(packed)
  local annex = known_annexes[packed]
  if annex then return annex end
  annex = decode(packed)
  if #packed <= ANNEX_KEPT then
    if annexes_count == ANNEXES_KNOWN then known_annexes, annexes_count = {}, 0 end
    known_annexes[packed], annexes_count = annex, annexes_count + 1
  end
  return annex
end

-- The annex in a body, or in a static record, that has the flags at this place; nil if it has others than BOUND.
local function annex_in(text, flags_at)
  if byte(text, flags_at) ~= BOUND then return nil end
  local length = unpack('>I4', text, flags_at + 7)
  return annex_of_packed(sub(text, flags_at + 11, flags_at + 10 + length))
end

Shortcut.annex_of_packed = annex_of_packed

function Shortcut.annex_of_static(static)
  return annex_in(static, STATIC_FLAGS_AT)
end

-- The annex in the body of a new job, if the job can go the short way into its queue.
function Shortcut.annex_of_body(body)
  local annex = annex_in(body, 1)
  return annex and not (annex.hd or annex.dp) and annex or nil
end

-- The annex in any body, or nil.
function Shortcut.any_annex_of_body(body)
  local flags = byte(body, 1)
  if flags == BOUND then return annex_in(body, 1) end
  local packed = flags >= 64 and read_body({}, body).packed_annex
  return packed and annex_of_packed(packed) or nil
end

local function is_fresh(record, letter)
  return byte(record, 1) == letter and sub(record, 55, 80) == Shortcut.FRESH_END and sub(record, 33, 36) == NO_RUNS
end

function Shortcut.is_waiting(record)
  return is_fresh(record, WAITING)
end

-- Groups

-- The cost of one that waits and may start now, its group counting it as active from here on; false: it may not.
function Shortcut.start(annex)
  local group, cost = Groups.of(annex.g), annex.c or 1
  if not Groups.can_start(group, cost) then return false end
  group.w, group.cost, group.a = group.w - 1, group.cost - cost, group.a + 1
  Groups.use(2)
  Groups.touch(group)
  Groups.charge(group, 1, cost)
  return true
end

-- Reads blocked members of groups: fresh ones into Q.fresh, all others as jobs.
function Shortcut.load_blocked(ids)
  local unknown, others = {}, {}
  for i = 1, #ids do
    if J[ids[i]] == nil then unknown[#unknown + 1] = ids[i] end
  end
  local states, statics = read_many('HMGET', K.state, unknown), read_many('HMGET', K.jobs, unknown)
  Q.fresh = Q.fresh or {}
  for i = 1, #unknown do
    local id, record = unknown[i], states[i]
    local annex = record and statics[i] and is_fresh(record, BLOCKED) and annex_in(statics[i], STATIC_FLAGS_AT)
    if annex then
      local number = sub(record, 37, 42)
      if number == '\0\0\0\0\0\0' then number = sub(record, 15, 20) end
      Q.fresh[id] = {
        id = id, record = record, cost = annex.c or 1, group_member = '\2' .. number .. '1' .. id, is_fresh = true,
      }
    else
      others[#others + 1] = id
    end
  end
  if others[1] then load(others, true) end
end

-- What jobs with this header share in events of a kind.
function Shortcut.common_of(kind, header, state)
  Q.commons = Q.commons or {}
  local commons = list_in(Q.commons, kind .. state)
  local common = commons[header]
  if not common then
    local options = options_of(header)
    common = { task = options.task, ver = options.version, st = state }
    commons[header] = common
  end
  return common
end

-- A fresh blocked member enters waiting.
function Shortcut.admit(group, job)
  local id, record, number = job.id, job.record, pack('>I6', draw())
  group.b, group.w, group.cost, group.is_changed = group.b - 1, group.w + 1, group.cost + job.cost, true
  hset('state', id, 'w' .. sub(record, 2, 36) .. number .. sub(record, 43, 48) .. pack('>I6', Q.now) .. sub(record, 55))
  zrem('blocked', id)
  zadd('waiting', 0, '\2' .. number .. '1' .. id)
  Q.wake = true
  local common = Shortcut.common_of('unblocked', sub(record, 81, 86), 'waiting')
  local events = group_for('unblocked', common)
  local row = begin_row(events, common)
  local inc, enq = unpack('>I6I6', record, 15)
  local columns = events.columns
  events.has_holes = true
  if row == 1 then
    columns.id, columns.inc, columns.enq = { id }, { inc }, { enq }
  else
    columns.id[row], columns.inc[row], columns.enq[row] = id, inc, enq
  end
  put(events, row, 'grp', group.key)
end

-- The end

-- What settle will ask of the ties of jobs, read at once: groups, records of dedup keys, dependents.
function Shortcut.read_ties(annexes)
  local groups, keys = {}, {}
  for id, annex in pairs(annexes) do
    if annex.g then groups[#groups + 1] = annex.g end
    if annex.d then keys[#keys + 1] = annex.d end
    if annex.dn then Flows.expect(id, annex.dn) end
  end
  Groups.read_for(groups)
  Dedup.read_all(keys)
  Flows.read_expected()
end

-- Whether the end of a job of this annex is simple: nothing holds it, and it does not depend on others.
function Shortcut.ends_simply(annex)
  return not (annex.hd or annex.r or annex.dp or annex.dl)
end

-- An active job, which is as simple, has completed.
function Shortcut.completed(id, inc, annex, result)
  if annex.g then
    local group = Groups.of(annex.g)
    group.a = group.a - 1
    Groups.use(2)
    Groups.touch(group)
  end
  if annex.dn then Flows.tell_all(annex.dn, id, 'c', result) end
  if annex.d then Dedup.ended(inc, annex.d) end
end

end
