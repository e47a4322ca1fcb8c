-- Holds: named consumers that keep finished jobs until they have fetched them.
--
-- The extras map each consumer to milliseconds after the end. The indexes have finished jobs only.

do

local IN_USE = 64

local function holds_of(job)
  return job.has_links and bit_of(Q.uses, IN_USE) and extras_of(job).holds or nil
end

local function longest(holds)
  local most = 0
  for _, ttl in pairs(holds) do most = max(most, ttl) end
  return most
end

Holds.longest = longest

-- Return how long after its end the job is held.
function Holds.ms(job)
  local holds = holds_of(job)
  return holds and longest(holds) or 0
end

-- Return whether a consumer other than but_for holds the finished job.
function Holds.is_held(job, but_for)
  for consumer, ms in pairs(holds_of(job) or {}) do
    if consumer ~= but_for and job.finished + ms > Q.now then return true end
  end
  return false
end

-- Return whether a job of this queue ever had holds.
function Holds.are_used()
  return bit_of(Q.uses, IN_USE)
end

-- Look holds up from now on.
function Holds.use()
  if not bit_of(Q.uses, IN_USE) then Q.uses = Q.uses + IN_USE end
end

-- Note that a new job may have holds.
function Holds.notice(job)
  if job.has_links and not bit_of(Q.uses, IN_USE) and extras_of(job).holds then Holds.use() end
end

local function index(job, holds)
  local part = 'held_' .. STATES[job.state]
  for consumer in pairs(holds) do
    zadd(Parts.named('held:' .. consumer), job.finished, job.id)
    hset('holders', consumer, '1')
  end
  zadd(part, job.finished + longest(holds), job.id)
end

-- Return what jobs with the same holds share when they complete: the longest hold, and the lists to add each job to.
function Holds.of_completed(holds)
  local lists = { list_in(added_members, 'held_completed') }
  for consumer in pairs(holds) do
    lists[#lists + 1] = list_in(added_members, Parts.named('held:' .. consumer))
    hset('holders', consumer, '1')
  end
  return { ms = longest(holds), lists = lists }
end

-- Index a job that completes now. held: the value of of_completed().
function Holds.add_completed(held, id)
  local lists, score = held.lists, Q.now + held.ms
  for i = 1, #lists do
    local list = lists[i]
    local n = #list
    list[n + 1], list[n + 2] = score, id
    score = Q.now
  end
end

-- Remove a job that was finished from the indexes.
function Holds.drop(job)
  local holds = ENDED[job.was] and holds_of(job)
  if not holds then return end
  for consumer in pairs(holds) do zrem(Parts.named('held:' .. consumer), job.id) end
  zrem('held_' .. STATES[job.was], job.id)
end

-- Index the job in its new state.
function Holds.save(job)
  if ENDED[job.state] then
    local holds = holds_of(job)
    if holds then index(job, holds) end
  elseif ENDED[job.was] and not job.is_afresh then
    Holds.drop(job)
  end
end

function Holds.hold(job, consumer, ttl_ms)
  local extras = extras_of(job)
  extras.holds = extras.holds or {}
  extras.holds[consumer] = ENDED[job.state] and ttl_ms + Q.now - job.finished or ttl_ms
  job.has_links = true
  extras_changed(job)
  Holds.notice(job)
end

-- Release the consumer's hold. Return false if there was none.
function Holds.release(job, consumer)
  local holds = holds_of(job)
  if not holds or not holds[consumer] then return false end
  Holds.drop(job)
  holds[consumer] = nil
  if not next(holds) then extras_of(job).holds = nil end
  extras_changed(job)
  return true
end

-- Drop holds that have run out.
function Holds.lapse(job)
  Holds.drop(job)
  extras_of(job).holds = nil
  extras_changed(job)
end

end
