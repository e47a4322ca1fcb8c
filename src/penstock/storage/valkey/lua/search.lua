-- search: jobs of a state, or of an error class, that match, in the order of that index.
-- arguments: part, limit, scan, score, member (place to go on from; '' at first), task, enqueued from and to, finished
--   from and to (0: no bound)
-- returns:   {ids, scanned, score, member, now}: score is '' at the end
-- errors:    the number of failed jobs by error class; forgets classes without jobs.
-- arguments: none
-- returns:   {class, count, class, count ...}
-- events:    none

local AT_ONCE = 500

local function in_bounds(time, from, to)
  return time >= from and (to == 0 or time < to)
end

local function matcher(args)
  local task = args[6]
  local enqueued_from, enqueued_to = tonumber(args[7]), tonumber(args[8])
  local finished_from, finished_to = tonumber(args[9]), tonumber(args[10])
  return function(job)
    return job and (task == '' or options_of(job.header).task == task)
      and in_bounds(job.enq, enqueued_from, enqueued_to) and in_bounds(job.finished, finished_from, finished_to)
  end
end

register('search', function(keys, args)
  open(keys)
  local part, limit, left, score, member = args[1], tonumber(args[2]), tonumber(args[3]), args[4], args[5]
  local is_match, ids, scanned, is_over_all = matcher(args), {}, 0, false
  while left > 0 and #ids < limit and not is_over_all do
    local members, scores = members_after(part, score, member, min(left, AT_ONCE), false)
    local here = {}
    for i = 1, #members do here[i] = id_of(part, members[i]) end
    load(here)
    is_over_all = #members < min(left, AT_ONCE)
    for i = 1, #members do
      if #ids == limit then
        is_over_all = false
        break
      end
      score, member, scanned, left = scores[i], members[i], scanned + 1, left - 1
      if is_match(job_for(here[i])) then ids[#ids + 1] = here[i] end
    end
  end
  return { ids, scanned, is_over_all and '' or score, is_over_all and '' or member, Q.now }
end, READS)

register('errors', function(keys)
  open(keys)
  local reply = {}
  for _, class in ipairs(call('HKEYS', K.errors)) do
    local count = call('ZCARD', K['error:' .. class])
    if count > 0 then
      reply[#reply + 1], reply[#reply + 2] = class, count
    else
      call('HDEL', K.errors, class)
    end
  end
  return reply
end)
