-- claim: promotes what is due, then leases the first jobs in line.
-- arguments: lane, number, repeated, worker, count, lease_ms
-- returns:   the reply of take()
-- events:    promoted, expired, claimed

register('claim', function(keys, args)
  open(keys)
  local memo = remembered(args[1], args[2], args[3])
  if memo then return reply_of_memo(memo) end
  local reply = take(args[4], tonumber(args[5]), tonumber(args[6]))
  remember(args[1], args[2], memo_of(reply))
  close()
  return reply
end)
