-- Metrics: counts and times of the current minute, packed behind the counters, and of the minutes before.
--
--   minute:4 enqueued:4 claimed:4 completed:4 failed:4 retried:4 wait_ms:6 longest_wait_ms:6 run_ms:6 longest_run_ms:6
--
-- The metrics hash stores a minute under its number modulo 1440, so a minute replaces that of the day before.

local Metrics = {}

do

local MINUTE_FORMAT = '>I4I4I4I4I4I4I6I6I6I6'
local PLACES = { enqueued = 2, claimed = 3, completed = 4, failed = 5, expired = 5, retrying = 6 }
local WAIT, RUN = 7, 9

local function begin()
  local minute = floor(Q.now / BOUNDS.MINUTE_MS)
  if Q.minute ~= '' then
    local sums = { unpack(MINUTE_FORMAT, Q.minute) }
    if sums[1] == minute then return sums end
    call('HSET', K.metrics, sums[1] % BOUNDS.DAY_MINUTES, Q.minute)
  end
  return { minute, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
end

local function add_times(sums, at, times, count)
  local sum, longest = sums[at], sums[at + 1]
  for row = 1, count do
    local ms = times[row] or 0
    sum = sum + ms
    if ms > longest then longest = ms end
  end
  sums[at], sums[at + 1] = sum, longest
end

-- Count the events of a call.
function Metrics.add(groups)
  local sums
  for i = 1, #groups do
    local group = groups[i]
    local place = PLACES[group.kind]
    if place then
      sums = sums or begin()
      sums[place] = sums[place] + group.n
      local columns = group.columns
      if columns.wait then add_times(sums, WAIT, columns.wait, group.n) end
      if columns.ms then add_times(sums, RUN, columns.ms, group.n) end
    end
  end
  if sums then Q.minute = pack(MINUTE_FORMAT, spread(sums, 1, 10)) end
end

-- Count one enqueued job: only its count changes.
function Metrics.add_one()
  local number, minute = pack('>I4', floor(Q.now / BOUNDS.MINUTE_MS)), Q.minute
  if sub(minute, 1, 4) ~= number then minute = pack(MINUTE_FORMAT, spread(begin(), 1, 10)) end
  Q.minute = number .. pack('>I4', unpack('>I4', minute, 5) + 1) .. sub(minute, 9)
end

end
