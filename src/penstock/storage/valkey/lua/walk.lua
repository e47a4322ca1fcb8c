-- Walking an index in bounded steps: cursors, and the steps of bulk verbs.
--
-- A place is a score and a member; it stays valid when the member is gone.

-- Return how many members are before or at the place.
local function rank_after(key, score, member)
  local rank = call('ZRANK', key, member)
  if rank and tonumber(call('ZSCORE', key, member)) == tonumber(score) then return rank + 1 end
  local low = call('ZCOUNT', key, '-inf', '(' .. score)
  local high = call('ZCOUNT', key, '-inf', score)
  while low < high do
    local middle = floor((low + high) / 2)
    if call('ZRANGE', key, middle, middle)[1] <= member then low = middle + 1 else high = middle end
  end
  return low
end

-- Return how many members are before the place.
local function rank_before(key, score, member)
  local rank = rank_after(key, score, member)
  return call('ZSCORE', key, member) and rank - 1 or rank
end

local function id_of(part, member)
  return part == 'waiting' and sub(member, 9) or member
end

-- Return up to limit members of an index after a place ('' for score: from the start), or before it in reverse, and their
-- scores.
local function members_after(part, score, member, limit, reverse)
  local key, start = K[part], 0
  if score ~= '' then
    start = reverse and call('ZCARD', key) - rank_before(key, score, member) or rank_after(key, score, member)
  end
  local rows = call(reverse and 'ZREVRANGE' or 'ZRANGE', key, start, start + limit - 1, 'WITHSCORES')
  if part == 'waiting' then
    local rank = reverse and call('LLEN', K.line) - 1 or 0
    if score ~= '' then
      rank = line_rank_after(score, member)
      if reverse then
        local last = call('LINDEX', K.line, rank - 1)
        rank = last and member_of_entry(last) == member and rank - 2 or rank - 1
      end
    end
    return merge_waiting(rows, entries_from(rank, limit, reverse), limit, reverse)
  end
  local members, scores = {}, {}
  for i = 1, #rows / 2 do members[i], scores[i] = rows[2 * i - 1], rows[2 * i] end
  return members, scores
end

-- Return up to limit jobs of an index after a place, the place to go on from ({score, member}, empty at the end), and how
-- many entries were read.
local function step(part, score, member, limit, with_static)
  local members, scores = members_after(part, score, member, limit + 1, false)
  local count = min(#members, limit)
  local ids, jobs = {}, {}
  for i = 1, count do ids[i] = id_of(part, members[i]) end
  load(ids, with_static)
  for i = 1, count do
    if job_for(ids[i]) then jobs[#jobs + 1] = J[ids[i]] end
  end
  return jobs, #members > limit and { scores[count], members[count] } or {}, count
end

-- Return the bound of a bulk verb: it touches only jobs that existed when it began. A job that came back since has a newer
-- token, number or end. The bound is {seq, now} of the first call, which passes no bound.
local function bound_of(seq, now)
  if seq == '' then return Q.seq, Q.now end
  return tonumber(seq), tonumber(now)
end

local function bulk_reply(done, seq, now, part, place)
  return { Outbox.is_full() and 1 or 0, done, digits(seq), digits(now), part, place[1] or '', place[2] or '' }
end
