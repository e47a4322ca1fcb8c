-- Intake: many new jobs at once, for enqueue and enqueue_flows: ids without a record, to run now. Its lists are separate
-- from the buffers because every job adds to each of them.

local Intake = {}

do

function Intake.new()
  return {
    n = 0, commons = {}, statics = list_in(set_fields, 'jobs'), line = {}, enqueued_at = pack('>I6', Q.now),
    blocked = 0,
  }
end

-- Return what new jobs with this header share in their events.
local function common_of(commons, header)
  local options = options_of(header)
  local common = { task = options.task, ver = options.version, st = 'waiting', enq = Q.now }
  commons[header] = common
  return common
end

-- Handle a body with flags: more columns of its event, and its place if that is not the line. Return the payload's size.
local function enqueue_flagged(intake, group, row, id, body)
  local job = read_body({ id = id, number = Q.seq, pristine = true }, body)
  put(group, row, 'rid', job.run_id)
  put(group, row, 'pri', job.priority)
  if job.ttl > 0 then zadd('expiring', Q.now + job.ttl, id) end
  group.has_holes = true
  if job.lifo or job.priority ~= 0 then
    zadd('waiting', job.priority, member_of(job))
  else
    intake.line[#intake.line + 1] = pack('>I6', Q.seq) .. id
  end
  return #body - job.payload_at + 1
end

-- Add a job in the common case: without a special, and without links. Strings only, no table.
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

-- Return whether the group of a new job has room for it; if not, block the job, in its record too. named: its header, then
-- the length and the run_id, if there is one.
local function enter_group(id, named, extras, number)
  local group = Groups.of(extras.group)
  local cost = extras.cost or 1
  Groups.use(2)
  Groups.touch(group)
  if group.b == 0 and not Groups.why(group, { cost = cost }) then
    group.w, group.cost = group.w + 1, group.cost + cost
    return true
  end
  local to_add = group.to_add
  group.b = group.b + 1
  to_add[#to_add + 1] = 0
  to_add[#to_add + 1] = '\2' .. number .. '1' .. id
  local ending = Shortcut.FRESH_END .. named
  if #named > 6 then -- a run_id, with its length before it
    ending = sub(Shortcut.FRESH_END, 1, -3) .. sub(named, 7, 8) .. sub(named, 1, 6) .. sub(named, 9)
  end
  hset('state', id, 'g-\0\0\0\0\0\0\0\0\0\0\0\0' .. number .. pack('>I6I6I4I6I6I6', Q.now, 0, 0, 0, 0, 0) .. ending)
  zadd('blocked', Q.seq, id)
  return false
end

-- Add a job with simple links (shortcut.lua). Return false if its group blocks it.
local function enqueue_linked(intake, id, body, extras)
  local seq, n = draw(), intake.n + 2
  local number, key = pack('>I6', seq), extras.group
  local extras_at, shared_to = 8, 7
  if byte(body, 1) ~= 192 then extras_at, shared_to = Shortcut.places(body, 1) end
  local named = sub(body, 2, shared_to)
  local waits = not key or enter_group(id, named, extras, number)
  if extras.holds then Holds.use() end
  intake.n, intake.statics[n - 1], intake.statics[n] = n, id, number .. intake.enqueued_at .. body
  if waits then intake.line[#intake.line + 1] = number .. id end
  local common = Shortcut.common_of('enqueued', named, waits and 'waiting' or 'blocked')
  common.enq = Q.now
  local events = group_for('enqueued', common)
  local row = begin_row(events, common)
  events.has_holes = true
  put(events, row, 'id', id)
  put(events, row, 'inc', seq)
  put(events, row, 'size', #body - extras_at - 3 - unpack('>I4', body, extras_at))
  if key then put(events, row, 'grp', key) end
  return waits
end

-- Add any other job. Return false if its group blocks it. special: as in enqueue.lua, a simple one.
function Intake.put(intake, id, body, extras, special)
  local waits = true
  if extras then waits = enqueue_linked(intake, id, body, extras) else Intake.put_plain(intake, id, body) end
  if not waits then intake.blocked = intake.blocked + 1 end
  if type(special) == 'table' then
    if special[10] then Dedup.note({ id = id, inc = Q.seq }, special[10], special[11], special[12]) end
    special = special[4]
  end
  if special and special ~= '' then add_waiter(id, special) end
  return waits
end

-- Finish after the last job. Blocked jobs are sent first, because filling groups may read them.
function Intake.finish(intake)
  Q.wake = Q.wake or intake.n > 2 * intake.blocked
  if intake.blocked > 0 then flush() end
  if intake.line[1] then send('RPUSH', K.line, intake.line) end
end

-- Choosing the jobs of a call for intake

-- Return whether a new job is to run now, whatever else its special says, and no record stands for its dedup key.
local function is_simple(special, keys_given_twice)
  if type(special) ~= 'table' then return true end
  local key = special[10]
  if special[1] ~= 0 or special[2] >= 0 or special[13] then return false end
  return not key or not keys_given_twice[key] and not Dedup.read(key)
end

-- Read the records of dedup keys. Return the keys that occur twice.
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

-- Return the places of ids that need all the rules: known ones, repeated ones, those with unusual specials, those with links
-- that are not simple (shortcut.lua); all of them, if some may wait for others. Also return the extras of the simple ones.
function Intake.sort(ids, specials, args, first_at, all)
  local known, hard, hard_ids, seen, extras_by_place = read_many('HMGET', K.jobs, ids), {}, {}, {}, {}
  local keys_given_twice, keys = read_dedup(specials)
  for place = 1, #ids do
    local id, body, special = ids[place], args[first_at + 2 * place], specials[place]
    local is_hard = all or known[place] or seen[id] or special and not is_simple(special, keys_given_twice)
    if byte(body, 1) >= 128 then
      extras_by_place[place] = Shortcut.extras_of_body(body)
      is_hard = is_hard or not extras_by_place[place]
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
  return hard, extras_by_place
end

-- Refuse jobs that cost more than the bucket of their group can hold: they could never start. Return the groups.
function Intake.check_costs(ids, hard, extras_by_place, args, first_at)
  local groups = {}
  for place = 1, #ids do
    local extras = extras_by_place[place] or hard[place] and Shortcut.any_extras_of_body(args[first_at + 2 * place])
    if extras and extras.group then groups[#groups + 1] = extras.group end
    local refusal = extras and extras.cost and Groups.cost_refused(ids[place], extras)
    if refusal then refuse('COST', refusal) end
  end
  return groups
end

end
