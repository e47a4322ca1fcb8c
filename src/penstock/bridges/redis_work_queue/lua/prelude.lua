-- The keys of the queue with prefix p. All scripts get the three lists as KEYS and p as their first argument.
--
--   p:queue                  list    ids that wait: put in on the left, taken from the right
--   p:processing             list    ids that were taken, the newest on the left
--   p:cleaning               list    ids that a cleaner of the published clients has in hand
--   p:item:<id>              string  the data; the item exists exactly as long as this key does
--   p:leased_by_session:<id> string  expires with the lease: who holds it. The name the published clients use
--   p:lease:<id>             string  the same under the name the project's documentation gives
--
-- A lease is written under both names and counts under either, so that cleaners of both kinds see ours and we
-- see theirs. The keys of an item are built here, as a script does not know beforehand what it will take:
-- in a cluster the prefix has to carry a hash tag, which puts all of them in one slot.

local QUEUE, PROCESSING, CLEANING = KEYS[1], KEYS[2], KEYS[3]
local PREFIX = ARGV[1]

local function data_key(id)
  return PREFIX .. ':item:' .. id
end

local function lease_keys(id)
  return PREFIX .. ':leased_by_session:' .. id, PREFIX .. ':lease:' .. id
end

local function exists(id)
  return redis.call('EXISTS', data_key(id)) == 1
end

local function is_leased(id)
  return redis.call('EXISTS', lease_keys(id)) > 0
end
