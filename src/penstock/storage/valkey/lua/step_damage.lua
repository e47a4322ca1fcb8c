-- Damaged steps: which records of steps cannot be read, and how their bytes are put aside (quarantine.lua).

do

local BODY_AT, NIL = 20, 192
-- The first bytes of values in MessagePack, with the formats of the length or number that follows.
local BYTES, TEXT = { [196] = '>B', [197] = '>H', [198] = '>I4' }, { [217] = '>B', [218] = '>H', [219] = '>I4' }
local COUNT = { [204] = '>B', [205] = '>H', [206] = '>I4' }

function Steps.is_text(text)
  for _, pattern in ipairs({ '[%z\1-\127]+', '[\194-\223][\128-\191]', '[\224-\239][\128-\191][\128-\191]',
    '[\240-\244][\128-\191][\128-\191][\128-\191]' }) do
    text = string.gsub(text, pattern, '')
  end
  return text == ''
end

-- Return the number that begins at a place, and the place after it. Numbers below most are in the first byte, from base on.
local function read_number(body, at, formats, base, most)
  local first = byte(body, at)
  if first >= base and first < base + most then return first - base, at + 1 end
  return unpack(formats[first], body, at + 1)
end

-- Return the text, or bytes, that begin at a place, and the place after them.
local function read_part(body, at, formats, base, most)
  local length, from = read_number(body, at, formats, base, most)
  assert(from + length - 1 <= #body)
  return sub(body, from, from + length - 1), from + length
end

-- Return the place after a failure that begins at a place.
local function after_failure(body, at)
  if byte(body, at) == NIL then return at + 1 end
  local count, text = byte(body, at) - 144, nil
  assert(count >= 2 and count <= 3)
  at = at + 1
  for _ = 1, count do
    text, at = read_part(body, at, TEXT, 160, 32)
    assert(Steps.is_text(text))
  end
  return at
end

-- Read a record as core.step.StepBody does. Return the size of the result, and the result if it is in the body.
local function read_record(stored)
  assert(string.find(stored, '^[cfrws]') and #stored >= BODY_AT)
  local body, size, result, _ = sub(stored, BODY_AT), nil, nil, nil
  local count, at = byte(body, 1) - 144, 2
  assert(count >= 5 and count <= 15)
  _, at = read_part(body, at, BYTES, 0, 0)
  _, at = read_number(body, at, COUNT, 0, 128)
  at = after_failure(body, at)
  size, at = read_number(body, at, COUNT, 0, 128)
  if byte(body, at) == NIL then
    at = at + 1
  else
    result, at = read_part(body, at, BYTES, 0, 0)
  end
  local rest = #body + 1 - at -- fields that a later version has added
  assert((count > 5 and rest >= count - 5 or count == 5 and rest == 0) and (not result or #result == size))
  return size, result
end

-- Return why a step cannot be read, or nil.
function Steps.problem(id, name, stored)
  if not Steps.is_text(name) then return 'the name of a step is not UTF-8' end
  local is_read, size, result = pcall(read_record, stored)
  if not is_read then return 'step ' .. name .. ' cannot be decoded' end
  if not result and call('HSTRLEN', Steps.results_key(id), name) ~= size then
    return 'the result of step ' .. name .. ' is missing'
  end
end

local function is_hash(key)
  return type(redis.pcall('HLEN', key)) == 'number'
end

-- Return why the steps of a job cannot be read, or nil.
function Steps.damage(id)
  if not is_hash(Steps.key(id)) or not is_hash(Steps.results_key(id)) then return 'the steps are not a hash' end
  local fields = call('HGETALL', Steps.key(id))
  for i = 1, #fields, 2 do
    local problem = Steps.problem(id, fields[i], fields[i + 1])
    if problem then return problem end
  end
end

local function packed(bytes)
  return bytes and '\198' .. pack('>I4', #bytes) .. bytes or '\192'
end

-- Remove a key that is not a hash. Return its name and value, packed, if the value is a string.
local function take_key(key)
  local text = redis.pcall('GET', key)
  call('UNLINK', key)
  return packed(key) .. packed(type(text) == 'string' and text or nil)
end

-- Remove the steps of a job that cannot be read. Return MessagePack of their bytes: by name, the record and the large result.
function Steps.take_damaged(id)
  local key, results_key, taken = Steps.key(id), Steps.results_key(id), {}
  for _, each in ipairs({ key, results_key }) do
    if not is_hash(each) then taken[#taken + 1] = take_key(each) end
  end
  local fields = call('HGETALL', key)
  for i = 1, #fields, 2 do
    local name, stored = fields[i], fields[i + 1]
    if Steps.problem(id, name, stored) then
      taken[#taken + 1] = packed(name) .. '\146' .. packed(stored) .. packed(call('HGET', results_key, name))
      call('HDEL', key, name)
      call('HDEL', results_key, name)
    end
  end
  return taken[1] and '\223' .. pack('>I4', #taken) .. table.concat(taken) or nil
end

end
