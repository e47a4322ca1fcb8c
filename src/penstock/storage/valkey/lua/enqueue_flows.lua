-- enqueue_flows: adds whole flows.
-- arguments: stream, number, repeated, layout, then as enqueue, for all nodes of all flows
--   layout: MessagePack of a list with a list of queues per flow, one for each of its nodes; the first is the root's
-- returns:   {answers, 1 if the outbox is not empty}: for each root status letter and state letter, incarnation, result
--   ('' if none)
-- refuses:   NOTFOUND, COST, as enqueue
-- events:    as enqueue

-- Return the nodes (id, body, special) in the arguments, from specials on, and the headers by reference.
function Flows.read_nodes(args, at)
  local specials, headers, nodes = args[at] ~= '' and decode(args[at]) or {}, {}, {}
  local count = tonumber(args[at + 1])
  for i = 1, count do headers[args[at + 2 * i]] = args[at + 1 + 2 * i] end
  local first = at + 2 + 2 * count
  for i = first, #args, 2 do
    local n = #nodes + 1
    nodes[n] = { id = args[i], body = args[i + 1], special = specials[n] or false }
  end
  return nodes, headers
end

-- Refuse the call if a node of this queue depends on a job of this queue that does not exist, or costs too much.
function Flows.check_nodes(nodes, queues, first)
  local own = {}
  for i = 1, #queues do
    if queues[i] == Outbox.here() then own[nodes[first + i - 1].id] = true end
  end
  for i = 1, #queues do
    local node = nodes[first + i - 1]
    if queues[i] == Outbox.here() then
      if node.special and node.special[13] then Flows.refuse_unknown(node.id, node.special[13], own) end
      local refusal = Groups.cost_refused(node.id, Shortcut.any_extras_of_body(node.body))
      if refusal then refuse('COST', refusal) end
    end
  end
end

-- Read the existing jobs of the nodes of this queue, and store the headers that they refer to, once for all.
function Flows.prepare(nodes, queues, headers)
  local ids, here = {}, Outbox.here()
  for i = 1, #nodes do
    if queues[i] == here then ids[#ids + 1] = nodes[i].id end
  end
  load(ids, true)
  for reference, header in pairs(headers) do call('HSETNX', K.options, reference, header) end
end

-- Return whether no node has to find another one of this call: no id occurs twice, and the dependencies themselves report
-- their ends.
local function are_apart(nodes, queues)
  local here, seen = Outbox.here(), {}
  for i = 1, #nodes do
    local special = nodes[i].special
    if queues[i] == here and seen[nodes[i].id] then return false end
    seen[nodes[i].id] = queues[i] == here
    for _, after in ipairs(type(special) == 'table' and special[13] or {}) do
      if not after[4] then return false end
    end
  end
  return true
end

-- Add a node to its queue, which may be another one. intake: as Flows.put takes it.
function Flows.put_node(node, queue, headers, intake)
  local reference = sub(node.body, 2, 7)
  local header = byte(reference, 1) == 0 and headers[reference] or false
  if queue == Outbox.here() then
    return Flows.put(node.id, node.body, node.special, intake)
  end
  Outbox.send(queue, 'p' .. encode({ node.id, node.body, node.special, reference, header }))
end

local function put_flow(nodes, queues, first, headers, answers, intake)
  local status, job = Flows.put_node(nodes[first], queues[1], headers)
  need_result(job)
  local at = #answers
  answers[at + 1], answers[at + 2] = status .. job.state, job.inc
  answers[at + 3] = job.state == 'c' and (job.result or '') or ''
  if status ~= 'q' then return end
  for i = 2, #queues do Flows.put_node(nodes[first + i - 1], queues[i], headers, intake) end
end

register('enqueue_flows', function(keys, args)
  open(keys)
  local kept = remembered(args[1], args[2], args[3])
  if kept then return decode(kept) end
  local layout, nodes, headers = decode(args[4]), Flows.read_nodes(args, 5)
  local first = 1
  for i = 1, #layout do
    Flows.check_nodes(nodes, layout[i], first)
    first = first + #layout[i]
  end
  local answers, queues = {}, {}
  for i = 1, #layout do
    for j = 1, #layout[i] do queues[#queues + 1] = layout[i][j] end
  end
  Flows.prepare(nodes, queues, headers)
  local intake = are_apart(nodes, queues) and Intake.new() or nil
  first = 1
  for i = 1, #layout do
    put_flow(nodes, layout[i], first, headers, answers, intake)
    first = first + #layout[i]
  end
  if intake then Intake.finish(intake) end
  remember(args[1], args[2], encode({ answers, 1 }))
  close()
  return { answers, Outbox.is_full() and 1 or 0 }
end, REFUSED_WHEN_FULL)
