-- configure: replaces the settings.
-- arguments: settings as JSON
-- returns:   1
-- events:    configured

register('configure', function(keys, args)
  open(keys)
  call('HSET', K.meta, 'settings', args[1])
  -- The bit stays when the dead_letter queue is removed: budgets share it.
  if read_settings().dead_letter and Q.uses < 128 then Q.uses = Q.uses + 128 end
  emit_queue('configured', 'data', args[1])
  close()
  return 1
end)
