-- extend: extends held leases.
-- arguments: worker, lease_ms, info (given), info, then id and token:6 of each lease
-- returns:   a letter per lease: e extended, c cancel, x expired, l lost
-- events:    none

local HEAD = 4

register('extend', function(keys, args)
  open(keys, Parts.HOT)
  local ids, letters, tokens = {}, {}, {}
  for at = HEAD + 1, #args, 2 do
    ids[#ids + 1] = args[at]
    tokens[#ids] = args[at + 1]
  end
  local records, lease_until = read_many('HMGET', K.state, ids), digits(Q.now + tonumber(args[2]))
  for i = 1, #ids do
    local record = records[i]
    if not record or byte(record, 1) ~= 97 or sub(record, 9, 14) ~= tokens[i] then
      letters[i] = 'l'
    else
      local expires = unpack('>I6', record, 55)
      letters[i] = bit_of(byte(record, FLAGS_AT), 2) and 'c' or expires > 0 and expires <= Q.now and 'x' or 'e'
      zadd('active', lease_until, ids[i])
    end
  end
  if args[3] == '1' then hset('workers', args[1], pack('>I6', Q.now) .. args[4]) end
  close()
  return table.concat(letters)
end)
