"""The Lua that makes each change of the Redis index one step.

Keys of one worker epoch: a set of block names and a stream of batches with ids ``seq-0``. A name of 16 bytes is a
block on the device; a 17th byte is the tier of one that lies elsewhere. The set always holds one empty name, so that an
empty set and a lost one differ.
"""

from __future__ import annotations

LOST = -1
"""Answer of `PUBLISH` where set and stream are not what this publisher left: nothing was written."""

_COMMON = """
local function own(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= 'none' and found ~= kind then redis.call('UNLINK', key) end
end
local function last_seq(events)
  if redis.call('EXISTS', events) == 0 then return 0 end
  local info = redis.call('XINFO', 'STREAM', events)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then return tonumber(string.match(info[i + 1], '^%d+')) end
  end
end
local function append(events, seq, ttl_ms, max_batches, payload)
  redis.call('XADD', events, 'MAXLEN', '~', max_batches, string.format('%.0f-0', seq), 'b', payload)
  redis.call('PEXPIRE', events, ttl_ms)
end
local UNCOUNTABLE = 9007199254740000
"""

REGISTER = (
    _COMMON
    + """
local worker, blocks, events = KEYS[1], KEYS[2], KEYS[3]
local suffix, epoch, payload, load, ttl_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
own(worker, 'hash')
local before = redis.call('HGET', worker, 'suffix')
if before and before ~= suffix then redis.call('UNLINK', ARGV[6] .. before, ARGV[7] .. before) end
redis.call('HSET', worker, 'v', '1', 'suffix', suffix, 'epoch', epoch, 'payload', payload, 'load', load)
for _, key in ipairs({worker, blocks, events}) do redis.call('PEXPIRE', key, ttl_ms) end
return 1
"""
)
"""Every key of one worker. What an earlier epoch left is named by its suffix, which lies in the same slot."""

ENLIST = (
    _COMMON
    + """
local workers, member, ttl_ms = KEYS[1], ARGV[1], tonumber(ARGV[2])
own(workers, 'zset')
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', workers, now_ms, member)
redis.call('ZREMRANGEBYSCORE', workers, '-inf', now_ms - ttl_ms)
redis.call('PEXPIRE', workers, ttl_ms)
return 1
"""
)

WITHDRAW = """
local worker, blocks, events = KEYS[1], KEYS[2], KEYS[3]
redis.call('UNLINK', blocks, events)
if redis.call('TYPE', worker).ok == 'hash' and redis.call('HGET', worker, 'suffix') == ARGV[1] then
  redis.call('UNLINK', worker)
end
return 1
"""
"""The list keeps the id until its time is over, for another epoch may be announcing itself; readers find no record."""

PUBLISH = (
    _COMMON
    + """
local blocks, events = KEYS[1], KEYS[2]
local floor, ttl_ms, max_batches, payload = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], ARGV[4]
local width = tonumber(ARGV[7])
own(blocks, 'set')
own(events, 'stream')
local last = last_seq(events)
if (redis.call('EXISTS', blocks) == 1) ~= (last > 0) or last < floor or last > UNCOUNTABLE then return -1 end
local function apply(command, packed)
  for start = 1, #packed, 1000 * width do
    local names, stop = {}, math.min(#packed, start + 1000 * width - 1)
    for at = start, stop, width do names[#names + 1] = string.sub(packed, at, at + width - 1) end
    redis.call(command, blocks, unpack(names))
  end
end
if last == 0 then redis.call('SADD', blocks, '') end
apply('SADD', ARGV[5])
apply('SREM', ARGV[6])
redis.call('PEXPIRE', blocks, ttl_ms)
append(events, last + 1, ttl_ms, max_batches, payload)
return last + 1
"""
)

CLEAR = (
    _COMMON
    + """
local blocks, events = KEYS[1], KEYS[2]
local floor, ttl_ms, max_batches, payload = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], ARGV[4]
own(blocks, 'set')
own(events, 'stream')
local last = last_seq(events)
if last > UNCOUNTABLE then
  redis.call('UNLINK', events)
  last = 0
end
local seq = last + 1
if last < floor then seq = floor + 2 end
redis.call('UNLINK', blocks)
redis.call('SADD', blocks, '')
redis.call('PEXPIRE', blocks, ttl_ms)
append(events, seq, ttl_ms, max_batches, payload)
return seq
"""
)

HOLDS = (
    _COMMON
    + """
local blocks, events = KEYS[1], KEYS[2]
if redis.call('TYPE', blocks).ok ~= 'set' or redis.call('TYPE', events).ok ~= 'stream' then return 0 end
local last = last_seq(events)
if last < tonumber(ARGV[1]) or last > UNCOUNTABLE then return 0 end
return 1
"""
)

SNAPSHOT = (
    _COMMON
    + """
local blocks, events = KEYS[1], KEYS[2]
if redis.call('TYPE', blocks).ok ~= 'set' or redis.call('TYPE', events).ok ~= 'stream' then return {0, 0, 0, '', ''} end
local size = redis.call('SCARD', blocks)
if size > tonumber(ARGV[1]) then return {last_seq(events), size, 0, '', ''} end
local names, lower, foreign = {}, {}, 0
for _, name in ipairs(redis.call('SMEMBERS', blocks)) do
  if #name == 16 then names[#names + 1] = name
  elseif #name == 17 and string.byte(name, 17) < 16 then lower[#lower + 1] = name
  elseif name ~= '' then foreign = foreign + 1 end
end
return {last_seq(events), size, foreign, table.concat(names), table.concat(lower)}
"""
)
