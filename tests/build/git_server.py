"""A git server on loopback that cuts connections: real `git http-backend` behind a small HTTP server."""

from __future__ import annotations

import http.server
import os
import subprocess
import threading
from pathlib import Path


class GitServer:
    """Serves the bare repositories below `root`; `cuts`: after how many bytes the next transfers end."""

    def __init__(self, root: Path) -> None:
        self.cuts: list[int] = []
        self.codes: list[int] = []
        self.transfers = 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                self.answer(b"")

            def do_POST(self) -> None:
                if "chunked" in self.headers.get("Transfer-Encoding", ""):
                    body = b""
                    while size := int(self.rfile.readline().strip() or b"0", 16):
                        body += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                else:
                    body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.answer(body)

            def answer(self, body: bytes) -> None:
                if outer.codes:
                    self.send_response(outer.codes.pop(0))
                    self.end_headers()
                    return
                path, _, query = self.path.partition("?")
                env = {
                    **os.environ,
                    "GIT_PROJECT_ROOT": str(root),
                    "GIT_HTTP_EXPORT_ALL": "1",
                    "REQUEST_METHOD": self.command,
                    "PATH_INFO": path,
                    "QUERY_STRING": query,
                    "CONTENT_TYPE": self.headers.get("Content-Type", ""),
                    "CONTENT_LENGTH": str(len(body)),
                    "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
                    "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
                }
                got = subprocess.run(
                    ["git", "http-backend"], input=body, env=env, capture_output=True, check=True
                )
                head, _, content = got.stdout.partition(b"\r\n\r\n")
                self.send_response(200)
                for line in head.decode().splitlines():
                    name, _, value = line.partition(": ")
                    if name != "Status":
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if path.endswith("git-upload-pack") and b"PACK" in content[:4096]:
                    outer.transfers += 1
                    if outer.cuts:
                        content = content[: outer.cuts.pop(0)]
                self.wfile.write(content)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
