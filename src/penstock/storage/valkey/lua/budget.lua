-- usage:      the usage by scope.
-- arguments:  none
-- returns:    {scope, name, millionths, ...}
-- reset_usage: sets all sums to zero, and what counts against budgets.
-- set_budget: sets or replaces a budget; wakes. One with the same period goes on with it.
-- arguments:  scope, name, micros, per_ms
-- remove_budget: removes a budget; wakes. Returns 1 if it existed.
-- arguments:  scope, name
-- budgets:    {now, scope, name, micros, per_ms, base, since, sum, ...}
-- events:     none

register('usage', function(keys)
  open(keys)
  local reply = {}
  for _, scope in ipairs(call('ZRANGE', K.spent, 0, -1)) do
    local sums = call('HGETALL', Usage.key(scope))
    for i = 1, #sums, 2 do
      reply[#reply + 1], reply[#reply + 2], reply[#reply + 3] = scope, sums[i], sums[i + 1]
    end
  end
  return reply
end, READS)

register('reset_usage', function(keys)
  open(keys)
  Usage.forget(Q.now)
  for _, budget in ipairs(Usage.budgets()) do
    Usage.keep(budget.field, budget.micros, budget.per_ms, 0, budget.since)
  end
  Q.wake = true
  close()
  return 1
end)

register('set_budget', function(keys, args)
  open(keys)
  local field, per_ms = args[1] .. '\0' .. args[2], tonumber(args[4])
  local base = per_ms > 0 and tonumber(call('HGET', Usage.key(args[1]), args[2]) or 0) or 0
  local since = Q.now
  Usage.renew()
  local stored = call('HGET', K.budgets, field)
  local known = stored and decode(stored)
  if known and per_ms > 0 and known[2] == per_ms then base, since = known[3], known[4] end
  Usage.keep(field, tonumber(args[3]), per_ms, base, since)
  if not bit_of(Q.uses, Usage.BIT) then Q.uses = Q.uses + Usage.BIT end
  Q.wake = true
  close()
  return 1
end)

register('remove_budget', function(keys, args)
  open(keys)
  local removed = call('HDEL', K.budgets, args[1] .. '\0' .. args[2])
  Q.wake = true
  close()
  return removed
end)

register('budgets', function(keys)
  open(keys)
  local reply = { Q.now }
  for _, budget in ipairs(Usage.budgets()) do
    for _, name in ipairs({ 'scope', 'name', 'micros', 'per_ms', 'base', 'since', 'sum' }) do
      reply[#reply + 1] = budget[name]
    end
  end
  return reply
end, READS)
