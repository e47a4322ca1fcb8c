-- clear_dedup: forgets the record of a dedup key; its job is not changed.
-- arguments: key
-- returns:   1 if there was a record
-- dedup_of:  the id of the job that a key stands for ('': none)
-- arguments: key
-- events:    none

register('clear_dedup', function(keys, args)
  open(keys)
  local was_there = Dedup.drop(args[1])
  close()
  return was_there and 1 or 0
end)

register('dedup_of', function(keys, args)
  open(keys)
  local record = Dedup.read(args[1])
  return Dedup.stands(record) and record.id or ''
end, READS)
