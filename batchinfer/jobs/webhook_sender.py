"""Sending webhooks, signed as Standard Webhooks has it (https://www.standardwebhooks.com)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import httpx

from batchinfer.jobs.safe_url import UnsafeUrlError, safe_client
from batchinfer.jobs.webhook_queue import Answer
from batchinfer.jobs.webhooks import url_schemes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchinfer.jobs.safe_url import IpNetwork
    from batchinfer.jobs.webhook_queue import Claimed, WebhookQueue

TIMEOUT_SECONDS = 15.0
"""For each phase of an attempt; with a resolver that dawdles it stays below a claim."""
NUM_THREADS = 4
"""A receiver that dawdles holds up one of them."""
MAX_A_TICK = 100
FORGET_SECONDS = 3600.0
_log = logging.getLogger(__name__)


def sign(secret: str, message_id: str, timestamp: int, body: str) -> str:
    """The ``webhook-signature`` of a message: HMAC-SHA256 over id, time and body, with version 1's name."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    digest = hmac.new(key, f"{message_id}.{timestamp}.{body}".encode(), hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


class WebhookSender:
    """Sends what is due at each ``tick``. ``allowed`` are networks of one's own that may be reached, too."""

    def __init__(
        self,
        queue: WebhookQueue,
        *,
        allowed: Sequence[IpNetwork] = (),
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._allowed = tuple(allowed)
        self._clock = clock
        self._monotonic = monotonic
        self._forgot_at = monotonic()

    def tick(self) -> None:
        """Send what is due, and now and then forget what is old."""
        if (first := self._queue.claim()) is not None:
            with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="webhooks") as threads:
                threads.submit(self._send_all, first)
                for _ in range(NUM_THREADS - 1):
                    threads.submit(self._send_all, None)
        if self._monotonic() - self._forgot_at >= FORGET_SECONDS:
            self._forgot_at = self._monotonic()
            self._queue.forget_old()

    def send_now(self, delivery_id: str) -> bool:
        """Send one delivery at once; False if it is not pending any more or somebody else has it."""
        claimed = self._queue.claim(delivery_id)
        if claimed is not None:
            self._deliver(claimed)
        return claimed is not None

    def _send_all(self, claimed: Claimed | None) -> None:
        """Thread: send until nothing is due."""
        try:
            for _ in range(MAX_A_TICK):
                claimed = claimed or self._queue.claim()
                if claimed is None:
                    return
                self._deliver(claimed)
                claimed = None
        except Exception:  # noqa: BLE001 -- a database that is away: the claim runs out, and the next tick goes on
            _log.warning("sending webhooks failed; trying again", exc_info=True)

    def _deliver(self, claimed: Claimed) -> None:
        answer = self._ask(claimed)
        self._queue.settle(claimed, answer)
        # the URL may hold a token of the receiver's: it is not logged
        if not answer.is_success:
            _log.warning(
                "webhook %s did not take %s (attempt %s): %s",
                claimed.webhook_id, claimed.message_id, claimed.attempt, answer.error or f"status {answer.status}",
            )  # fmt: skip

    def _ask(self, claimed: Claimed) -> Answer:
        timestamp = int(self._clock())
        headers = {
            "content-type": "application/json",
            "user-agent": "batchinfer-webhooks/1",
            "webhook-id": claimed.message_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": sign(claimed.secret, claimed.message_id, timestamp, claimed.body),
        }
        schemes = url_schemes(self._allowed)
        try:
            with (
                safe_client(timeout_seconds=TIMEOUT_SECONDS, allowed=self._allowed, schemes=schemes) as client,
                # the answer's body is nobody's business, and may have no end
                client.stream("POST", claimed.url, content=claimed.body.encode(), headers=headers) as response,
            ):
                return Answer(response.status_code, retry_after_seconds=_retry_after(response))
        except UnsafeUrlError as error:
            return Answer(error=error.message)
        except httpx.TimeoutException:
            return Answer(error=f"no answer in {TIMEOUT_SECONDS:g} seconds")
        except (httpx.HTTPError, OSError) as error:
            return Answer(error=f"{type(error).__name__}: {error}"[:500])


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the receiver asks for; a date is not read: its clock is not ours."""
    with suppress(ValueError):
        return max(0.0, float(response.headers.get("retry-after", "")))
    return 0.0
