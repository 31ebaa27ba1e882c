-- now: seconds by the server's clock (C10); tests hand theirs in as the first argument, everybody else an empty string.
-- tick: the server's microseconds, a counter that needs no key to survive.
local ticks = redis.call('TIME')
local now, tick = tonumber(ARGV[1]) or ticks[1] + ticks[2] / 1e6, ticks[1] * 1e6 + ticks[2]
local function seconds(value) return string.format('%.6f', value) end
