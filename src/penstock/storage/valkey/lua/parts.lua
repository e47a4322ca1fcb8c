-- The keys of a queue that have a fixed name, with their types (prelude.lua says what they hold). Keys with a name for each
-- job, group, listener or scope are not in the list.

local Parts = {}

Parts.TYPES = {
  jobs = 'hash', options = 'hash', state = 'hash', results = 'hash', failures = 'hash', progress = 'hash', annex = 'hash',
  received = 'hash', holders = 'hash', errors = 'hash', metrics = 'hash', dedup = 'hash', schedulers = 'hash',
  rerun = 'hash', waiters = 'hash', inbox = 'hash', limits = 'hash', groups = 'hash', workers = 'hash',
  consumers = 'hash', budgets = 'hash', damaged = 'hash',
  waiting = 'zset', scheduled = 'zset', blocked = 'zset', active = 'zset', completed = 'zset', failed = 'zset',
  cancelled = 'zset', expiring = 'zset', suspended = 'zset', held_completed = 'zset', held_failed = 'zset',
  held_cancelled = 'zset', dedup_times = 'zset', slots = 'zset', group_keys = 'zset', parked = 'zset', fading = 'zset',
  spent = 'zset', damaged_at = 'zset',
  line = 'list', outbox = 'list', wake = 'list',
  signalled = 'set', logged = 'set', parents = 'set', linked = 'set',
  events = 'stream',
}

-- Whether a queue without counters has other keys: then it is not a new one, but has lost them.
function Parts.any_exists(prefix)
  local keys = {}
  for part in pairs(Parts.TYPES) do keys[#keys + 1] = prefix .. ':' .. part end
  return redis.call('EXISTS', unpack(keys)) > 0
end
