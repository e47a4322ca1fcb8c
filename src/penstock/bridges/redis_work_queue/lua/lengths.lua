-- lengths: reads the lengths of both lists at the same instant.
-- returns: {entries in the queue, entries in processing}

return { redis.call('LLEN', QUEUE), redis.call('LLEN', PROCESSING) }
