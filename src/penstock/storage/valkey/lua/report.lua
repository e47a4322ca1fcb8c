-- report: progress, log lines, payload and usage of running jobs.
-- arguments: stream, number, repeated, then per report id, token:6, given (a letter for each: p progress, y payload, u usage),
--   progress, payload, usage as JSON, number of skipped log lines, number of lines, lines
-- returns:   a letter per report: y, or n if the lease was lost
-- events:    progressed, used
-- logs:      the kept log lines of a job, from a line on.
-- arguments: id, number of the line, counting from 0 every line ever written, limit
-- returns:   {number of the first line, number of lines ever written, lines}

local LINES_KEPT = BOUNDS.LOG_LINES_KEPT

-- Append log lines. The kept lines have no gap: those before skipped lines are dropped.
local function log(job, lines, skipped)
  local key, gone = Q.prefix .. ':log:' .. job.id, 0
  if skipped > 0 then
    gone = skipped + call('LLEN', key)
    call('UNLINK', key)
  end
  send('RPUSH', key, lines) -- first: it fails if the key is of another type
  call('SADD', K.logged, job.id)
  local surplus = call('LLEN', key) - LINES_KEPT
  if surplus > 0 then
    gone = gone + surplus
    call('LTRIM', key, -LINES_KEPT, -1)
  end
  if gone > 0 then call('HINCRBY', K.unkept, job.id, gone) end
  job.has_log = true
  changed(job)
end

-- Write logs. With several, check the types of all keys before writing the first.
local function log_all(logs)
  if logs[2] then
    for i = 1, #logs do call('LLEN', Q.prefix .. ':log:' .. logs[i].job.id) end
  end
  for i = 1, #logs do log(logs[i].job, logs[i].lines, logs[i].skipped) end
end

local function report(job, given, progress, payload, used)
  if string.find(given, 'p', 1, true) then
    job.has_progress = true
    changed(job)
    hset('progress', job.id, progress)
    local group, row = emit('progressed', job)
    put(group, row, 'data', progress)
  end
  if string.find(given, 'y', 1, true) then
    need_static(job)
    job.payload = payload
    rewritten(job)
  end
  if string.find(given, 'u', 1, true) then Usage.add(job, cjson.decode(used), used) end
end

register('report', function(keys, args)
  open(keys, Parts.HOT)
  local kept = remembered(args[1], args[2], args[3])
  if kept then return kept end
  local at, starts, ids, uses = 4, {}, {}, false
  while at <= #args do
    starts[#starts + 1], ids[#ids + 1] = at, args[at]
    uses = uses or string.find(args[at + 2], 'u', 1, true) ~= nil
    at = at + 8 + tonumber(args[at + 7])
  end
  load(ids, uses) -- usage is added to the extras, which are in the static record at first
  local letters, logs = {}, {}
  for i = 1, #ids do
    local start, job = starts[i], job_for(ids[i])
    if job and job.state == 'a' and job.token == unpack('>I6', args[start + 1]) then
      report(job, args[start + 2], args[start + 3], args[start + 4], args[start + 5])
      local skipped, count, lines = tonumber(args[start + 6]), tonumber(args[start + 7]), {}
      for line = 1, count do lines[line] = args[start + 7 + line] end
      if count > 0 then logs[#logs + 1] = { job = job, lines = lines, skipped = skipped } end
      letters[i] = 'y'
    else
      letters[i] = 'n'
    end
  end
  log_all(logs)
  local reply = table.concat(letters)
  remember(args[1], args[2], reply)
  close()
  return reply
end)

register('logs', function(keys, args)
  open(keys)
  local key = Q.prefix .. ':log:' .. args[1]
  local unkept, kept = tonumber(call('HGET', K.unkept, args[1]) or 0), call('LLEN', key)
  local from, limit = min(max(0, tonumber(args[2]) - unkept), kept), tonumber(args[3])
  local lines = limit > 0 and call('LRANGE', key, from, from + limit - 1) or {}
  return { unkept + from, unkept + kept, lines }
end, READS)
