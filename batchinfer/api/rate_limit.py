"""Requests a minute of a key: a bucket that holds a minute's worth and refills evenly.

Counted in this process, or in Redis where that is the broker, so that all API processes count together.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

from redis.asyncio import Redis
from redis.exceptions import RedisError
from starlette.datastructures import MutableHeaders

from batchinfer.api.errors import error_response

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from batchinfer.jobs.caller import Caller

MAX_BUCKETS = 100_000
"""Keys remembered by a process; the one unused for longest is forgotten first, and starts with a full bucket."""
REDIS_SECONDS = 0.5
"""Longest wait for Redis; after that this process counts by itself."""
_log = logging.getLogger(__name__)

# KEYS[1] the bucket; ARGV: requests a minute. Redis's own clock, so that servers' clocks do not matter.
_TAKE = """
local rate = tonumber(ARGV[1])
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local bucket = redis.call('HMGET', KEYS[1], 'tokens', 'at')
local tokens = math.min(rate, (tonumber(bucket[1]) or rate) + (now - (tonumber(bucket[2]) or now)) * rate / 60)
local taken = 0
if tokens >= 1 then
  tokens = tokens - 1
  taken = 1
end
redis.call('HSET', KEYS[1], 'tokens', tostring(tokens), 'at', string.format('%.6f', now))
redis.call('EXPIRE', KEYS[1], 61)
return {taken, tostring(tokens)}
"""


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of a request's turn. ``tokens`` is what the bucket holds now."""

    is_allowed: bool
    tokens: float
    rate: int

    @property
    def wait_seconds(self) -> int:
        """Whole seconds until the next request may come."""
        return max(1, math.ceil((1 - self.tokens) * 60 / self.rate))


class Buckets(Protocol):
    """Where requests are counted."""

    async def take(self, key: str, rate: int) -> Taken:
        """One request of ``key``, which may make ``rate`` a minute."""

    async def close(self) -> None:
        """Let go of connections."""


class LocalBuckets:
    """Counted in this process."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    async def take(self, key: str, rate: int) -> Taken:
        """See :meth:`Buckets.take`."""
        now = self._now()
        tokens, at = self._buckets.pop(key, (float(rate), now))
        tokens = min(float(rate), tokens + (now - at) * rate / 60)
        is_allowed = tokens >= 1
        tokens -= is_allowed
        self._buckets[key] = (tokens, now)
        if len(self._buckets) > MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return Taken(is_allowed, tokens, rate)

    async def close(self) -> None:
        """Nothing is open."""


class RedisBuckets:
    """Counted in Redis; by this process alone while Redis is away, since an API that refuses all helps nobody."""

    def __init__(self, url: str) -> None:
        self._redis: Any = Redis.from_url(url, socket_timeout=REDIS_SECONDS, socket_connect_timeout=REDIS_SECONDS)
        self._take = self._redis.register_script(_TAKE)
        self._local = LocalBuckets()
        self._is_away = False

    async def take(self, key: str, rate: int) -> Taken:
        """See :meth:`Buckets.take`."""
        try:
            taken, tokens = await self._take(keys=[f"batchinfer:rate:{key}"], args=[rate])
        except (RedisError, OSError) as error:
            if not self._is_away:  # once, not with each request
                _log.warning("Redis does not count requests (%s); this process does", type(error).__name__)
            self._is_away = True
            return await self._local.take(key, rate)
        self._is_away = False
        return Taken(bool(taken), float(tokens), rate)

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()


def choose_buckets(broker_url: str) -> Buckets:
    """Redis where it is the broker, else this process."""
    return RedisBuckets(broker_url) if broker_url.startswith(("redis://", "rediss://")) else LocalBuckets()


class RateLimitMiddleware:
    """Answers 429 with ``Retry-After`` to a key that asks too often. ``default`` is the rate of keys without their own.

    It stands behind the check of the key: who has none is limited by whatever stands in front of the server.
    """

    def __init__(self, app: ASGIApp, buckets: Buckets, default: int | None) -> None:
        self._app = app
        self._buckets = buckets
        self._default = default

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        caller: Caller | None = scope.get("state", {}).get("caller")
        rate = None if caller is None else caller.rate_per_minute or self._default
        if caller is None or caller.key_id is None or rate is None:
            await self._app(scope, receive, send)
            return
        taken = await self._buckets.take(caller.key_id, rate)
        headers = {"X-RateLimit-Limit-Requests": str(rate), "X-RateLimit-Remaining-Requests": str(int(taken.tokens))}
        if not taken.is_allowed:
            wait = taken.wait_seconds
            message = f"This key may make {rate} requests a minute; try again in {wait} s."
            refusal = error_response(
                HTTPStatus.TOO_MANY_REQUESTS, message, code="rate_limited", headers=headers | {"Retry-After": str(wait)}
            )
            await refusal(scope, receive, send)
            return

        async def send_with_rate(reply: Message) -> None:
            if reply["type"] == "http.response.start":
                MutableHeaders(scope=reply).update(headers)
            await send(reply)

        await self._app(scope, receive, send_with_rate)
