"""The admin's interface, on a port of its own: each request needs the header `authorization: Bearer
TOKEN`.

| request | answer |
|---|---|
| `POST /reload` | reads the file of weights again, and puts them in place between two batches if
they are others | | `DELETE /users/{user}` | forgets the events that the user's requests brought,
also in the store | | `GET /config` | the options of the program |
"""

import asyncio
import secrets
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException
from fastapi.responses import Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from serving_access import Access
from serving_app import Service
from serving_errors import answer_errors, http_errors

MIN_TOKEN = 16  # characters


def read_token(path: Path) -> str:
    """The token in a file, which is not empty space around it. ValueError if it is short."""
    token = path.read_text(encoding="utf-8").strip()
    if len(token) < MIN_TOKEN:
        raise ValueError(
            f"{path} must have a token of at least {MIN_TOKEN} characters, got {len(token)}"
        )
    return token


def make_admin(service: Service, token: str, config: dict[str, Any]) -> FastAPI:
    bearer = HTTPBearer(auto_error=False)

    def check(given: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]) -> None:
        known = given is not None and secrets.compare_digest(
            given.credentials.encode(), token.encode()
        )
        if not known:
            raise HTTPException(401, "a token is needed", {"www-authenticate": "Bearer"})

    app = FastAPI(dependencies=[Depends(check)], openapi_url=None)
    app.add_middleware(Access)
    answer_errors(app)

    @app.post("/reload")
    async def reload() -> dict[str, int]:
        with http_errors():
            return {"weights_version": await service.reload()}

    @app.delete("/users/{user:path}", status_code=204, response_class=Response)
    async def forget(user: str) -> None:
        row = service.to_row(user)
        with http_errors():
            await asyncio.wrap_future(
                service.batcher.between_batches(lambda: service.ranker.forget_user(row))
            )

    @app.get("/config")
    async def options() -> dict[str, Any]:
        return config

    return app


class ByPort:
    """Requests that come to the admin's port go to its application, all others to the public
    one."""

    def __init__(self, public: FastAPI, admin: FastAPI, port: int):
        self.public, self.admin, self.port, self.state = public, admin, port, public.state

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_admin = scope["type"] == "http" and scope["server"][1] == self.port
        await (self.admin if is_admin else self.public)(scope, receive, send)
