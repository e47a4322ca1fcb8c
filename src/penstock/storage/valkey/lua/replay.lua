-- Replay: the answer to the last call of a stream is kept, for a client that did not receive it.
--
-- meta m:<stream>   number:6 at:6 answer. Verbs that must run once begin with the arguments stream, number, repeated: '1' if
-- the call may be a repetition, so that the kept answer must be read.

local function remembered(stream, number, repeated)
  if repeated ~= '1' then return nil end
  local kept = call('HGET', K.meta, 'm:' .. stream)
  if not kept then return nil end
  local last, at = unpack('>I6I6', kept)
  if last == tonumber(number) and at > Q.now - BOUNDS.REPLAY_KEPT_MS then return sub(kept, 13) end
end

-- Keep the answer. close() writes it with the counters.
local function remember(stream, number, answer)
  Q.stream, Q.answer = 'm:' .. stream, pack('>I6I6', tonumber(number), Q.now) .. answer
end

local function forget_answers()
  local fields, old = call('HGETALL', K.meta), {}
  for i = 1, #fields, 2 do
    if sub(fields[i], 1, 2) == 'm:' and select(2, unpack('>I6I6', fields[i + 1])) <= Q.now - BOUNDS.REPLAY_KEPT_MS then
      old[#old + 1] = fields[i]
    end
  end
  if old[1] then send('HDEL', K.meta, old) end
end
