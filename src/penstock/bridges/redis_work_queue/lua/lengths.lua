-- lengths: both lists as of one instant.
-- returns: {entries in the queue, entries in processing}

return { redis.call('LLEN', QUEUE), redis.call('LLEN', PROCESSING) }
