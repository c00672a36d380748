"""An S3 server that is empty, answers everything at once, and takes what is written to it only when told to."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

LISTING = (
    '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>bucket</Name>'
    "<KeyCount>0</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated></ListBucketResult>"
)


class SlowStore:
    """From `with` to its end; `written` are the paths of what was taken."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.take = threading.Event()
        self.written: list[str] = []
        store = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200 if "list-type" in self.path else 404, LISTING.encode())

            def do_HEAD(self) -> None:
                self._answer(404)

            def do_PUT(self) -> None:
                store.asked.set()
                store.take.wait()
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                store.written.append(self.path)
                self._answer(200)

            def _answer(self, status: int, body: bytes = b"") -> None:
                self.send_response(status)
                self.send_header("ETag", '"0"')
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that was stopped

    @property
    def environment(self) -> dict[str, str | None]:
        """What points a client here."""
        return {
            "WARMSTART_CACHE_URL": "s3://bucket/cache",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_address[1]}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_REGION": "us-east-1",
        }

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.take.set()
        self._server.shutdown()
        self._server.server_close()
