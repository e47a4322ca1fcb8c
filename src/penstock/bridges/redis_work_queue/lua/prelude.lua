-- The keys of the queue with prefix p. All scripts take the three lists as KEYS and p as their first argument.
--
--   p:queue                  list    waiting ids: pushed on the left, taken from the right
--   p:processing             list    taken ids, the newest on the left
--   p:cleaning               list    ids that a cleaner of the published clients is handling
--   p:item:<id>              string  the data; the item exists exactly as long as this key
--   p:leased_by_session:<id> string  the holder, expires with the lease; the name that the published clients use
--   p:lease:<id>             string  the same under the name in the project's documentation
--
-- A lease is written under both names and counts under either, so that both kinds of cleaners see our leases and we see
-- theirs. A lease of ours (its value begins with OURS) counts only if both keys hold it: other clients delete one of
-- them when they complete the item, and the other says nothing about a later item with that id. The keys of an item are
-- built here, because a script does not know in advance which item it takes. In a cluster the prefix must have a hash
-- tag, which puts all keys in one slot.

local QUEUE, PROCESSING, CLEANING = KEYS[1], KEYS[2], KEYS[3]
local PREFIX = ARGV[1]
local OURS = 'penstock-'

local function data_key(id)
  return PREFIX .. ':item:' .. id
end

local function lease_keys(id)
  return PREFIX .. ':leased_by_session:' .. id, PREFIX .. ':lease:' .. id
end

local function exists(id)
  return redis.call('EXISTS', data_key(id)) == 1
end

local function is_ours(lease)
  return string.sub(lease, 1, #OURS) == OURS
end

-- Returns the value of the lease that counts; nil if the item has no holder.
local function holder_of(id)
  local published_key, documented_key = lease_keys(id)
  local published, documented = redis.call('GET', published_key), redis.call('GET', documented_key)
  if published and (not is_ours(published) or published == documented) then return published end
  if documented and not is_ours(documented) then return documented end
  return nil
end
