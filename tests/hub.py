"""A local stand-in for the Hugging Face Hub: as much of its HTTP interface as creating a repository and commits need.

All files are asked for as regular ones, in the commit itself, because large ones go through the Hub's own storage service.
"""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_thisisasecretthatmustnotbeshown"


@dataclass
class Hub:
    """What was pushed: files by ``repo@revision``, and the status that every request gets instead, if one is set.

    A busy repository takes no commit.
    """

    endpoint: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    created: list[dict[str, Any]] = field(default_factory=list)
    fail: int | None = None
    busy: bool = False


@contextmanager
def serve() -> Iterator[Hub]:
    """A running stand-in on a free port of this machine."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def answer(self, status: int, document: Any = None) -> None:
            payload = json.dumps({} if document is None else document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            hub.requests.append(f"{self.command} {path}")
            if hub.fail is not None:
                self.answer(hub.fail, {"error": f"refused for {self.headers.get('Authorization')}"})
            elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.answer(401, {"error": "Invalid credentials"})
            else:
                self.route(path, body)

        do_GET = do_POST = do_PUT = handle_any

        def route(self, path: str, body: bytes) -> None:
            if path == "/api/repos/create":
                hub.created.append(json.loads(body))
                name = "/".join(filter(None, (hub.created[-1].get("organization"), hub.created[-1]["name"])))
                self.answer(200, {"url": f"{hub.endpoint}/{name}", "id": name})
            elif path == "/api/validate-yaml":
                self.answer(200, {"errors": [], "warnings": []})
            elif "/tree/" in path:
                files = hub.files.get(path.removeprefix("/api/models/").replace("/tree/", "@"), {})
                self.answer(200, [
                    {"type": "file", "path": name, "oid": "0" * 40, "size": len(content)} for name, content in files.items()
                ])  # fmt: skip
            elif "/branch/" in path:
                self.answer(200)
            elif "/preupload/" in path:
                kinds = [
                    {"path": file["path"], "shouldIgnore": False, "uploadMode": "regular"}
                    for file in json.loads(body)["files"]
                ]
                self.answer(200, {"files": kinds})
            elif "/commit/" in path:
                self.commit(path, body)
            else:
                self.answer(200, {"id": "me/model", "sha": "0" * 40, "siblings": [], "private": False})

        def commit(self, path: str, body: bytes) -> None:
            if hub.busy:
                self.answer(409, {"error": "A commit has happened since."})
                return
            repo, _, revision = path.removeprefix("/api/models/").partition("/commit/")
            files = hub.files.setdefault(f"{repo}@{revision}", {})
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "header":
                    hub.messages.append(value["summary"])
                elif entry["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "deletedFile":
                    del files[value["path"]]
            self.answer(200, {"commitUrl": f"{hub.endpoint}/{repo}/commit/1", "commitOid": "1" * 40})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
