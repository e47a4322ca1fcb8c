-- claim: promotes due jobs, then leases the first jobs in line.
-- arguments: stream, number, repeated, worker, count, lease_ms
-- returns:   the reply of take(), and 1 after it if the outbox is not empty
-- events:    promoted, expired, claimed

register('claim', function(keys, args)
  open(keys, Parts.HOT)
  local kept = remembered(args[1], args[2], args[3])
  local reply = kept and reply_of_kept(kept)
  if not reply then
    Parts.check(Parts.TAKEN)
    reply = take(args[4], tonumber(args[5]), tonumber(args[6]))
    remember(args[1], args[2], kept_of(reply))
    close()
  end
  if Outbox.is_full() then reply[8] = 1 end
  return reply
end)
