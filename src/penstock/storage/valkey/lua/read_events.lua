-- read_events: entries of the log after a sequence.
-- arguments: after, limit (of events, approximate: entries are not split)
-- returns:   {last sequence, epoch ('' if the queue is new), trimmed up to, sequence, entry, sequence, entry ...}

local AT_ONCE = 100

register('read_events', function(keys, args)
  open(keys)
  local meta = call('HMGET', K.meta, 'epoch', 'trimmed')
  local reply = { Q.events, Steps.is_text(meta[1] or '') and meta[1] or '', tonumber(meta[2] or 0) or 0 }
  local limit, from = tonumber(args[2]), tonumber(args[1])
  local seen = from
  while seen - tonumber(args[1]) < limit do
    local entries = call('XRANGE', K.events, digits(seen + 1) .. '-0', '+', 'COUNT', AT_ONCE)
    for i = 1, #entries do
      local last = tonumber((string.match(entries[i][1], '^%d+')))
      if seen - from >= limit then return reply end
      reply[#reply + 1], reply[#reply + 2] = last, entries[i][2][2]
      seen = last
    end
    if #entries < AT_ONCE then break end
  end
  return reply
end, READS)
