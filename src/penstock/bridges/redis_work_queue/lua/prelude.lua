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
-- see theirs. One of ours (its value begins with OURS) counts only if both keys hold it: other clients delete one of
-- them when they complete the item, and what is left says nothing of a later item with that id. The keys of an item are built here, as a script does not know beforehand what it will take:
-- in a cluster the prefix has to carry a hash tag, which puts all of them in one slot.

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

-- The value of the lease that counts; nil if nobody holds the item.
local function holder_of(id)
  local published_key, documented_key = lease_keys(id)
  local published, documented = redis.call('GET', published_key), redis.call('GET', documented_key)
  if published and (not is_ours(published) or published == documented) then return published end
  if documented and not is_ours(documented) then return documented end
  return nil
end
