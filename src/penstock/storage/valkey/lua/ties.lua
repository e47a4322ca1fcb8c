-- Ties: what a job whose annex binds has to do with others. Each kind of tie has a file; this one asks them all.

-- A job is to enter waiting. True if it is blocked instead; then its state, and what it is blocked by, are set.
-- keeps_number: it is handed back, and was not to lose its place.
function hold_back(job, keeps_number)
  return Flows.hold_back(job) or Groups.hold_back(job, keeps_number)
end

-- A job has ended, or is removed before its end; then state is 'r'.
function ended(job, state)
  Groups.leave(job)
  local annex = annex_of(job)
  Flows.tell(job, state or job.state)
  if annex.d then Dedup.ended(job.inc, annex.d) end
  if annex.r then Schedulers.ended(job, annex.s) end
end
