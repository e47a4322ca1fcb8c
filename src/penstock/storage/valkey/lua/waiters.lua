-- Waiters: listeners that are notified of a job's end, and the news they receive.
--
-- news   state:1 fetch:1 inc:6 id_length:2 result_length+1:4 failure_length+1:4 id result failure
--        (a length field of 0: absent; fetch is '1' if the result is too long to send along)

local NEWS_RESULT = 65536

-- Read the waiters of many ids; without it, waiters_of() would ask for each.
local function read_waiters(ids)
  if Q.waiters == 0 or not ids[1] then return end
  local stored = read_many('HMGET', K.waiters, ids)
  for i = 1, #ids do
    if Q.listening[ids[i]] == nil then Q.listening[ids[i]] = stored[i] and decode(stored[i]) or false end
  end
end

local function waiters_of(id)
  local listeners = Q.listening[id]
  if listeners == nil and Q.waiters > 0 then
    local stored = call('HGET', K.waiters, id)
    listeners = stored and decode(stored) or false
    Q.listening[id] = listeners
  end
  return listeners or nil
end

local function add_waiter(id, listener)
  local listeners = waiters_of(id)
  if not listeners then
    listeners = {}
    Q.waiters = Q.waiters + 1
    Q.listening[id] = listeners
  end
  for i = 1, #listeners do
    if listeners[i] == listener then return end
  end
  listeners[#listeners + 1] = listener
  Q.listening_changed[id] = true
end

local function news_of(job, state)
  local result, failure, fetch = nil, nil, '0'
  if state == 'c' then
    result = job.result
    if job.big_result and not result then fetch = '1' end
    if result and #result > NEWS_RESULT then result, fetch = nil, '1' end
  elseif state == 'f' or job.has_failure then
    failure = job.failure or call('HGET', K.failures, job.id)
    if state == 'x' and decode(failure)[1] ~= 'Replaced' then failure = nil end
  end
  local result_length, failure_length = result and #result + 1 or 0, failure and #failure + 1 or 0
  return pack('>c1c1I6HI4I4', state, fetch, job.inc, #job.id, result_length, failure_length)
    .. job.id .. (result or '') .. (failure or '')
end

-- Notify every waiter that the job ended as state, and forget them.
local function tell(job, state)
  local listeners = waiters_of(job.id)
  if not listeners then return end
  local news = news_of(job, state)
  for i = 1, #listeners do
    local list = list_in(Q.news, listeners[i])
    list[#list + 1] = news
  end
  Q.listening[job.id] = false
  Q.listening_changed[job.id] = true
  Q.waiters = Q.waiters - 1
end

local function write_waiters()
  for id in pairs(Q.listening_changed) do
    local listeners = Q.listening[id]
    if listeners then hset('waiters', id, encode(listeners)) else hdel('waiters', id) end
  end
end

local function send_news()
  for listener, list in pairs(Q.news) do
    local key = Q.prefix .. ':news:' .. listener
    if not pcall(send, 'RPUSH', key, list) then -- of another type, and short-lived in any case
      call('UNLINK', key)
      send('RPUSH', key, list)
    end
    call('PEXPIRE', key, BOUNDS.NEWS_KEPT_MS)
  end
  Q.news = {}
end
