-- Settings of a queue: JSON in meta, as the client wrote it. A field that is null or missing sets no bound.

local function read_settings()
  local stored = call('HGET', K.meta, 'settings')
  if not stored then return STORED.settings end
  local settings = cjson.decode(stored)
  for name, value in pairs(settings) do
    if value == cjson.null then settings[name] = nil end
  end
  return settings
end
