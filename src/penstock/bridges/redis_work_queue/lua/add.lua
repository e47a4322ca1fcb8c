-- add: writes items: for each its data, then its id in the queue.
-- arguments: prefix, "checked" or "unchecked", then id and data of each item
-- returns:   per item 1 if it was added, 0 if an item with that id exists (checked only)

local checked = ARGV[2] == 'checked'
local answers = {}

for i = 3, #ARGV, 2 do
  local id, data = ARGV[i], ARGV[i + 1]
  local written
  if checked then
    written = redis.call('SET', data_key(id), data, 'NX')
  else
    written = redis.call('SET', data_key(id), data)
  end
  if written then redis.call('LPUSH', QUEUE, id) end
  answers[#answers + 1] = written and 1 or 0
end

return answers
