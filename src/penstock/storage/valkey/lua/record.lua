-- Records: the two strings that store a job, and the table that a verb works on.
--
-- static record   inc:6 enqueued_at:6 body; big-endian, also read by valkey/jobs.py
--   body          flags:1 header [priority:6] [ttl:6] [length:2 run_id] [length:2 write_id] [length:4 extras] payload
--   flags         1 lifo, 2 priority, 4 ttl, 8 run_id, 16 write_id, 32 the header itself follows, 64 extras, 128 has_links:
--                 transitions of the job concern other jobs, or consumers (Extras.has_links in core/job.py)
--   header        a reference:6, a zero byte and a hash, its key in the options hash; or, with flag 32, length:2 and the
--                 header itself: MessagePack of core.job.Options without trailing defaults
--
-- state record    state:1 settled_as:1 finished_at:6 token:6 inc:6 enqueued_at:6 claimed_at:6 runs:4
--                 number:6 run_at:6 ready_at:6 expires_at:6 failures:4 stalls:4
--                 flags:1 priority:6 worker_length:1 header_length:2 run_id_length:2
--                 worker header run_id [result, or class of the error]
--   state         a letter of STATES; C is completed with the result in the results hash; g h i are blocked by the group,
--                 by children, until a signal; j is g at the front of the group; k m l t are g h i s that hold a slot
--                 of the group (groups.lua)
--   0 means        inc in number, enqueued_at in run_at and ready_at: as it was enqueued
--   flags         1 lifo, 2 cancelling, 4 rerun slot, 8 failure, 16 progress, 32 log lines, 64 has_links, 128 extras_moved:
--                 the extras are in the annex hash
--
-- extras          MessagePack of core.job.Extras, a map with short names. Write extras.<name of the field> in these files, for
--                 a variable or call whose name is extras, extras_of... or ..._extras: library.py puts the short name there
--
-- The static head of the state record (token to runs) and its tail (flags onwards) are placed for settle and claim: one
-- unpack reads the head, and the tail is the same for all jobs of a batch.

local ENDED = { c = true, f = true, x = true }
local Groups = {} -- groups.lua
local Shortcut = {} -- shortcut.lua
Groups.HOLDING = { g = 'k', h = 'm', i = 'l', s = 't', k = 'g', m = 'h', l = 'i', t = 's' }
local STATE_FORMAT = '>c1c1I6I6I6I6I6I4I6I6I6I6I4I4Bi6BHH'
local FLAGS_AT, WORKER_AT = 69, 81
local LIFO_TOP = 2 ^ 48 - 1
local STAGED_FROM = BOUNDS.STAGED_FROM_MS -- a run_at this late means staged
local INLINE_RESULT = 128

local known_options, options_count = {}, 0

local function read_options(header)
  if byte(header, 1) == 0 then header = call('HGET', K.options, header) end
  local stored = decode(header)
  local options = {}
  for name, place in pairs(STORED.options) do
    local value = stored[place]
    if value == nil then value = STORED.defaults[place] end
    options[name] = value
  end
  return options
end

-- Set one of the stored options. Those before it must not be missing.
local function set_option(stored, name, value)
  local place = STORED.options[name]
  for i = #stored + 1, place - 1 do stored[i] = STORED.defaults[i] end
  stored[place] = value
end

-- Return the options of a header or reference. A reference is a hash of the content, so cached options stay valid.
local function options_of(header)
  local options = known_options[header]
  if not options then
    if options_count == 1000 then known_options, options_count = {}, 0 end
    options = read_options(header)
    known_options[header], options_count = options, options_count + 1
  end
  return options
end

-- Return the member that sorts jobs of equal priority: LIFO ones first, newest first, then FIFO ones, oldest first.
local function member_of(job)
  local flag = job.pristine and '0' or '1'
  if job.lifo then return '\1' .. pack('>I6', LIFO_TOP - job.number) .. flag .. job.id end
  return '\2' .. pack('>I6', job.number) .. flag .. job.id
end

local function bit_of(flags, bit)
  return floor(flags / bit) % 2 == 1
end

-- Read the fields of a body into job.
local function read_body(job, body)
  local flags, at, length = byte(body, 1), 8, nil
  if bit_of(flags, 32) then
    at = 4 + unpack('>H', body, 2)
    job.header = sub(body, 4, at - 1)
  else
    job.header = sub(body, 2, 7)
  end
  job.lifo = bit_of(flags, 1)
  job.priority, job.ttl, job.run_id, job.write_id, job.packed_extras = 0, 0, '', '', nil
  job.has_links = flags >= 128
  if bit_of(flags, 2) then job.priority, at = unpack('>i6', body, at) end
  if bit_of(flags, 4) then job.ttl, at = unpack('>I6', body, at) end
  if bit_of(flags, 8) then
    length = unpack('>H', body, at)
    job.run_id, at = sub(body, at + 2, at + 1 + length), at + 2 + length
  end
  if bit_of(flags, 16) then
    length = unpack('>H', body, at)
    job.write_id, at = sub(body, at + 2, at + 1 + length), at + 2 + length
  end
  if bit_of(flags, 64) then
    length = unpack('>I4', body, at)
    job.packed_extras, at = sub(body, at + 4, at + 3 + length), at + 4 + length
  end
  job.body, job.payload_at = body, at
  return job
end

local function body_of(job)
  local flags = (job.lifo and 1 or 0) + (job.priority ~= 0 and 2 or 0) + (job.ttl > 0 and 4 or 0)
    + (job.run_id ~= '' and 8 or 0) + (job.write_id ~= '' and 16 or 0) + (job.packed_extras and 64 or 0)
    + (job.has_links and 128 or 0)
  local is_reference = byte(job.header, 1) == 0
  return (is_reference and pack('>B', flags) or pack('>BH', flags + 32, #job.header)) .. job.header
    .. (job.priority ~= 0 and pack('>i6', job.priority) or '')
    .. (job.ttl > 0 and pack('>I6', job.ttl) or '')
    .. (job.run_id ~= '' and pack('>H', #job.run_id) .. job.run_id or '')
    .. (job.write_id ~= '' and pack('>H', #job.write_id) .. job.write_id or '')
    .. (job.packed_extras and pack('>I4', #job.packed_extras) .. job.packed_extras or '')
end

local function payload_of(job)
  return job.payload or sub(job.body, job.payload_at)
end

-- Holds on finished jobs (holds.lua).
local Holds = {}

-- Return until when a finished job is kept.
local function kept_until(job)
  local options = options_of(job.header)
  local ttl = job.state == 'f' and options.failure_ttl_ms or options.result_ttl_ms
  return job.finished + (job.has_links and max(ttl, Holds.ms(job)) or ttl)
end

local function static_of(job)
  return pack('>I6I6', job.inc, job.enq) .. body_of(job) .. payload_of(job)
end

local function state_of(job)
  local flags = (job.lifo and 1 or 0) + (job.cancelling and 2 or 0) + (job.rerun and 4 or 0)
    + (job.has_failure and 8 or 0) + (job.has_progress and 16 or 0) + (job.has_log and 32 or 0)
    + (job.has_links and 64 or 0) + (job.extras_moved and 128 or 0)
  local letter, inline = job.state, ''
  if letter == 'c' then
    if job.big_result then letter = 'C' else inline = job.result or '' end
  elseif letter == 'b' then
    letter = job.by
  elseif letter == 'f' then
    inline = job.error_type or ''
  end
  if job.slot_hold then letter = job.slot_hold == 2 and Groups.HOLDING[letter] or letter == 'g' and 'j' or letter end
  return pack(STATE_FORMAT, letter, job.settled, job.finished, job.token, job.inc, job.enq, job.claimed,
    job.runs, job.number, job.run_at, job.ready_at, job.expires, job.failures, job.stalls, flags,
    job.priority, #job.worker, #job.header, #job.run_id) .. job.worker .. job.header .. job.run_id .. inline
end

local function read_state(job, record)
  local letter, settled, finished, token, inc, enq, claimed, runs, number, run_at, ready_at, expires, failures,
    stalls, flags, priority, worker_length, header_length, run_id_length = unpack(STATE_FORMAT, record)
  local header_at = WORKER_AT + worker_length
  local run_id_at = header_at + header_length
  local rest_at = run_id_at + run_id_length
  job.big_result = letter == 'C'
  job.slot_hold = nil
  if letter == 'j' then
    letter, job.slot_hold = 'g', 1
  elseif letter == 'k' or letter == 't' or letter == 'l' or letter == 'm' then
    letter, job.slot_hold = Groups.HOLDING[letter], 2
  end
  job.state, job.by = job.big_result and 'c' or letter, nil
  if BLOCKED_BY[letter] then job.state, job.by = 'b', letter end
  job.settled, job.finished, job.token, job.inc, job.enq = settled, finished, token, inc, enq
  job.claimed, job.runs, job.failures, job.stalls, job.expires = claimed, runs, failures, stalls, expires
  job.number = number == 0 and inc or number
  job.run_at = run_at == 0 and enq or run_at
  job.ready_at = ready_at == 0 and enq or ready_at
  job.lifo, job.cancelling, job.rerun = bit_of(flags, 1), bit_of(flags, 2), bit_of(flags, 4)
  job.has_failure, job.has_progress, job.has_log = bit_of(flags, 8), bit_of(flags, 16), bit_of(flags, 32)
  job.has_links, job.extras_moved = bit_of(flags, 64), flags >= 128
  job.priority = priority
  job.worker = letter == 'a' and sub(record, WORKER_AT, header_at - 1) or ''
  job.header, job.run_id = sub(record, header_at, run_id_at - 1), sub(record, run_id_at, rest_at - 1)
  if letter == 'c' then job.result = sub(record, rest_at) end
  if letter == 'f' then job.error_type = sub(record, rest_at) end
  return job
end

-- Make job a job that was just queued, before its time is considered.
local function pristine(job)
  job.state, job.settled, job.pristine = 'w', '-', true
  job.finished, job.token, job.claimed, job.runs, job.failures, job.stalls = 0, 0, 0, 0, 0, 0
  job.number, job.run_at, job.ready_at, job.worker = job.inc, job.enq, job.enq, ''
  job.expires = job.ttl > 0 and job.enq + job.ttl or 0
  job.cancelling, job.rerun, job.has_failure, job.has_progress, job.has_log = false, false, false, false, false
  job.big_result, job.result, job.by, job.extras_moved = false, nil, nil, false
  return job
end

local function is_staged(job)
  return job.state == 's' and job.run_at >= STAGED_FROM
end

local function expiring(job)
  return job.expires > 0 and (job.state == 'w' or job.state == 's' or job.state == 'b')
end

-- Note the job's role in its group, and its place among the blocked members (groups.lua).
function Groups.note_role(job)
  local state = job.state
  job.group_role = (state == 'w' or state == 'a') and state or job.by == 'g' and 'b' or nil
  if job.slot_hold == 2 then job.group_role = job.by == 'g' and 'k' or 'h' end
  if job.by == 'g' then
    job.group_member = job.slot_hold and '\0' .. pack('>I6', job.number) .. '1' .. job.id or member_of(job)
  end
end

-- Note where the indexes have the job now: save() has to remove it there.
local function note_place(job)
  job.was = job.state
  job.was_in_line = job.pristine and not job.lifo and job.priority == 0
  job.was_member = job.state == 'w' and member_of(job) or job.id
  job.was_expiring = expiring(job)
  job.was_suspended = job.by == 'i'
  if job.state == 's' or job.by == 'h' then job.was_run_at = job.run_at end
  job.was_error = job.state == 'f' and job.error_type or nil
  if job.has_links then Groups.note_role(job) end
end

-- Return the job of the two strings (state nil: pristine; static nil: not read), or nil if there is neither.
local function job_of(id, state, static)
  local job = { id = id }
  if static then
    job.inc, job.enq = unpack('>I6I6', static)
    read_body(job, sub(static, 13))
  elseif not state then
    return nil
  end
  if state then
    read_state(job, state)
  else
    pristine(job)
  end
  note_place(job)
  return job
end
