"""A running service for tests over real sockets. It needs the extra "serve"."""

import re
import socket
import threading
import time

import httpx
import uvicorn
from serving_admin import ByPort, make_admin
from serving_app import Service, make_app
from serving_batcher import Limits
from serving_bodies import ServiceLimits

from ..marks import PATIENCE

LIMITS = ServiceLimits(
    Limits(max_queue=8, max_wait=0.002),
    max_candidates=50,
    max_events=20,
    max_body=20_000,
    body_seconds=PATIENCE,
    deadline=PATIENCE,
)


TOKEN = "token of 16 characters"


class Running:
    """A service behind uvicorn in a thread, and a client."""

    def __init__(self, service: Service, server: type[uvicorn.Server] = uvicorn.Server):
        self.service = service
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.address, admin = (listener.getsockname() for listener in listeners)
        app = ByPort(make_app(service), make_admin(service, TOKEN, {"port": 0}), admin[1])
        # A connection that waits for its next request longer than uvicorn's 5 s is closed.
        self.server = server(
            uvicorn.Config(app, port=0, log_level="error", timeout_keep_alive=round(PATIENCE))
        )
        self.thread = threading.Thread(target=self.server.run, args=(listeners,))
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.address[1]}", timeout=PATIENCE)
        self.admin = httpx.Client(
            base_url=f"http://127.0.0.1:{admin[1]}",
            timeout=PATIENCE,
            headers={"authorization": f"Bearer {TOKEN}"},
        )

    def rank(self, body) -> httpx.Response:
        return self.client.post("/rank", json=body)

    def metric(self, name: str) -> float:
        """The value of a metric by its name with labels."""
        found = re.search(
            rf"^{re.escape(name)} (\S+)$", self.client.get("/metrics").text, re.MULTILINE
        )
        return float(found[1]) if found else 0.0

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(PATIENCE)
        self.client.close()
        self.admin.close()
