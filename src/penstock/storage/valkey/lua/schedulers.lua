-- Schedulers: the next slot of each, and the job of the last one. The client computes slots.
--
-- schedulers  name -> next:6 awaits:6 fired:6 limit:6 end:6 repeat_ms+1:6 paused:1 length:2 last_id spec
-- slots       next -> name, of those that are not paused and have a next slot; AWAITED -> name, of those that get one when
--             the job that they wait for has ended

local Schedulers = { AWAITED = 2 ^ 53 - 1 }

function Schedulers.parse(name, record)
  local next_ms, awaits, fired, limit, end_ms, repeat_ms, paused, length = unpack('>I6I6I6I6I6I6BH', record)
  return {
    name = name, next_ms = next_ms, awaits = awaits, fired = fired, limit = limit, end_ms = end_ms,
    repeat_ms = repeat_ms - 1, paused = paused == 1, last_id = sub(record, 40, 39 + length),
    spec = sub(record, 40 + length),
  }
end

function Schedulers.read(name)
  local record = call('HGET', K.schedulers, name)
  return record and Schedulers.parse(name, record)
end

-- Return the scheduler's score in slots; 0: it is not there.
function Schedulers.slot_of(s)
  if s.paused then return 0 end
  return s.awaits > 0 and Schedulers.AWAITED or s.next_ms
end

function Schedulers.save(s)
  if not bit_of(Q.uses, 8) then Q.uses = Q.uses + 8 end
  hset('schedulers', s.name, pack('>I6I6I6I6I6I6BH', s.next_ms, s.awaits, s.fired, s.limit, s.end_ms, s.repeat_ms + 1,
    s.paused and 1 or 0, #s.last_id) .. s.last_id .. s.spec)
  local slot = Schedulers.slot_of(s)
  if slot > 0 then zadd('slots', slot, s.name) else zrem('slots', s.name) end
end

function Schedulers.is_due(s)
  return not s.paused and s.next_ms > 0 and s.next_ms <= Clock.wall()
end

-- Continue after the job that it waited for has ended.
function Schedulers.go_on(s)
  s.awaits, s.next_ms = 0, Clock.wall() + s.repeat_ms
  if s.end_ms > 0 and s.next_ms > s.end_ms then s.next_ms = 0 end
end

function Schedulers.ended(job, name)
  local s = Schedulers.read(name)
  if s and s.awaits == job.inc then
    Schedulers.go_on(s)
    Schedulers.save(s)
  end
end

-- Note that the slot was fired. queued: its job is a new one.
function Schedulers.move_on(s, next_ms, job_id, inc, queued)
  s.fired, s.last_id, s.next_ms = s.fired + 1, job_id, next_ms
  if s.repeat_ms >= 0 then
    s.next_ms, s.awaits = 0, inc
    if not queued then Schedulers.go_on(s) end
  end
  if s.limit > 0 and s.fired >= s.limit then s.next_ms, s.awaits = 0, 0 end
  Schedulers.save(s)
end

-- Return up to limit due schedulers: name, slot, spec, and so on. After the clock was set back, return all that wait for no
-- job: the caller computes their slots again.
function Schedulers.due(limit)
  local due = {}
  if not bit_of(Q.uses, 8) then return due end
  local last = Q.now < Clock.record().recheck_until and '(' .. digits(Schedulers.AWAITED) or digits(Clock.wall())
  local names = call('ZRANGEBYSCORE', K.slots, '-inf', last, 'LIMIT', 0, limit)
  local records = read_many('HMGET', K.schedulers, names)
  for i = 1, #names do
    local s = records[i] and Schedulers.parse(names[i], records[i])
    if s then
      local at = #due
      due[at + 1], due[at + 2], due[at + 3] = s.name, s.next_ms, s.spec
    end
  end
  return due
end

-- Return the time to the first slot that is not due, or -1; and 1 if a scheduler waits for the end of a job.
function Schedulers.wait()
  if not bit_of(Q.uses, 8) then return -1, 0 end
  local awaited = digits(Schedulers.AWAITED)
  local wall = Clock.wall()
  local first = call('ZRANGEBYSCORE', K.slots, '(' .. digits(wall), '(' .. awaited, 'WITHSCORES', 'LIMIT', 0, 1)
  local awaiting = min(call('ZCOUNT', K.slots, awaited, awaited), 1)
  return first[1] and tonumber(first[2]) - wall or -1, awaiting
end

-- Release all schedulers from their jobs: the jobs are gone, and will not report their ends.
function Schedulers.forget_jobs()
  if not bit_of(Q.uses, 8) then return end
  local stored = call('HGETALL', K.schedulers)
  for i = 1, #stored, 2 do
    local s = Schedulers.parse(stored[i], stored[i + 1])
    if s.awaits > 0 then
      Schedulers.go_on(s)
      Schedulers.save(s)
    end
  end
end
