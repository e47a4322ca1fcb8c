-- The line and the zset of waiting jobs, as one order.
--
-- An entry of the line is number:6 .. id. It counts as the zset's member '\2' .. number .. '0' .. id with score 0. A place
-- in the order is a member and its score.

local FIFO = '\2'

local function member_of_entry(entry)
  return FIFO .. sub(entry, 1, 6) .. '0' .. sub(entry, 7)
end

local function waiting_count()
  return call('ZCARD', K.waiting) + call('LLEN', K.line) - Q.stale
end

-- Return whether a place comes before an entry of the line, given as member.
local function is_before(score, member, entry_member)
  score = tonumber(score)
  return score < 0 or (score == 0 and member < entry_member)
end

-- Merge rows of the zset (member, score, ...) with entries of the line, both in order or both in reverse. Return up to limit
-- members, their scores, which of them are from the line, and how many came from each side.
local function merge_waiting(rows, entries, limit, reverse)
  local members, scores, is_of_line, from_rows, from_entries = {}, {}, {}, 0, 0
  for n = 1, limit do
    local row, score, entry = rows[2 * from_rows + 1], rows[2 * from_rows + 2], entries[from_entries + 1]
    if not row and not entry then break end
    local entry_member = entry and member_of_entry(entry)
    if row and (not entry or is_before(score, row, entry_member) ~= reverse) then
      members[n], scores[n], from_rows = row, score, from_rows + 1
    else
      members[n], scores[n], from_entries = entry_member, '0', from_entries + 1
      is_of_line[n] = true
    end
  end
  return members, scores, is_of_line, from_rows, from_entries
end

-- Return whether an entry is stale: its job is gone, has another number by now, or has a state record, so that another
-- index has it.
local function is_stale(number, static, state)
  return not static or state or sub(static, 1, 6) ~= number
end

-- Return the entries that are not stale.
local function fresh_entries(entries)
  if Q.stale == 0 or not entries[1] then return entries end
  local ids, fresh = {}, {}
  for i = 1, #entries do ids[i] = sub(entries[i], 7) end
  local statics, states = read_many('HMGET', K.jobs, ids), read_many('HMGET', K.state, ids)
  for i = 1, #entries do
    if not is_stale(sub(entries[i], 1, 6), statics[i], states[i]) then fresh[#fresh + 1] = entries[i] end
  end
  return fresh
end

-- Return how many entries of the line are before or at the place.
local function line_rank_after(score, member)
  local low, high = 0, call('LLEN', K.line)
  while low < high do
    local middle = floor((low + high) / 2)
    if is_before(score, member, member_of_entry(call('LINDEX', K.line, middle))) then
      high = middle
    else
      low = middle + 1
    end
  end
  return low
end

-- Return whether the line has an entry for a pristine job.
local function is_in_line(job)
  local number = pack('>I6', job.number)
  local rank = line_rank_after('0', FIFO .. number .. '0' .. job.id)
  return rank > 0 and call('LINDEX', K.line, rank - 1) == number .. job.id
end

-- Return up to limit entries that are not stale, from a rank on, forwards or backwards.
local function entries_from(rank, limit, reverse)
  local fresh, length = {}, call('LLEN', K.line)
  while #fresh < limit and rank >= 0 and rank < length do
    local raw = reverse and call('LRANGE', K.line, max(0, rank - limit + 1), rank)
      or call('LRANGE', K.line, rank, rank + limit - 1)
    if reverse then
      for i = 1, floor(#raw / 2) do raw[i], raw[#raw + 1 - i] = raw[#raw + 1 - i], raw[i] end
    end
    for _, entry in ipairs(fresh_entries(raw)) do fresh[#fresh + 1] = entry end
    rank = rank + (reverse and -limit or limit)
  end
  return fresh
end

-- Pop up to count jobs. Return their ids, which of them are from the line, and their numbers.
local function pop_waiting(count)
  local ids, numbers = {}, {}
  if call('ZCARD', K.waiting) == 0 then
    local entries = call('LPOP', K.line, count) or {}
    Q.popped_entries, Q.popped_from_entries, Q.popped_stale = entries, #entries, Q.stale
    for i = 1, #entries do ids[i] = sub(entries[i], 7) end
    return ids, true, entries
  end
  local rows = call('ZRANGE', K.waiting, 0, count - 1, 'WITHSCORES')
  local entries = call('LRANGE', K.line, 0, count - 1)
  local members, _, is_of_line, from_rows, from_entries = merge_waiting(rows, entries, count, false)
  if from_rows > 0 then call('ZPOPMIN', K.waiting, from_rows) end
  if from_entries > 0 then call('LPOP', K.line, from_entries) end
  Q.popped_rows, Q.popped_from_rows = rows, from_rows
  Q.popped_entries, Q.popped_from_entries, Q.popped_stale = entries, from_entries, Q.stale
  for i = 1, #members do
    ids[i] = sub(members[i], 9)
    numbers[i] = is_of_line[i] and sub(members[i], 2, 7) or nil
  end
  return ids, false, numbers
end

-- Drop stale entries at the head, up to limit; drop all entries if they are all stale.
local function tidy_line(limit)
  if Q.stale == 0 then return end
  if call('LLEN', K.line) <= Q.stale then
    call('UNLINK', K.line)
    Q.stale = 0
    return
  end
  local entries = call('LRANGE', K.line, 0, limit - 1)
  local first = fresh_entries(entries)[1]
  local count = 0
  while entries[count + 1] and entries[count + 1] ~= first do count = count + 1 end
  if count > 0 then
    call('LPOP', K.line, count)
    Q.stale = Q.stale - count
  end
end
