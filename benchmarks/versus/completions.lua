-- wrk script: POSTs the lines of a file, each one JSON body, in random order.
-- Prints one line "RESULT {...}" with what was answered.

local threads = {}

function setup(thread)
  table.insert(threads, thread)
end

function init(arguments)
  bodies = {}
  for line in io.lines(arguments[1]) do
    bodies[#bodies + 1] = line
  end
  headers = { ["Content-Type"] = "application/json" }
  math.randomseed(os.time())
  answered, body_bytes, failed = 0, 0, 0
end

function request()
  return wrk.format("POST", nil, headers, bodies[math.random(#bodies)])
end

function response(status, fields, body)
  answered = answered + 1
  body_bytes = body_bytes + #body
  if status ~= 200 then
    failed = failed + 1
  end
end

function done(summary, latency)
  local total = { answered = 0, body_bytes = 0, failed = 0 }
  for _, thread in ipairs(threads) do
    for name, _ in pairs(total) do
      total[name] = total[name] + thread:get(name)
    end
  end
  local lost = summary.errors.connect + summary.errors.read + summary.errors.write
    + summary.errors.timeout
  print(string.format(
    'RESULT {"requests":%d,"body_bytes":%d,"failed":%d,"bytes":%d,"microseconds":%d}',
    total.answered, total.body_bytes, total.failed + lost, summary.bytes, summary.duration))
end
