-- rights: finds the commands that the caller may not run on the queue's keys. A verb that found out midway could not undo
-- what it had written.
-- arguments: the names of the commands
-- returns:   the missing ones
-- events:    none

register('rights', function(keys, args)
  local missing = {}
  for i = 1, #args do
    if not redis.acl_check_cmd(args[i], keys[1] .. ':meta') then missing[#missing + 1] = args[i] end
  end
  return missing
end, READS)
