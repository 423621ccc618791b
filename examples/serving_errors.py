"""How errors are answered: `{"error": text}`, and a line in the log of the process.

400 or 422 for a malformed request, 401 without the admin's token, 404 for an unknown user or path,
408 for a body that takes too long, 409 for weights that do not fit, 413 for a request that is too
large, 415 for a body that is not declared as JSON, 429 if the queue is full, 503 if the server
stops, has no memory or cannot store events, 504 if the deadline passed, 500 for scores that are not
finite.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from serving_access import MAX_TEXT, REQUEST_ID
from serving_batcher import OUT_OF_MEMORY, Closed, Overloaded, TooLate, WorkerDied
from serving_events import NotStored
from starlette.exceptions import HTTPException as StarletteHTTPException

LOGGER = logging.getLogger("serving")
STATUS = {
    Overloaded: 429,
    Closed: 503,
    TooLate: 504,
    WorkerDied: 503,
    NotStored: 503,
    FloatingPointError: 500,
    **dict.fromkeys(OUT_OF_MEMORY, 503),
}
NOT_JSON = "the body must be JSON, with the header content-type: application/json"


def error_response(status: int, text: str, path: str) -> Response:
    """The error, which is also logged. A name or a number of the request in it may be as long as
    the request, and may have line ends."""
    text = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
    known = {"request_id": REQUEST_ID.get()}
    LOGGER.warning("%d for %r: %r", status, path[:MAX_TEXT], text, extra=known)
    return JSONResponse({"error": text}, status)


def answer_errors(
    app: FastAPI, answer: Callable[[int, str, str], Response] = error_response
) -> None:
    """Let `answer(status, text, path)` make the app's answers to malformed requests and to
    HTTPExceptions."""

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        if isinstance(error.body, bytes):  # not parsed
            return answer(415, NOT_JSON, request.url.path)
        return answer(*fault(error), request.url.path)

    @app.exception_handler(StarletteHTTPException)
    async def refused(request: Request, error: StarletteHTTPException) -> Response:
        response = answer(error.status_code, str(error.detail), request.url.path)
        response.headers.update(error.headers or {})
        return response


def fault(error: RequestValidationError | ValidationError, *place: str) -> tuple[int, str]:
    """Status and text of the first error in this place. The input is left out: it may be large, or
    NaN, which is no JSON."""
    first = error.errors()[0]
    return (
        400 if first["type"] == "json_invalid" else 422
    ), f"{'.'.join(map(str, (*place, *first['loc'])))}: {first['msg']}"


@contextmanager
def http_errors() -> Iterator[None]:
    """Turns errors into HTTPExceptions with the status of the kind of error. The text of unknown
    ones is not for clients."""
    try:
        yield
    except HTTPException:
        raise
    except Exception as error:
        known = [status for kind, status in STATUS.items() if isinstance(error, kind)]
        text = str(error) if known else f"{type(error).__name__} in the model"
        raise HTTPException(known[0] if known else 500, text) from error
