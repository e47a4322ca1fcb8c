-- The prelude: keys, clock, counters, and buffered writes. library.py puts it before most other files.
--
-- Keys of a queue, all under one hash tag, and so in one slot: penstock:{<namespace>/<queue>/0}:<part>
--
--   meta       hash    counters (COUNTERS below), epoch, server and resumed (renew_epoch.lua), settings, trimmed, regroup
--                      (groups.lua), outbox (the last sequence), delivered (the last delivered sequence), tied (jobs of
--                      this queue have had dependents in other queues); m:<stream>, the last call of a stream and its
--                      answer, kept for a minute (replay.lua); clock (CLOCK below), once the clock was ever irregular
--   jobs       hash    id -> static record (record.lua): written once, rewritten only by change and re-dispatch
--   options    hash    reference -> header: the options of jobs, each stored once (record.lua)
--   state      hash    id -> state record (record.lua); absent while a job waits as it was enqueued ("pristine")
--   line       list    number:6 .. id of waiting jobs that are pristine, FIFO and of priority 0: most jobs, most of the
--                      time. In the order of numbers. Entries of jobs that have changed since are stale: claim skips
--                      them; the counter stale is their number
--   waiting    zset    priority -> order key .. pristine flag .. id (member_of) of all other waiting jobs
--   scheduled  zset    run_at -> id
--   blocked    zset    number (negative: LIFO) -> id
--   active     zset    lease_until -> id: the only place of the deadline, so that a heartbeat writes nothing else
--   completed, failed, cancelled   zset   kept_until -> id
--   instants   zset    instant of the wall clock -> id, of jobs due then: scheduled ones, and those waiting for others
--   expiring   zset    expires_at -> id, of jobs with a ttl that are scheduled, waiting or blocked
--   results    hash    id -> result, if it is too long for the state record
--   failures   hash    id -> MessagePack of core.outcome.Failure
--   progress   hash    id -> JSON
--   annex      hash    id -> the extras (core/job.py), once they differ from those in the static record
--   suspended  zset    timeout -> id, of jobs that wait for a signal with a timeout
--   received   hash    id -> data of the signal that ended its last suspension
--   signalled  set     ids with early signals;  signals:<id>  list  those signals (signals.lua)
--   stepped    set     ids with recorded steps;  steps:<id>  hash  name -> step;  step_results:<id>  hash  name -> a large
--                      result (steps.lua)
--   held:<consumer>    zset    finished_at -> id, of finished jobs held for it;  holders  hash  their names
--   held_completed, held_failed, held_cancelled   zset   end of the longest hold -> id, of finished jobs
--   error:<class>   zset   finished_at -> id, of failed jobs;  errors  hash  classes that may have jobs
--   metrics    hash    number of a minute modulo 1440 -> what happened in it (metrics.lua)
--   dedup      hash    dedup key -> the job that stands for it (dedup.lua);  dedup_times  zset  until -> dedup key
--   schedulers hash    name -> record with times and spec (schedulers.lua);  slots  zset  next slot -> name
--   damaged    hash    id -> the stored values of a record that cannot be read (quarantine.lua);  damaged_at  zset  when
--                      it was put aside -> id
--   logged     set     ids that have log lines;  log:<id>  list  the lines
--   unkept     hash    id -> the number of its log lines that were dropped, if any
--   rerun      hash    id -> the dispatch that waits for the end of an active job (slot.lua)
--   waiters    hash    id -> the listeners to notify of its end; the counter waiters is the number of such ids
--   parents    set     ids that have dependencies;  deps:<id>  hash  the states of those dependencies (flows.lua)
--   linked     set     ids that have later dependents;  dependents:<id>  list  the dependents to notify (flows.lua)
--   outbox     list    messages to other queues, in the order of their sequence (outbox.lua)
--   inbox      hash    queue -> sequence of the last message of its outbox that this queue has applied
--   news:<listener>    list    ends of jobs (waiters.lua), kept for a minute
--   wake       list    tokens, a few at most: there may be jobs to claim. Deleted when no job waits
--   limits     hash    group -> its limit;  groups  hash  group -> its counts (groups.lua). The empty group is the queue
--   group_keys zset    0 -> the groups that have a record, for walks in order
--   group:<group>      zset    its blocked members;  starts:<group>  list  the starts in its window
--   parked     zset    time -> group with blocked members that may have room then;  fading  the same, for groups that
--                      expire then
--   workers    hash    worker -> seen_at .. info
--   lives      a hash that clients write, so it does not show that the queue exists (valkey/engine.py): worker -> run id of the
--                      server, client id of the worker's lifeline
--   lifeline   always absent: the lifelines of workers block on it
--   consumers  hash    name -> offset .. expires_at
--   spent      zset    last time -> scope;  usage:<scope>  hash  name -> millionths (usage.lua)
--   budgets    hash    scope NUL name -> budget (usage.lua)
--   events     stream  <last sequence>-0 -> e: the events of one call (events.lua)
--
-- The registry of queues, penstock:<namespace>:queues, and that of queues with workers, penstock:<namespace>:attended, are
-- in other slots: the client writes them.
-- Validate everything, then write: Lua does not roll back. Verbs collect their writes in buffers, which flush() sends as
-- one variadic command per key.

-- The server provides none of these while it loads the library: bind() fetches them when the first function runs.
local spread

local function bind_spread()
  spread = unpack
end

local call, pack, unpack, encode, decode, sub, byte, format, floor, min, max

local function bind()
  bind_spread()
  call = redis.call
  pack, unpack, encode, decode = struct.pack, struct.unpack, cmsgpack.pack, cmsgpack.unpack
  sub, byte, format = string.sub, string.byte, string.format
  floor, min, max = math.floor, math.min, math.max
  -- The functions keep little, and make short-lived garbage: at Lua's default of 200 %, more than a third of the time
  -- is spent on walking live objects.
  pcall(function() collectgarbage('setpause', 1000) end)
end

local FORMAT = 1
-- format paused seq events now shift waiters stale uses: one field, because every call reads and writes all of it.
-- uses: a bit for each feature that costs a lookup; features that are not in use are not looked up. 128: a dead_letter
-- queue, or usage and budgets.
-- The current minute follows (metrics.lua).
local COUNTERS = '>BBI6I6I6i6I6I6B'
local MINUTE_AT = 40
-- The history of the clock (Clock below), in a field of its own that few queues have: moved gap_from gap_to lag edge
-- doubt_until recheck_until follow
local CLOCK = '>i6I6I6I6I6I6I6I6'
local CHUNK = 4000 -- arguments per command: Lua's stack takes less than 8000

local K -- the keys of this call, by part
local Q = {} -- the facts of this call: now, seq, events, paused, waiters
local J -- the jobs that this call has read, by id (record.lua)
local removed_members, removed_fields, set_fields, added_members -- the writes of this call, by part

local known_keys, known_count = {}, 0

local function keys_of(prefix)
  local keys = known_keys[prefix]
  if not keys then
    if known_count == 1000 then known_keys, known_count = {}, 0 end
    keys = setmetatable({}, { __index = function(self, part)
      local key = prefix .. ':' .. part
      rawset(self, part, key)
      return key
    end })
    known_keys[prefix], known_count = keys, known_count + 1
  end
  return keys
end

-- Raise a verb's error. The verb must not have written anything.
local function refuse(code, text)
  error({ err = 'PENSTOCK ' .. code .. ' ' .. text })
end

-- Return the table itself if it is empty, else a new one: calls that use few of these make no garbage.
local function emptied(t)
  if t and next(t) == nil then return t end
  return {}
end

local function forget_buffers()
  J = emptied(J)
  removed_members, removed_fields = emptied(removed_members), emptied(removed_fields)
  set_fields, added_members = emptied(set_fields), emptied(added_members)
end

-- Queue time; docs/verbs.md describes it under Time. Every call that writes stores its clock reading and now; shift is the
-- difference. It is 0 as long as the clock has always been regular; then most calls do nothing more.
local Clock = {
  NEAR = BOUNDS.CLOCK_NEAR_MS, APART = BOUNDS.CLOCK_APART_MS, GAP = BOUNDS.CLOCK_GAP_MS, TERM = BOUNDS.CLOCK_TERM_MS,
  DOUBT = BOUNDS.CLOCK_DOUBT_MS, KEPT = BOUNDS.CLOCK_LAG_KEPT_MS, SET_BACK = BOUNDS.CLOCK_SET_BACK_MS,
  RECHECK = BOUNDS.CLOCK_RECHECK_MS, SLOWLY = BOUNDS.CLOCK_SLOWLY,
  LENGTH = 42, -- of the shortest record; a shorter one is damaged, and counts as none
}

-- moved: how far tests have moved the clock. gap_from, gap_to: now before and after the last gap; equal once a sweep has
-- renewed the leases. lag, edge, doubt_until: see Clock.lag(). recheck_until: until then, slots are computed again. follow:
-- jobs due at this instant of the wall clock or later have yet to follow a correction (Clock.follow); 0: none.
function Clock.record()
  local c = Q.clock
  if not c then
    c = { moved = 0, gap_from = 0, gap_to = 0, lag = 0, edge = 0, doubt_until = 0, recheck_until = 0, follow = 0 }
    local stored = call('HGET', K.meta, 'clock')
    if stored and #stored >= Clock.LENGTH then
      c.moved, c.gap_from, c.gap_to, c.lag, c.edge, c.doubt_until, c.recheck_until, c.follow =
        unpack(CLOCK, stored .. string.rep('\0', 6)) -- follow was added later than the others
    end
    Q.clock = c
  end
  return c
end

function Clock.write()
  local c = Q.clock
  call('HSET', K.meta, 'clock',
    pack(CLOCK, c.moved, c.gap_from, c.gap_to, c.lag, c.edge, c.doubt_until, c.recheck_until, c.follow))
end

-- The clock went back. A jump that is still in doubt was wrong if the clock takes half of it back.
function Clock.set_back(c, by, last)
  if by >= Clock.APART then c.follow, c.changed = 1, true end
  if by >= Clock.SET_BACK then c.recheck_until, c.changed = last + Clock.RECHECK, true end
  if c.lag > 0 and last < c.edge + Clock.DOUBT and by >= c.lag / 2 then
    c.doubt_until, c.changed = c.edge + Clock.KEPT, true
  end
end

-- Either no call came for a while, or the clock jumped: the two look the same.
function Clock.note_gap(c, from, to)
  if from - c.gap_to >= Clock.TERM then c.gap_from, c.gap_to, c.changed = from, to, true end
  if to - from >= Clock.DOUBT then
    local lag = from < c.doubt_until and to < c.doubt_until and c.lag or 0
    c.lag, c.edge, c.doubt_until, c.changed = lag + to - from, to, max(c.doubt_until, to + Clock.DOUBT), true
  end
end

-- Set now and shift when they are not just the clock and 0.
function Clock.advance(clock, last)
  local c, seen = Clock.record(), last - Q.shift
  local elapsed = clock - seen
  if elapsed < 0 then
    Clock.set_back(c, -elapsed, last)
    Q.shift = last - clock
  elseif Q.shift > c.moved and clock + c.moved >= last - Clock.NEAR then
    if Q.shift - c.moved >= Clock.APART then c.follow, c.changed = 1, true end
    Q.shift = c.moved -- the clock has caught up
  elseif Q.shift ~= c.moved then -- shrink it by a hundredth of the elapsed time, without loss to rounding
    local most = floor(clock / Clock.SLOWLY) - floor(seen / Clock.SLOWLY)
    Q.shift = Q.shift - max(-most, min(most, Q.shift - c.moved))
  end
  if Q.shift == 0 and c.moved ~= 0 then Q.shift = 1 end
  Q.now = max(clock + Q.shift, last)
  if elapsed >= Clock.GAP then Clock.note_gap(c, last, Q.now) end
end

-- Return the store's clock as it is now: run_at and slots compare with it.
function Clock.wall()
  if Q.shift == 0 then return Q.now end
  return Q.now - Q.shift + Clock.record().moved
end

-- Return the queue time at which the wall clock will show an instant: the difference shrinks until then.
function Clock.when(instant)
  local ahead = Q.shift ~= 0 and Q.now - Clock.wall() or 0
  if ahead > -Clock.APART and ahead < Clock.APART or instant >= BOUNDS.STAGED_FROM_MS then return instant end
  local left = instant - Q.now + ahead
  if left <= 0 then return min(instant, Q.now) end
  local shrunk = floor(left / Clock.SLOWLY)
  return instant + (ahead > 0 and max(ahead - shrunk, 0) or min(ahead + shrunk, 0))
end

-- Return how far deletion lags behind now, because a long jump is not proven, or has proved wrong; and the now after that
-- jump. Whatever was due for deletion in between stays that much longer.
function Clock.lag()
  local c = Clock.record()
  if Q.now >= c.doubt_until then return 0, 0 end
  return c.lag, c.edge
end

-- Return whether something kept until a time may be deleted.
function Clock.is_past(at)
  if at > Q.now then return false end
  local lag, edge = Clock.lag()
  return lag == 0 or at <= Q.now - lag or at >= edge
end

-- Begin a verb: read the counters and the clock. now never goes back within a queue, and never stands still.
-- A queue is new if none of its keys exists. If others exist, its counters are lost and tokens would repeat: that is
-- refused, unless the mode is 'any'. Otherwise a verb that writes checks the types of keys here (parts.lua).
local function open(keys, mode)
  if not call then bind() end
  Q.is_open, Q.flushed = false, false
  local prefix = keys[1]
  K = keys_of(prefix)
  local counters = call('HGET', K.meta, 'counters')
  local version, paused, seq, events, last, shift, waiters, stale, uses = FORMAT, 0, 0, 0, 0, 0, 0, 0, 0
  if counters then
    version = byte(counters, 1)
    if version > FORMAT then
      refuse('VERSION', 'the queue has data of format ' .. version .. '; this Penstock reads up to ' .. FORMAT)
    end
    version, paused, seq, events, last, shift, waiters, stale, uses = unpack(COUNTERS, counters)
  elseif mode ~= 'any' and Parts.any_exists() then
    refuse('TORN', 'the key ' .. K.meta .. ' is missing or damaged, but other keys of the queue exist')
  end
  Q.minute = counters and sub(counters, MINUTE_AT) or ''
  local time = call('TIME')
  Q.prefix, Q.is_new, Q.time = prefix, not counters, time
  Q.seq, Q.events, Q.shift, Q.paused, Q.waiters, Q.stale = seq, events, shift, paused == 1, waiters, stale
  Q.uses = uses
  Q.wake, Q.due, Q.stream, Q.answer, Q.dedup = false, false, false, false, false
  Q.outbox, Q.ends, Q.is_delivering, Q.adding_to, Q.noted_links, Q.dead_letter = false, false, false, false, false, false
  Q.groups, Q.news = emptied(Q.groups), emptied(Q.news)
  Q.listening, Q.listening_changed = emptied(Q.listening), emptied(Q.listening_changed)
  Q.grouped, Q.limits, Q.touched = emptied(Q.grouped), emptied(Q.limits), false
  Q.has_steps = nil
  Q.fresh, Q.commons, Q.deps, Q.expected, Q.over, Q.spent = false, false, false, false, false, false
  forget_buffers()
  local clock = time[1] * 1000 + floor(time[2] / 1000)
  Q.now, Q.clock = clock, false
  if shift ~= 0 or counters and (clock < last or clock >= last + Clock.GAP) then Clock.advance(clock, last) end
  Q.is_open, Q.is_renewed, Q.is_checking, Q.wake_tokens = true, false, false, false
  if Guard.writes and mode ~= 'any' then Parts.check_types(mode) end
end

local function draw()
  local seq = Q.seq + 1
  Q.seq = seq
  return seq
end

local function list_in(writes, part)
  local list = writes[part]
  if not list then
    list = {}
    writes[part] = list
  end
  return list
end

-- Send one command with all of list as arguments, or several if it is long. list holds pairs or single values.
local function send(command, key, list)
  local count = #list
  if count <= CHUNK then
    call(command, key, spread(list))
  else
    for first = 1, count, CHUNK do
      call(command, key, spread(list, first, min(first + CHUNK - 1, count)))
    end
  end
end

local function send_all(command, writes)
  for part, list in pairs(writes) do
    if list[1] then send(command, K[part], list) end
  end
end

-- Run a read with many fields; return the answers in one list.
local function read_many(command, key, list)
  local count = #list
  if count == 0 then return {} end
  if count <= CHUNK then return call(command, key, spread(list)) end
  local values, n = {}, 0
  for first = 1, count, CHUNK do
    for _, value in ipairs(call(command, key, spread(list, first, min(first + CHUNK - 1, count)))) do
      n = n + 1
      values[n] = value
    end
  end
  return values
end

local function hset(part, id, value)
  local list = list_in(set_fields, part)
  list[#list + 1] = id
  list[#list + 1] = value
end

local function hdel(part, id)
  local list = list_in(removed_fields, part)
  list[#list + 1] = id
end

local function zadd(part, score, member)
  local list = list_in(added_members, part)
  list[#list + 1] = score
  list[#list + 1] = member
end

local function zrem(part, member)
  local list = list_in(removed_members, part)
  list[#list + 1] = member
end

-- A new queue's epoch must only differ from that of an earlier queue of the same name.
local function new_epoch()
  return sub(redis.sha1hex(Q.time[1] .. '.' .. Q.time[2] .. Q.prefix .. tostring(Q)), 1, 16)
end

-- Return a number as text: Lua would write large ones as 1e+15.
local function digits(number)
  return format('%.0f', number)
end

local function write_meta()
  local counters = pack(COUNTERS, FORMAT, Q.paused and 1 or 0, Q.seq, Q.events, Q.now, Q.shift, Q.waiters, Q.stale,
    Q.uses) .. Q.minute
  if Q.clock and Q.clock.changed then Clock.write() end
  if Q.is_new or Q.is_renewed then call('HSET', K.meta, 'epoch', new_epoch()) end
  if Q.is_new and Q.server then call('HSET', K.meta, 'server', Q.server) end
  if Q.stream then
    call('HSET', K.meta, 'counters', counters, Q.stream, Q.answer)
  else
    call('HSET', K.meta, 'counters', counters)
  end
end
