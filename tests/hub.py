"""A model hub on loopback, as far as huggingface_hub asks: model info, tree, files with ranges; it serves directories.

What a hub may do to its callers is set from outside: gates, cut connections, changed bytes, files on another host.
"""

import functools
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit

LFS_BYTES = 100_000  # larger files are stored by their sha256, the others by git
CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class Asked:
    """One request, and how many bytes of a body it was given."""

    method: str
    path: str
    range: str
    authorization: str
    status: int
    sent_bytes: int


@dataclass
class Hub:
    """The hub; `models` are directories by OWNER/NAME."""

    models: dict[str, Path]
    gated: dict[str, str] = field(default_factory=dict)
    """Models and the token that they need."""
    cut_after: dict[str, int] = field(default_factory=dict)
    """File names, and the bytes after which the connection ends, once."""
    slow_after: dict[str, int] = field(default_factory=dict)
    """File names, and the bytes after which nothing more comes."""
    changed: set[str] = field(default_factory=set)
    """Files whose first byte is another than announced."""
    ranges: bool = True
    elsewhere: bool = False
    """Whether large files are on another host, as at the real hub."""
    asked: list[Asked] = field(default_factory=list)
    _files: dict[Path, dict[str, bytes]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self.reached = threading.Event()
        """Set when a body has come to where nothing more comes."""
        self._ended = threading.Event()
        self._servers = [ThreadingHTTPServer((host, 0), self._handler()) for host in ("127.0.0.1", "127.0.0.2")]
        for server in self._servers:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        self.url, self.other_url = (f"http://{s.server_address[0]}:{s.server_address[1]}" for s in self._servers)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def files(self, model: str) -> dict[str, bytes]:
        """Read once for each directory."""
        root = self.models[model]
        if root not in self._files:
            found = [path for path in sorted(root.rglob("*")) if path.is_file()]
            self._files[root] = {path.relative_to(root).as_posix(): path.read_bytes() for path in found}
        return self._files[root]

    def commit(self, model: str) -> str:
        """Another one whenever the files differ."""
        told = repr([(name, digest(data)) for name, data in self.files(model).items()])
        return hashlib.sha1(told.encode(), usedforsecurity=False).hexdigest()

    def fetched(self) -> dict[str, int]:
        """How many bytes of each file were given out, by all requests together."""
        total: dict[str, int] = {}
        for item in self.asked:
            if item.method == "GET" and "/resolve/" in item.path:
                name = item.path.split("/resolve/")[1].partition("/")[2]
                total[name] = total.get(name, 0) + item.sent_bytes
        return total

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            status, sent_bytes = 0, 0

            def do_GET(self) -> None:
                answer(hub, self)
                hub.note(self)

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def note(self, handler: BaseHTTPRequestHandler) -> None:
        get = handler.headers.get
        asked = (handler.command, handler.path, get("Range", ""), get("Authorization", ""))
        self.asked.append(Asked(*asked, handler.status, handler.sent_bytes))

    def wait(self) -> None:
        """Keeps a connection open and sends nothing, until the hub ends."""
        self.reached.set()
        self._ended.wait(60)


def answer(hub: Hub, handler: BaseHTTPRequestHandler) -> None:
    """Routes one request."""
    handler.sent_bytes = 0
    parts = [unquote(part) for part in urlsplit(handler.path).path.strip("/").split("/")]
    api = parts[:2] == ["api", "models"]
    parts = parts[2:] if api else parts
    model, rest = "/".join(parts[:2]), parts[2:]
    if model not in hub.models:
        return refuse(handler, 401, "", "Invalid username or password.")
    if (token := hub.gated.get(model)) and handler.headers.get("Authorization") != f"Bearer {token}":
        return refuse(handler, 403, "GatedRepo", "Access to this model is restricted.")
    commit = hub.commit(model)
    if rest and rest[1] not in ("main", "v1", commit):
        return refuse(handler, 404, "RevisionNotFound", f"Invalid rev id: {rest[1]}")
    if not api:
        return send_file(hub, handler, model, "/".join(rest[2:]))
    if rest[:1] == ["tree"]:
        return send_json(handler, [tree_row(*item) for item in hub.files(model).items()])
    blobs = "blobs" in parse_qs(urlsplit(handler.path).query)
    rows = [info_row(name, data, blobs) for name, data in hub.files(model).items()]
    return send_json(handler, {"id": model, "modelId": model, "sha": commit, "siblings": rows, "tags": []})


def info_row(name: str, data: bytes, blobs: bool) -> dict:
    row: dict = {"rfilename": name}
    if blobs:
        row |= {"size": len(data), "blobId": git_digest(data)}
        if len(data) >= LFS_BYTES:
            row["lfs"] = {"size": len(data), "sha256": digest(data), "pointerSize": 134}
    return row


def tree_row(name: str, data: bytes) -> dict:
    row: dict = {"type": "file", "path": name, "size": len(data), "oid": git_digest(data)}
    if len(data) >= LFS_BYTES:
        row["lfs"] = {"oid": digest(data), "size": len(data), "pointerSize": 134}
    return row


@functools.lru_cache(maxsize=64)
def digest(data: bytes) -> str:
    """What the hub names a large file by."""
    return hashlib.sha256(data).hexdigest()


@functools.lru_cache(maxsize=64)
def git_digest(data: bytes) -> str:
    """What git names a file by."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def send_file(hub: Hub, handler: BaseHTTPRequestHandler, model: str, name: str) -> None:
    files = hub.files(model)
    if name not in files:
        return refuse(handler, 404, "EntryNotFound", "Entry not found")
    data = files[name]
    large = len(data) >= LFS_BYTES
    etag = f'"{digest(data) if large else git_digest(data)}"'
    headers = {"X-Repo-Commit": hub.commit(model), "ETag": etag, "Accept-Ranges": "bytes"}
    on_hub = handler.server.server_address[0] == urlsplit(hub.url).hostname
    if hub.elsewhere and large and on_hub:
        headers |= {"X-Linked-Etag": etag, "X-Linked-Size": str(len(data))}
        return send(handler, 302, headers | {"Location": hub.other_url + handler.path})
    if name in hub.changed:
        data = bytes([data[0] ^ 1]) + data[1:]
    start = int(handler.headers.get("Range", "bytes=0-")[6:].partition("-")[0]) if hub.ranges else 0
    if start:
        headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
    return send(handler, 206 if start else 200, headers, data[start:], hub, name)


def send_json(handler: BaseHTTPRequestHandler, value: object) -> None:
    send(handler, 200, {"Content-Type": "application/json"}, json.dumps(value).encode())


def refuse(handler: BaseHTTPRequestHandler, status: int, code: str, message: str) -> None:
    headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
    send(handler, status, headers, json.dumps({"error": message}).encode())


def send(
    handler: BaseHTTPRequestHandler,
    status: int,
    headers: dict[str, str],
    body: bytes = b"",
    hub: Hub | None = None,
    name: str = "",
) -> None:
    handler.status = status
    handler.send_response(status)
    for key, value in (headers | {"Content-Length": str(len(body))}).items():
        handler.send_header(key, value)
    handler.end_headers()
    if handler.command == "HEAD":
        return
    cut_bytes = hub.cut_after.pop(name, len(body)) if hub else len(body)
    stuck_bytes = hub.slow_after.get(name, len(body)) if hub else len(body)
    end = min(cut_bytes, stuck_bytes, len(body))
    try:
        while handler.sent_bytes < end:
            chunk = body[handler.sent_bytes : min(handler.sent_bytes + CHUNK_BYTES, end)]
            handler.wfile.write(chunk)
            handler.sent_bytes += len(chunk)
        handler.wfile.flush()
        if hub and end < len(body):
            handler.close_connection = True
            if stuck_bytes == end:
                hub.wait()
    except (BrokenPipeError, ConnectionResetError):
        handler.close_connection = True  # the caller was killed


def nobody() -> str:
    """The address of a hub that is not there."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        return f"http://127.0.0.1:{server.server_address[1]}"
