-- The keys of a queue that have a fixed name, with their types (prelude.lua says what they hold). Keys with a name for each
-- job, group, listener or scope are not in the list.
--
-- Lua does not roll back: a write to a key of the wrong type would end a call midway. So a verb that writes makes sure of
-- the types before. Most verbs look at all keys; those that are called for every job (HOT) look at the keys that each of
-- their calls writes, and at all of them once in a second, and after an error.

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
  signalled = 'set', logged = 'set', parents = 'set', linked = 'set',
  events = 'stream',
}

Parts.HOT = 'hot'

-- The commands that tell how much is in a key, and fail if it is of another type.
Parts.SIZES = { hash = 'HLEN', zset = 'ZCARD', list = 'LLEN', set = 'SCARD', stream = 'XLEN' }

-- What calls of hot verbs write in most cases, and do not read before. The zsets of a list are looked at in one command.
Parts.ADDED = { zsets = {}, 'wake' } -- the line is what they write first
Parts.ADDED_MANY = { zsets = { 'waiting', 'expiring' }, 'waiters', 'wake' }
Parts.TAKEN = { zsets = { 'waiting', 'scheduled', 'active' }, 'jobs', 'state', 'line', 'wake' }
Parts.SETTLED = { zsets = { 'active', 'completed' }, 'wake' }
Parts.SETTLED_AND_TAKEN = { zsets = { 'waiting', 'scheduled', 'active', 'completed' }, 'jobs', 'line', 'wake' }
