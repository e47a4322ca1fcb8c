-- configure: replaces the settings.
-- arguments: settings as JSON
-- returns:   1
-- events:    configured

register('configure', function(keys, args)
  open(keys)
  call('HSET', K.meta, 'settings', args[1])
  emit_queue('configured', 'data', args[1])
  close()
  return 1
end)
