-- limit: sets the limit of the queue, of every group without one of its own, or of one group.
-- arguments: group ('' the queue, '*' every group), limit (MessagePack, see groups.lua; '': none), the same as JSON, the
--   expected present limit (missing: any)
-- returns:   1, or 0 if the present limit is another one
-- events:    configured, unblocked
-- groups:    groups that have a record, by key; or the groups of given keys ('': the queue itself).
-- arguments: limit, key to go on from ('' at first), key ...
-- returns:   {more, key, waiting, active, held, blocked, paused, why, wait_ms (-1: not a matter of time), key ...}

register('limit', function(keys, args)
  open(keys)
  local key = args[1]
  if args[4] and (call('HGET', K.limits, key) or '') ~= args[4] then return 0 end
  -- A group's window and bucket so far follow its old limit; a group without a record begins with the new one.
  if key ~= '*' and not Groups.of(key).is_stored then Q.grouped[key] = nil end
  if args[2] == '' then call('HDEL', K.limits, key) else call('HSET', K.limits, key, args[2]) end
  local event = { grp = key, data = args[3] }
  new_group('configured', event).n = 1
  Groups.use(key == '' and 1 or 2)
  if key == '*' then
    Q.limits = {}
    Groups.fill_from('', BOUNDS.ADMITTED_AT_ONCE)
  elseif key == '' then
    Groups.reread(key).is_changed = true
    Q.wake = true
  else
    Groups.touch(Groups.reread(key))
  end
  close()
  return 1
end)

-- Return the pause or limit of the queue that holds claims back, and when it ends (nil: not a matter of time).
local function why_queue()
  local queue = Groups.of('')
  local limit = queue.limit
  if Q.paused then return 'paused' end
  if queue.parked > Q.now then return 'asked', queue.parked end
  if limit.concurrency > 0 and call('ZCARD', K.active) >= limit.concurrency then return 'concurrency' end
  if limit.count > 0 and queue.starts >= limit.count then
    return 'rate', queue.first_start and queue.first_start + limit.per
  end
end

local function why_group(group)
  local why, at = Groups.why(group)
  if group.b == 0 and why ~= 'paused' and why ~= 'asked' then return nil end
  if why then return why, at end
  return Groups.why(group, Groups.head(group))
end

local function add_state(reply, key)
  local values, why, at
  if key == '' then
    why, at = why_queue()
    values = { key, waiting_count(), call('ZCARD', K.active), 0, call('ZCARD', K.blocked), Q.paused and 1 or 0 }
  else
    local group = Groups.of(key)
    why, at = why_group(group)
    values = { key, group.w, group.a, group.h, group.b, group.paused and 1 or 0 }
  end
  for i = 1, #values do reply[#reply + 1] = values[i] end
  reply[#reply + 1] = why or ''
  reply[#reply + 1] = at and max(0, at - Q.now) or -1
end

register('groups', function(keys, args)
  open(keys)
  local limit, from = tonumber(args[1]), args[2]
  local groups, more = { spread(args, 3, #args) }, 0
  if not groups[1] then
    groups = call('ZRANGEBYLEX', K.group_keys, from == '' and '-' or '(' .. from, '+', 'LIMIT', 0, limit + 1)
    if #groups > limit then groups[#groups], more = nil, 1 end
  end
  local reply = { more }
  for i = 1, #groups do add_state(reply, groups[i]) end
  close()
  return reply
end)
