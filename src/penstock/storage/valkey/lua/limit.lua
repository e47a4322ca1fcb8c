-- limit: sets the limit of the queue, of every group without one of its own, or of one group.
-- arguments: group ('' the queue, '*' every group), limit (MessagePack, see groups.lua; '': none), the same as JSON
-- returns:   1
-- events:    configured, unblocked
-- groups:    the groups that have a record, by key.
-- arguments: limit, key to go on from ('' at first)
-- returns:   {more, key, waiting, active, held, blocked, paused, why, wait_ms (-1: time does not tell), key ...}

register('limit', function(keys, args)
  open(keys)
  local key = args[1]
  -- Its window and bucket so far are those of the limit it had; what has no record begins with the new one.
  if key ~= '*' and not Groups.of(key).is_stored then Q.grouped[key] = nil end
  if args[2] == '' then call('HDEL', K.limits, key) else call('HSET', K.limits, key, args[2]) end
  local event = { grp = key, data = args[3] }
  new_group('configured', event).n = 1
  Groups.use(key == '' and 1 or 2)
  if key == '*' then
    Q.limits = {}
    Groups.fill_from('', Groups.AT_ONCE)
  elseif key == '' then
    Groups.reread(key).is_changed = true
    Q.wake = true
  else
    Groups.touch(Groups.reread(key))
  end
  close()
  return 1
end)

register('groups', function(keys, args)
  open(keys)
  local limit, from = tonumber(args[1]), args[2]
  local found_keys = call('ZRANGEBYLEX', K.group_keys, from == '' and '-' or '(' .. from, '+', 'LIMIT', 0, limit + 1)
  local reply = { #found_keys > limit and 1 or 0 }
  for i = 1, min(#found_keys, limit) do
    local group = Groups.of(found_keys[i])
    local why, at = '', nil
    if group.b > 0 then
      why, at = Groups.why(group)
      if not why then why, at = Groups.why(group, Groups.head(group)) end
    end
    if group.paused then why = 'paused' end
    for _, value in ipairs({ group.key, group.w, group.a, group.h, group.b, group.paused and 1 or 0, why or '',
      at and max(0, at - Q.now) or -1 }) do
      reply[#reply + 1] = value
    end
  end
  close()
  return reply
end)
