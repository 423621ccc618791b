"""Refuses requests before they are parsed."""

import asyncio
from collections.abc import Callable, Collection
from typing import Any

from fastapi.responses import Response
from serving_bodies import ServiceLimits
from starlette.exceptions import HTTPException


class Admission:
    """Refuses requests before they are parsed.

    408: the body is not complete after body_seconds. The connection is closed.
    413: the body is larger than max_body. It is not read if it has a length, else until it gets too
    long.
    429: as many requests to the paths are in progress as the queue and two batches hold. More would
    wait to be parsed or answered, where the queue's limit and the deadlines do not see them. Once
    its answer begins a request does not count: the client may never read it.

    A client that leaves before the body is complete is counted as 499. FastAPI would take it for a
    malformed body.
    """

    def __init__(
        self,
        app: Any,
        limits: ServiceLimits,
        answer: Callable[[int, str, str], Response],
        paths: Collection[str] = ("/rank",),
    ):
        self.app, self.max_body, self.body_seconds, self.answer = (
            app,
            limits.max_body,
            limits.body_seconds,
            answer,
        )
        self.paths = paths
        self.ranking, self.max_ranking = 0, limits.batches.max_queue + 2 * limits.batches.max_users

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.max_body:
            response = self.answer(
                413,
                f"the body must be at most {self.max_body} bytes, got {int(length)}",
                scope["path"],
            )
            return await response(scope, receive, send)
        request = _Arriving(self, scope["path"], receive, send)
        try:
            await self.app(scope, request.receive, request.send)
        except asyncio.CancelledError:
            if not request.is_late:
                raise
            response = self.answer(
                408, f"the body must be complete within {self.body_seconds:g} s", scope["path"]
            )
            response.headers["connection"] = "close"
            await response(scope, receive, send)
        finally:
            request.leave()


class _Arriving:
    """A request until its answer begins. It counts as in progress once its body is complete."""

    def __init__(self, admission: Admission, path: str, receive: Any, send: Any):
        self.admission, self.path, self._receive, self._send = admission, path, receive, send
        self.received, self.is_complete, self.counts, self.is_late = 0, False, False, False
        self.task, self.timer = asyncio.current_task(), None

    async def receive(self) -> Any:
        if self.timer is None:  # a request without a body has none
            self.timer = asyncio.get_running_loop().call_later(
                self.admission.body_seconds, self._end
            )
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self.is_complete:
            raise HTTPException(499, "the client left")
        self.received += len(message.get("body", b""))
        if self.received > self.admission.max_body:
            raise HTTPException(413, f"the body must be at most {self.admission.max_body} bytes")
        if not (self.is_complete or message.get("more_body", False)):
            self.is_complete = True
            self.timer.cancel()
            self._enter()
        return message

    async def send(self, message: Any) -> None:
        self.leave()
        await self._send(message)

    def leave(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.admission.ranking -= self.counts
        self.counts = False

    def _enter(self) -> None:
        admission = self.admission
        if self.path in admission.paths:
            if admission.ranking >= admission.max_ranking:
                raise HTTPException(429, f"{admission.ranking} requests are in progress")
            self.counts = True
            admission.ranking += 1

    def _end(self) -> None:
        self.is_late = self.task is not None and self.task.cancel()
