"""A server on a loopback address that keeps what a prediction reports to it."""

import http.server
import json
import queue
import threading
from typing import Any, Self


class Webhook:
    """An address that keeps what is posted to it."""

    def __init__(self) -> None:
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        events = self.events

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                events.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def until_done(self) -> list[dict[str, Any]]:
        """Return the events up to the one that ends a prediction."""
        events = [self.events.get(timeout=300)]
        while events[-1]["status"] not in ("succeeded", "failed", "canceled"):
            events.append(self.events.get(timeout=300))
        return events
