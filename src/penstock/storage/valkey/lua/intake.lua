-- Intake: new jobs, many at once. What enqueue and enqueue_flows do about ids that have no record and are to be run now; the
-- lists are apart from the buffers because every job adds to each of them.

local Intake = {}

do

function Intake.new()
  return {
    n = 0, commons = {}, statics = list_in(set_fields, 'jobs'), line = {}, enqueued_at = pack('>I6', Q.now),
    blocked = 0,
  }
end

-- What new jobs with this header share in their events.
local function common_of(commons, header)
  local options = options_of(header)
  local common = { task = options.task, ver = options.version, st = 'waiting', enq = Q.now }
  commons[header] = common
  return common
end

-- A body with flags: what else its event says, and its place if that is not in the line. Returns the payload's size.
local function enqueue_flagged(intake, group, row, id, body)
  local said = read_body({ id = id, number = Q.seq, pristine = true }, body)
  put(group, row, 'rid', said.run_id)
  put(group, row, 'pri', said.priority)
  if said.ttl > 0 then zadd('expiring', Q.now + said.ttl, id) end
  group.has_holes = true
  if said.lifo or said.priority ~= 0 then
    zadd('waiting', said.priority, member_of(said))
  else
    intake.line[#intake.line + 1] = pack('>I6', Q.seq) .. id
  end
  return #body - said.payload_at + 1
end

-- The common case: without a special, and without an annex that binds. Strings only, no table.
function Intake.put_plain(intake, id, body)
  local seq, n, flags = Q.seq + 1, intake.n + 2, byte(body, 1)
  local header = (flags < 32 or flags == 64) and sub(body, 2, 7) or read_body({}, body).header
  local common = intake.commons[header] or common_of(intake.commons, header)
  local number, statics = pack('>I6', seq), intake.statics
  local group = group_for('enqueued', common)
  local row, columns, size = begin_row(group, common), group.columns, nil
  Q.seq, intake.n = seq, n
  statics[n - 1], statics[n] = id, number .. intake.enqueued_at .. body
  if flags == 0 or flags == 64 then
    size = #body - (flags == 0 and 7 or 11 + unpack('>I4', body, 8))
    intake.line[#intake.line + 1] = number .. id
  else
    size = enqueue_flagged(intake, group, row, id, body)
  end
  if row == 1 then
    columns.id, columns.inc, columns.size = { id }, { seq }, { size }
  else
    columns.id[row], columns.inc[row] = id, seq
    put(group, row, 'size', size)
  end
end

-- Whether the group of a new job has room for it; else the job is blocked, in its record, too. named: its header, then the
-- length and the run_id, if there is one.
local function enter_group(id, named, annex, number)
  local group = Groups.of(annex.g)
  local cost = annex.c or 1
  Groups.use(2)
  Groups.touch(group)
  if group.b == 0 and not Groups.why(group, { cost = cost }) then
    group.w, group.cost = group.w + 1, group.cost + cost
    return true
  end
  local lining = group.lining
  group.b = group.b + 1
  lining[#lining + 1] = 0
  lining[#lining + 1] = '\2' .. number .. '1' .. id
  local ending = Shortcut.FRESH_END .. named
  if #named > 6 then -- a run_id, with its length before it
    ending = sub(Shortcut.FRESH_END, 1, -3) .. sub(named, 7, 8) .. sub(named, 1, 6) .. sub(named, 9)
  end
  hset('state', id, 'g-\0\0\0\0\0\0\0\0\0\0\0\0' .. number .. pack('>I6I6I4I6I6I6', Q.now, 0, 0, 0, 0, 0) .. ending)
  zadd('blocked', Q.seq, id)
  return false
end

-- A body with an annex that binds and is simple (shortcut.lua). False if its group blocks it.
local function enqueue_bound(intake, id, body, annex)
  local seq, n = draw(), intake.n + 2
  local number, key = pack('>I6', seq), annex.g
  local annex_at, shared_to = 8, 7
  if byte(body, 1) ~= 192 then annex_at, shared_to = Shortcut.places(body, 1) end
  local named = sub(body, 2, shared_to)
  local waits = not key or enter_group(id, named, annex, number)
  if annex.hd then Holds.use() end
  intake.n, intake.statics[n - 1], intake.statics[n] = n, id, number .. intake.enqueued_at .. body
  if waits then intake.line[#intake.line + 1] = number .. id end
  local common = Shortcut.common_of('enqueued', named, waits and 'waiting' or 'blocked')
  common.enq = Q.now
  local events = group_for('enqueued', common)
  local row = begin_row(events, common)
  events.has_holes = true
  put(events, row, 'id', id)
  put(events, row, 'inc', seq)
  put(events, row, 'size', #body - annex_at - 3 - unpack('>I4', body, annex_at))
  if key then put(events, row, 'grp', key) end
  return waits
end

-- Puts any other job in. False if its group blocks it. special: as in enqueue.lua, a simple one.
function Intake.put(intake, id, body, annex, special)
  local waits = true
  if annex then waits = enqueue_bound(intake, id, body, annex) else Intake.put_plain(intake, id, body) end
  if not waits then intake.blocked = intake.blocked + 1 end
  if type(special) == 'table' then
    if special[10] then Dedup.note({ id = id, inc = Q.seq }, special[10], special[11], special[12]) end
    special = special[4]
  end
  if special and special ~= '' then add_waiter(id, special) end
  return waits
end

-- After the last job. What was blocked is sent: groups may be filled yet, and read it then.
function Intake.finish(intake)
  Q.wake = Q.wake or intake.n > 2 * intake.blocked
  if intake.blocked > 0 then flush() end
  if intake.line[1] then send('RPUSH', K.line, intake.line) end
end

-- Which jobs of a call go that way

-- Whether a new job is to be run now, whatever else its special says; and nothing stands for its dedup key.
local function is_simple(special, keys_given_twice)
  if type(special) ~= 'table' then return true end
  local key = special[10]
  if special[1] ~= 0 or special[2] >= 0 or special[13] then return false end
  return not key or not keys_given_twice[key] and not Dedup.read(key)
end

-- Reads the records of dedup keys. Returns those keys that are given twice.
local function read_dedup(specials)
  local keys, seen, twice = {}, {}, {}
  for _, special in pairs(specials) do
    local key = type(special) == 'table' and special[10]
    if key then
      keys[#keys + 1] = key
      twice[key], seen[key] = seen[key], true
    end
  end
  if keys[1] then Dedup.read_all(keys) end
  return twice, keys
end

-- The places of ids that need all the rules: known ones, those given twice, those with something special, those whose
-- annex binds in other ways than are simple (shortcut.lua); all of them, if some may wait for others. Returns the annexes of
-- the simple ones as well.
function Intake.sort(ids, specials, args, first_at, all)
  local known, hard, hard_ids, seen, annexes = read_many('HMGET', K.jobs, ids), {}, {}, {}, {}
  local keys_given_twice, keys = read_dedup(specials)
  for place = 1, #ids do
    local id, body, special = ids[place], args[first_at + 2 * place], specials[place]
    local is_hard = all or known[place] or seen[id] or special and not is_simple(special, keys_given_twice)
    if byte(body, 1) >= 128 then
      annexes[place] = Shortcut.annex_of_body(body)
      is_hard = is_hard or not annexes[place]
    end
    if is_hard then
      hard[place] = true
      hard_ids[#hard_ids + 1] = id
      if seen[id] and seen[id] ~= true then hard[seen[id]] = true end
      seen[id] = true
    else
      seen[id] = place
    end
  end
  load(hard_ids, true)
  if keys[1] then Dedup.load_all(keys) end
  return hard, annexes
end

-- Refuses a job that costs more than the bucket of its group can hold: it could never start. Returns the groups there are.
function Intake.check_costs(ids, hard, annexes, args, first_at)
  local groups = {}
  for place = 1, #ids do
    local annex = annexes[place] or hard[place] and Shortcut.any_annex_of_body(args[first_at + 2 * place])
    if annex and annex.g then groups[#groups + 1] = annex.g end
    local refusal = annex and annex.c and Groups.cost_refused(ids[place], annex)
    if refusal then refuse('COST', refusal) end
  end
  return groups
end

end
