-- Usage and budgets: what jobs used, in millionths, summed by scope, and how much they may use.
--
-- A scope is '' (the queue), t:<task>, g:<group> or f:<flow>; storage/metrics.py reads it too. A budget is {micros, per_ms,
-- base, since}: base is the sum at the beginning of its period, at the time since.

Usage.BIT, Usage.EXACT = 128, 2 ^ 53

function Usage.key(scope)
  return Q.prefix .. ':usage:' .. scope
end

function Usage.scopes(job)
  local scopes, extras, task = { '' }, extras_of(job), options_of(job.header).task
  if task ~= '' then scopes[#scopes + 1] = 't:' .. task end
  if extras.group then scopes[#scopes + 1] = 'g:' .. extras.group end
  if extras.flow then scopes[#scopes + 1] = 'f:' .. extras.flow end
  return scopes
end

-- Return all budgets: {scope, name, micros, per_ms, base, since, sum}, in order.
function Usage.budgets()
  local stored, budgets = call('HGETALL', K.budgets), {}
  for i = 1, #stored, 2 do
    local scope, name = string.match(stored[i], '^(.-)%z(.*)$')
    local budget = decode(stored[i + 1])
    local sum = tonumber(call('HGET', Usage.key(scope), name) or 0)
    budgets[#budgets + 1] = {
      field = stored[i], scope = scope, name = name, micros = budget[1], per_ms = budget[2], base = budget[3],
      since = budget[4], sum = sum,
    }
  end
  table.sort(budgets, function(a, b) return a.field < b.field end)
  return budgets
end

function Usage.is_past(budget)
  return budget.per_ms > 0 and budget.since + budget.per_ms <= Q.now
end

function Usage.keep(field, micros, per_ms, base, since)
  call('HSET', K.budgets, field, encode({ micros, per_ms, base, since }))
end

-- Return the scopes whose budgets are spent, and how long until that may change by itself (-1: never).
function Usage.read_over()
  local over = {}
  for _, budget in ipairs(Usage.budgets()) do
    if not Usage.is_past(budget) and budget.sum - budget.base >= budget.micros then
      local wait = budget.per_ms > 0 and budget.since + budget.per_ms - Q.now or -1
      over[budget.scope] = max(over[budget.scope] or -1, wait)
    end
  end
  return over
end

-- Return whether a budget of the scope keeps jobs from starting now, and for how long. Reads the budgets once per call.
function Usage.is_over(scope)
  Q.over = Q.over or Usage.read_over()
  return Q.over[scope] ~= nil, Q.over[scope]
end

-- Return the packed failure of a job whose flow has spent its budget, so that it cannot start; else nil.
function Usage.refusal(job)
  local flow = extras_of(job).flow
  if not flow or not Usage.is_over('f:' .. flow) then return nil end
  return failure_of('BudgetExceeded', FAILURE_TEXTS.BudgetExceeded)
end

-- Begin new periods for budgets whose period has ended, before anything is added to the sums.
function Usage.renew()
  for _, budget in ipairs(Usage.budgets()) do
    if Usage.is_past(budget) then
      local began = Q.now - (Q.now - budget.since) % budget.per_ms
      Usage.keep(budget.field, budget.micros, budget.per_ms, budget.sum, began)
    end
  end
end

-- Add to a sum, for write().
function Usage.sum(scope, name, micros)
  if not Q.spent[scope] then call('HLEN', Usage.key(scope)) end -- before the first write
  local sums = list_in(Q.spent, scope)
  local sum = (sums[name] or 0) + micros
  if sum > Usage.EXACT then
    call('HINCRBY', Usage.key(scope), name, digits(micros))
    sum = sums[name] or 0
  end
  sums[name] = sum
end

-- Send what was added in this call, once for each sum.
function Usage.write()
  local times = {}
  for scope, sums in pairs(Q.spent) do
    for name, micros in pairs(sums) do call('HINCRBY', Usage.key(scope), name, digits(micros)) end
    times[#times + 1] = digits(Q.now)
    times[#times + 1] = scope
  end
  send('ZADD', K.spent, times)
  Q.spent = false
end

-- Add what a running job used to its own sums, and to all others it belongs to. used: name -> millionths.
function Usage.add(job, used, text)
  if not Q.spent then
    if call('HLEN', K.budgets) > 0 then Usage.renew() end
    Q.spent = {}
  end
  local extras = extras_of(job)
  extras.usage = extras.usage or {}
  for name, micros in pairs(used) do extras.usage[name] = (extras.usage[name] or 0) + micros end
  extras_changed(job)
  for _, scope in ipairs(Usage.scopes(job)) do
    for name, micros in pairs(used) do Usage.sum(scope, name, micros) end
  end
  if not bit_of(Q.uses, Usage.BIT) then Q.uses = Q.uses + Usage.BIT end
  local group, row = emit('used', job)
  put(group, row, 'data', text)
end

-- Forget sums that were not used for long; all of them, if now is given.
function Usage.forget(now)
  for _, scope in ipairs(call('ZRANGEBYSCORE', K.spent, '-inf', digits(now or Q.now - Clock.lag() - BOUNDS.USAGE_KEPT_MS))) do
    call('UNLINK', Usage.key(scope))
    call('ZREM', K.spent, scope)
  end
end
