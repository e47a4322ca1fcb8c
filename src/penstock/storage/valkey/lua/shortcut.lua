-- Shortcuts for jobs that have extras, possibly a run_id and a write_id, but nothing else unusual. Their records are
-- spliced and their events written as columns, without a table for each. Other jobs take the long way, with the same
-- result.
--
-- A job is fresh if it never ran and has neither priority, ttl nor any outcome. If it has a state record, that has FRESH_END
-- from expires_at up to the header, which is a reference; a job with a run_id there goes the long way.

do

local EXTRAS_KNOWN, EXTRAS_KEPT = 1000, 256
-- The flags of a body with extras that have links. A run_id (8) and a write_id (16) may precede them, and nothing else.
local LINKED = { [192] = true, [200] = true, [208] = true, [216] = true }
-- The same, whether or not the extras have links.
Shortcut.MAY_BE_FRESH = {
  [64] = true, [72] = true, [80] = true, [88] = true, [192] = true, [200] = true, [208] = true, [216] = true,
}
Shortcut.FRESH_END = '\0\0\0\0\0\0\0\0\0\0\0\0\0\0@\0\0\0\0\0\0\0\0\6\0\0'
local NO_RUNS = '\0\0\0\0'
local BLOCKED, WAITING = 103, 119 -- the letters g and w
local STATIC_FLAGS_AT = 13

local known_extras, extras_count = {}, 0

-- Return the place after the MessagePack string that begins here; nil if there is none.
local function after_string(text, at)
  local kind = byte(text, at) or 0
  if kind >= 160 and kind <= 191 then return at + kind - 159 end
  if kind == 217 then return at + 2 + byte(text, at + 1) end
  if kind == 218 then return at + 3 + unpack('>H', text, at + 1) end
  return nil
end

-- Return the place after the map of headers that begins here; nil if they are many, or one is very long.
local function after_headers(text, at)
  local count = byte(text, at) - 128
  if count < 0 or count > 15 then return nil end
  at = at + 1
  for _ = 1, 2 * count do
    at = after_string(text, at)
    if not at then return nil end
  end
  return at
end

-- Return the extras packed at from..to, and the place where the decoded part begins. Headers differ from job to job, and
-- belong to the user. They are skipped if they come first, as Python writes them (core/job.py), after a count of two bytes.
-- The rest is the same for many jobs, and is decoded once; do not change it.
local function extras_at(text, from, to)
  local at = from
  -- 104 is the letter of the name h.
  if byte(text, from + 4) == 104 and byte(text, from) == 222 and byte(text, from + 3) == 161 then
    at = after_headers(text, from + 5) or from
  end
  local rest = sub(text, at, to)
  local extras = known_extras[rest]
  if extras then return extras, at end
  extras = decode(at > from and string.char(222, 0, byte(text, from + 2) - 1) .. rest or rest)
  if #rest <= EXTRAS_KEPT then
    if extras_count == EXTRAS_KNOWN then known_extras, extras_count = {}, 0 end
    known_extras[rest], extras_count = extras, extras_count + 1
  end
  return extras, at
end

-- Return the place of the extras (their length) in a body with one of the flags of MAY_BE_FRESH, and the place where its
-- header and run_id end: all jobs of a run have the same bytes up to there.
function Shortcut.places(text, flags_at)
  local flags, at = byte(text, flags_at), flags_at + 7
  local shared_to = at - 1
  if flags % 16 >= 8 then
    at = at + 2 + unpack('>H', text, at)
    shared_to = at - 1
  end
  if flags % 32 >= 16 then at = at + 2 + unpack('>H', text, at) end
  return at, shared_to
end

-- Return the extras in a body or static record with the flags at this place; nil if the flags are not in LINKED.
local function extras_in(text, flags_at)
  local flags = byte(text, flags_at)
  local at = flags_at + 7
  if flags ~= 192 then
    if not LINKED[flags] then return nil end
    at = Shortcut.places(text, flags_at)
  end
  return (extras_at(text, at + 4, at + 3 + unpack('>I4', text, at)))
end

-- Return packed extras as a table, maybe without headers. Do not change it.
function Shortcut.extras_of_packed(packed)
  return (extras_at(packed, 1, #packed))
end

function Shortcut.extras_of_static(static)
  return extras_in(static, STATIC_FLAGS_AT)
end

-- Return the extras in the body of a new job, if the job can take the shortcut into its queue.
function Shortcut.extras_of_body(body)
  local extras = extras_in(body, 1)
  return extras and not extras.has_dependencies and extras or nil
end

-- Return the extras in any body, or nil.
function Shortcut.any_extras_of_body(body)
  local flags = byte(body, 1)
  if LINKED[flags] then return extras_in(body, 1) end
  local packed = flags >= 64 and read_body({}, body).packed_extras
  return packed and Shortcut.extras_of_packed(packed) or nil
end

local function is_fresh(record, letter)
  return byte(record, 1) == letter and sub(record, 55, 80) == Shortcut.FRESH_END and sub(record, 33, 36) == NO_RUNS
end

function Shortcut.is_waiting(record)
  return is_fresh(record, WAITING)
end

-- Groups

-- Start a waiting job of these extras in its group's counts. Return false if it may not start now.
function Shortcut.start(extras)
  local group, cost = Groups.of(extras.group), extras.cost or 1
  if not Groups.can_start(group, cost) then return false end
  group.w, group.cost, group.a = group.w - 1, group.cost - cost, group.a + 1
  Groups.use(2)
  Groups.touch(group)
  Groups.charge(group, 1, cost)
  return true
end

-- Read blocked members of groups: fresh ones into Q.fresh, all others as jobs.
function Shortcut.load_blocked(ids)
  local unknown, others = {}, {}
  for i = 1, #ids do
    if J[ids[i]] == nil then unknown[#unknown + 1] = ids[i] end
  end
  local states, statics = read_many('HMGET', K.state, unknown), read_many('HMGET', K.jobs, unknown)
  Q.fresh = Q.fresh or {}
  for i = 1, #unknown do
    local id, record = unknown[i], states[i]
    local extras = record and statics[i] and is_fresh(record, BLOCKED) and extras_in(statics[i], STATIC_FLAGS_AT)
    if extras then
      local number = sub(record, 37, 42)
      if number == '\0\0\0\0\0\0' then number = sub(record, 15, 20) end
      Q.fresh[id] = {
        id = id, record = record, cost = extras.cost or 1, group_member = '\2' .. number .. '1' .. id, is_fresh = true,
      }
    else
      others[#others + 1] = id
    end
  end
  if others[1] then load(others, true) end
end

-- Return what jobs share in events of a kind. named: the header, then the length and the run_id, if there is one.
function Shortcut.common_of(kind, named, state)
  Q.commons = Q.commons or {}
  local commons = list_in(Q.commons, kind .. state)
  local common = commons[named]
  if not common then
    local options = options_of(sub(named, 1, 6))
    common = { task = options.task, ver = options.version, st = state, rid = sub(named, 9) }
    commons[named] = common
  end
  return common
end

-- Let a fresh blocked member enter waiting.
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

-- Read what settle needs about the links of jobs: groups, records of dedup keys, dependents.
function Shortcut.read_links(extras_by_id)
  local groups, keys = {}, {}
  for id, extras in pairs(extras_by_id) do
    if extras.group then groups[#groups + 1] = extras.group end
    if extras.dedup then keys[#keys + 1] = extras.dedup end
    if extras.dependents then Flows.expect(id, extras.dependents) end
  end
  Groups.read_for(groups)
  Dedup.read_all(keys)
  Flows.read_expected()
end

-- Return whether a job of these extras ends simply: no scheduler waits for it, and it has no dependencies.
function Shortcut.ends_simply(extras)
  return not (extras.repeats or extras.has_dependencies or extras.has_later_dependents)
end

-- End the links of an active job, as simple as that, which has completed.
function Shortcut.completed(id, inc, extras, result)
  if extras.group then
    local group = Groups.of(extras.group)
    group.a = group.a - 1
    Groups.use(2)
    Groups.touch(group)
  end
  if extras.dependents then Flows.tell_all(extras.dependents, id, 'c', result) end
  if extras.dedup then Dedup.ended(inc, extras.dedup) end
end

-- Holds

-- Return extras without the consumer's hold: {packed, longest hold that is left}.
local function without_hold(release, extras)
  local consumer, kept = release.consumer, release.cache[extras]
  if not kept then
    local other_extras, holds = {}, {}
    for name, value in pairs(extras) do other_extras[name] = value end
    for other, ms in pairs(extras.holds) do
      if other ~= consumer then holds[other] = ms end
    end
    other_extras.holds = next(holds) and holds or nil
    kept = { next(other_extras) and encode(other_extras) or '\128', Holds.longest(holds) }
    release.cache[extras] = kept
  end
  return kept
end

-- Return the packed extras of a job without the consumer's hold, and the longest hold before and after; nil if the consumer
-- does not hold the job, or if its record takes the long way. release: {consumer, cache: the values of without_hold() in
-- this call}. moved: the extras in the annex hash, if the job has them there.
function Shortcut.release(release, static, moved)
  local text, from, to = moved, 1, moved and #moved
  if not moved then
    if not LINKED[byte(static, STATIC_FLAGS_AT)] then return nil end
    local at = Shortcut.places(static, STATIC_FLAGS_AT)
    text, from, to = static, at + 4, at + 3 + unpack('>I4', static, at)
  end
  local extras, at = extras_at(text, from, to)
  local holds = extras.holds
  if not holds or not holds[release.consumer] then return nil end
  local kept = without_hold(release, extras)
  local packed = kept[1]
  if at > from then -- the headers were skipped: they come first again
    local entries = byte(packed, 1) - 127
    if entries > 16 then return nil end
    packed = string.char(222, 0, entries) .. sub(text, from + 3, at - 1) .. sub(packed, 2)
  end
  return packed, Holds.longest(holds), kept[2]
end

end
