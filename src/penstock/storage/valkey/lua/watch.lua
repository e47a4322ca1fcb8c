-- watch: registers a listener for the ends of jobs.
-- arguments: listener, then ids
-- returns:   per id the news (waiters.lua) if the job has ended, else ''
-- refuses:   NOTFOUND with the id of a job that has no record, or is past its time; nothing is watched then
-- events:    none

register('watch', function(keys, args)
  open(keys)
  local ids, answers = {}, {}
  for i = 2, #args do ids[i - 1] = args[i] end
  load(ids)
  for i = 1, #ids do
    local job = job_for(ids[i])
    if not job or is_over(job) then refuse('NOTFOUND', ids[i]) end
  end
  for i = 1, #ids do
    local job = job_for(ids[i])
    if ENDED[job.state] then
      answers[i] = news_of(job, job.state)
    else
      add_waiter(job.id, args[1])
      answers[i] = ''
    end
  end
  close()
  return answers
end)
