-- The keys of a queue that have fixed names, with their types (prelude.lua describes them). Keys named after a job, group,
-- listener or scope are not in the list.
--
-- Lua does not roll back: a write to a key of the wrong type would end a call midway. So a verb that writes checks the
-- types first. Most verbs check all keys. Those that run for every job (HOT) check the keys that each of their calls
-- writes, and all keys once a second and after an error.

local Parts = {}

Parts.TYPES = {
  jobs = 'hash', options = 'hash', state = 'hash', results = 'hash', failures = 'hash', progress = 'hash', annex = 'hash',
  received = 'hash', holders = 'hash', errors = 'hash', metrics = 'hash', dedup = 'hash', schedulers = 'hash',
  rerun = 'hash', waiters = 'hash', inbox = 'hash', limits = 'hash', groups = 'hash', workers = 'hash',
  consumers = 'hash', budgets = 'hash', damaged = 'hash', unkept = 'hash',
  waiting = 'zset', scheduled = 'zset', blocked = 'zset', active = 'zset', completed = 'zset', failed = 'zset',
  cancelled = 'zset', expiring = 'zset', suspended = 'zset', held_completed = 'zset', held_failed = 'zset',
  held_cancelled = 'zset', dedup_times = 'zset', slots = 'zset', group_keys = 'zset', parked = 'zset', fading = 'zset',
  spent = 'zset', damaged_at = 'zset', instants = 'zset',
  line = 'list', outbox = 'list', wake = 'list',
  signalled = 'set', stepped = 'set', logged = 'set', parents = 'set', linked = 'set',
  events = 'stream',
}

Parts.HOT = 'hot'

-- The commands that return the size of a key, and fail if it is of another type.
Parts.SIZES = { hash = 'HLEN', zset = 'ZCARD', list = 'LLEN', set = 'SCARD', stream = 'XLEN' }

-- The keys that calls of hot verbs usually write without reading them before. One command checks all zsets of a list.
Parts.ADDED = { zsets = {}, 'wake' } -- they write the line first
Parts.ADDED_MANY = { zsets = { 'waiting', 'expiring' }, 'waiters', 'wake' }
Parts.TAKEN = { zsets = { 'waiting', 'scheduled', 'active' }, 'jobs', 'state', 'line', 'wake' }
Parts.RECORDED = { zsets = { 'active' }, 'annex', 'wake' }
Parts.SETTLED = { zsets = { 'active', 'completed' }, 'wake' }
Parts.SETTLED_AND_TAKEN = { zsets = { 'waiting', 'scheduled', 'active', 'completed' }, 'jobs', 'line', 'wake' }
