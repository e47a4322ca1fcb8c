-- configure: replaces the settings.
-- arguments: settings as JSON
-- returns:   1
-- events:    configured

register('configure', function(keys, args)
  open(keys)
  call('HSET', K.meta, 'settings', args[1])
  local has_dead_letter = read_settings().dead_letter ~= nil
  if has_dead_letter ~= (Q.uses >= 128) then Q.uses = Q.uses + (has_dead_letter and 128 or -128) end
  emit_queue('configured', 'data', args[1])
  close()
  return 1
end)
