-- The outbox: messages to other queues. close() writes it; the client reads and delivers it, and deletes messages that the
-- target has applied.
--
-- entry   sequence (16 digits) target '\0' message. A message begins with a letter:
--   p   MessagePack of {id, body, special or false, reference, header}: enqueue this job (enqueue.lua)
--   l   MessagePack of {id, dependent}: notify the dependent of that job's end
--   d   MessagePack of {dependent's id, flow, queue, id, state letter, result or failure}: a dependency has ended
--   x   inc:6 failed_at:6 failures:4 id_length:2 handled_by_length:2 task_length:2 failure_length:4 id handled_by task
--       failure payload: a dead letter; the client turns it into a p

local Outbox, Flows = {}, {} -- Flows: flows.lua

Outbox.BIT = 4 -- of uses

function Outbox.send(target, message)
  local list = Q.outbox
  if not list then
    list = {}
    Q.outbox = list
  end
  list[#list + 1] = { target, message }
end

-- The sequence follows the clock, so that it keeps rising if the store loses its last moments.
function Outbox.write()
  local last = max(tonumber(call('HGET', K.meta, 'outbox') or 0) or 0, Q.now * 1000)
  local entries = {}
  for i = 1, #Q.outbox do
    entries[i] = format('%016.0f', last + i) .. Q.outbox[i][1] .. '\0' .. Q.outbox[i][2]
  end
  call('HSET', K.meta, 'outbox', digits(last + #entries))
  send('RPUSH', K.outbox, entries)
  Q.outbox = false
  if floor(Q.uses / Outbox.BIT) % 2 == 0 then Q.uses = Q.uses + Outbox.BIT end
end

-- Return the name of this queue.
function Outbox.here()
  if Q.name_of ~= Q.prefix then
    Q.name, Q.name_of = string.match(Q.prefix, '/([^/]+)/0}$'), Q.prefix
  end
  return Q.name
end

-- Return whether messages wait for delivery.
function Outbox.is_full()
  return floor(Q.uses / Outbox.BIT) % 2 == 1
end

-- Return a verb's one-text answer, in a list if messages wait for delivery.
function Outbox.answer(answer)
  return Outbox.is_full() and { answer } or answer
end
