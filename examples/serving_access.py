"""The name of each request, and the access log.

`x-request-id` and `traceparent` (W3C Trace Context) of a request are kept, returned with the
answer, and logged; a request without one gets a new one. Under `opentelemetry-instrument`, the
trace is that of OpenTelemetry's span.
"""

import json
import logging
import re
import secrets
import time
from contextvars import ContextVar
from datetime import datetime, timezone
from logging.handlers import WatchedFileHandler
from typing import Any

from fastapi.responses import JSONResponse

try:
    from opentelemetry.propagate import inject
except ImportError:  # optional

    def inject(carrier: dict[str, str]) -> None:
        """OpenTelemetry's function without a span."""


LOGGER = logging.getLogger("serving")
ACCESS = logging.getLogger("serving.access")
MAX_TEXT = 500  # characters of a client's text in the logs
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="-")
# printable, so that a line of a log stays one
ID = re.compile(r"[!-~]{1,128}")
# version, trace, parent and flags. Later versions may have more fields
TRACE = re.compile(
    r"(?!ff|00.{53}-)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-[!-~]*)?"
)


class Access:
    """Names requests, and writes a line of JSON for each answer to the logger `serving.access`. An
    error that nothing else answers gets a 500 with the request's id."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        received = {name: value.decode("latin-1") for name, value in scope["headers"]}
        trace = traceparent(received.get(b"traceparent", ""))
        request_id = received.get(b"x-request-id", "")
        if not ID.fullmatch(request_id):
            request_id = secrets.token_hex(16)
        REQUEST_ID.set(request_id)
        named = [(b"x-request-id", request_id.encode()), (b"traceparent", trace.encode())]
        status, begin = None, time.monotonic()

        async def answer(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], *named]}
            await send(message)

        try:
            await self.app(scope, receive, answer)
        except Exception:
            LOGGER.exception("%r failed", scope["path"], extra={"request_id": request_id})
            if status is not None:
                raise
            await JSONResponse({"error": "internal error"}, 500)(scope, receive, answer)
        finally:
            if ACCESS.isEnabledFor(logging.INFO):
                ACCESS.info(
                    json.dumps(
                        {
                            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
                            "request_id": request_id,
                            "trace_id": trace[3:35],
                            "client": (scope["client"] or [None])[0],
                            "method": scope["method"],
                            "path": scope["path"][:MAX_TEXT],
                            "status": status,
                            "ms": round(1e3 * (time.monotonic() - begin), 3),
                        }
                    )
                )


def traceparent(received: str) -> str:
    """The trace: OpenTelemetry's, else the received one if it is well formed, else a new one, which
    is not sampled."""
    carrier: dict[str, str] = {}
    inject(carrier)
    if "traceparent" in carrier:
        return carrier["traceparent"]
    if TRACE.fullmatch(received):
        return received
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"


def log_access(path: str) -> None:
    """Append the access log to this file; "-" is the standard error."""
    # programs that rotate logs may move the file
    handler = logging.StreamHandler() if path == "-" else WatchedFileHandler(path)
    handler.setFormatter(logging.Formatter("%(message)s"))
    ACCESS.addHandler(handler)
    ACCESS.setLevel(logging.INFO)
    ACCESS.propagate = False
