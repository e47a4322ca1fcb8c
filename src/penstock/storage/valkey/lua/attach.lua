-- attach: adds dependencies to a job that exists.
-- arguments: stream, number, repeated, id, flow, after (MessagePack, as Flows.depend takes it), queues (MessagePack of a list:
--   those of the nodes), then as enqueue, for the nodes
-- returns:   {a attached, e ended, - not found, or f and the flow of the job, if the nodes were linked for another one; 1 if
--   the outbox is not empty}
-- refuses:   NOTFOUND, COST, as enqueue
-- events:    changed, failed; and those of enqueue

local function attach(job, flow, after)
  need_static(job)
  local extras = extras_of(job)
  extras.flow, extras.has_dependencies, job.has_links = flow, true, true
  extras_changed(job)
  Flows.depend(job.id, flow, after)
  if job.state == 's' or job.state == 'w' or job.by == 'g' then Flows.maybe_block(job) end
  emit('changed', job)
  Flows.conclude(job)
end

local function answer(args)
  load({ args[4] }, true)
  local job = job_for(args[4])
  if not job or is_over(job) or is_staged(job) then return '-' end
  if ENDED[job.state] then return 'e' end
  local flow = extras_of(job).flow
  if flow and flow ~= args[5] then return 'f' .. flow end
  local after, queues, nodes, headers = decode(args[6]), decode(args[7]), Flows.read_nodes(args, 8)
  local own = {}
  for i = 1, #nodes do own[nodes[i].id] = queues[i] == Outbox.here() end
  Flows.refuse_unknown(job.id, after, own)
  Flows.check_nodes(nodes, queues, 1)
  Flows.prepare(nodes, queues, headers)
  attach(job, args[5], after)
  for i = 1, #nodes do Flows.put_node(nodes[i], queues[i], headers) end
  return 'a'
end

register('attach', function(keys, args)
  open(keys)
  local kept = remembered(args[1], args[2], args[3])
  if kept then return { kept, 1 } end
  local letter = answer(args)
  if letter == 'a' then
    remember(args[1], args[2], letter)
    close()
  end
  return { letter, Outbox.is_full() and 1 or 0 }
end, REFUSED_WHEN_FULL)
