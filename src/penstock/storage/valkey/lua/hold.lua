-- hold: keeps jobs for a consumer, once they have ended.
-- arguments: consumer, ttl_ms, ids
-- returns:   a letter per id: h held, - not found
-- release:   takes the holds back.
-- arguments: consumer, ids
-- returns:   a letter per id: r released, n not held, - not found
-- held:      finished jobs held for a consumer.
-- arguments: consumer, limit, score, member (place to go on from; '' at first)
-- returns:   {ids, score, member}: score is '' at the end
-- events:    none

local function each(ids, act)
  load(ids, true)
  local letters = {}
  for i = 1, #ids do
    local job = found(ids[i])
    letters[i] = job and not is_over(job) and act(job) or '-'
  end
  close()
  return table.concat(letters)
end

local function without(args, count)
  local ids = {}
  for i = count + 1, #args do ids[#ids + 1] = args[i] end
  return ids
end

register('hold', function(keys, args)
  open(keys)
  return each(without(args, 2), function(job)
    Holds.hold(job, args[1], tonumber(args[2]))
    return 'h'
  end)
end)

register('release', function(keys, args)
  open(keys)
  return each(without(args, 1), function(job) return Holds.release(job, args[1]) and 'r' or 'n' end)
end)

register('held', function(keys, args)
  open(keys)
  local limit = tonumber(args[2])
  local members, scores = members_after('held:' .. args[1], args[3], args[4], limit + 1, false)
  local ids, count, more = {}, min(#members, limit), #members > limit
  for i = 1, count do ids[i] = members[i] end
  return { ids, more and scores[count] or '', more and members[count] or '' }
end, READS)
