-- Links: relations of a job to other jobs. Each kind of link has a file; this one calls them all.

-- A job is to enter waiting. Return true if it is blocked instead, with its state and the reason set. keeps_number: it was
-- handed back, and must not lose its place.
function maybe_block(job, keeps_number)
  return Flows.maybe_block(job) or Groups.maybe_block(job, keeps_number)
end

-- A job has ended; or, with state 'r', it is removed before its end.
function ended(job, state)
  Groups.leave(job)
  local extras = extras_of(job)
  Flows.tell(job, state or job.state)
  if extras.dedup then Dedup.ended(job.inc, extras.dedup) end
  if extras.repeats then Schedulers.ended(job, extras.scheduler) end
end
