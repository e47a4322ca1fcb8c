-- Guard: recovery when a verb meets data that it cannot read. The header of the library runs every verb under it.
--
-- Lua does not roll back. Writes that were flushed stay, with their events; the rest is dropped, and popped entries return
-- to their places. The client then puts the damaged records aside (quarantine.lua), and repeats the call.

-- Drop the events of writes that were not flushed.
function Guard.cut_events()
  local groups, last = Q.groups, Q.flushed and Q.marked_groups or 0
  for i = #groups, last + 1, -1 do groups[i] = nil end
  local group = groups[last]
  if not group or group.n == Q.marked_rows then return end
  for _, values in pairs(group.columns) do
    for row = Q.marked_rows + 1, group.n do values[row] = nil end
  end
  group.n, group.has_holes = Q.marked_rows, true
end

function Guard.put_back()
  local entries, rows = Q.popped_entries, Q.popped_rows
  if rows then
    local members = {}
    for i = 1, 2 * Q.popped_from_rows, 2 do members[i], members[i + 1] = rows[i + 1], rows[i] end
    if members[1] then send('ZADD', K.waiting, members) end
  end
  if entries then
    for i = Q.popped_from_entries, 1, -1 do call('LPUSH', K.line, entries[i]) end
    Q.stale = Q.popped_stale
  end
  Q.popped_entries, Q.popped_rows = false, false
  for _, group in pairs(Q.grouped) do
    for i = 1, #(group.popped or {}), 2 do
      call('ZADD', Q.prefix .. ':group:' .. group.key, group.popped[i + 1], group.popped[i])
    end
  end
end

function Guard.cut_outbox()
  if not Q.outbox then return end
  for i = #Q.outbox, (Q.flushed and Q.marked_outbox or 0) + 1, -1 do Q.outbox[i] = nil end
  if Q.outbox[1] then Outbox.write() end
end

-- Abandon the call. The counters are written whatever else fails, so that no number is given out twice.
function Guard.abandon()
  forget_buffers()
  pcall(Guard.put_back)
  Guard.cut_events()
  if Q.flushed then pcall(send_news) end
  pcall(write_events)
  pcall(Guard.cut_outbox)
  Q.stream = false
  write_meta()
end

-- Return the error to raise. Our refusals, and the server's, stay as they are.
function Guard.meaning(raised, flags)
  local text = type(raised) == 'table' and raised.err or tostring(raised)
  local code = string.match(text, '^(%u%u+) ')
  if K then rawset(K, 1, nil) end -- the next call checks all keys
  local key = code == 'WRONGTYPE' and Q.is_open and Parts.damaged_key()
  if key then
    if flags ~= READS and not Q.is_checking then pcall(Guard.abandon) end
    return { err = 'PENSTOCK KEY ' .. (Q.is_checking and '0 ' or '1 ') .. key }
  end
  local is_about_data = not code or code == 'WRONGTYPE'
    or code == 'ERR' and not string.find(text, 'ACL failure', 1, true)
  if not is_about_data then return type(raised) == 'table' and raised or { err = text } end
  code = Q.is_open and 'DAMAGED ' or 'META '
  if Q.is_open and flags ~= READS then
    Q.is_open = false
    pcall(Guard.abandon)
  end
  Q.is_open = false
  return { err = 'PENSTOCK ' .. code .. string.gsub(text, '[\r\n]', ' ') }
end
