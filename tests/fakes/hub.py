"""A Hub that plays a script: the API, resolve, LFS redirects to a second host (the "CDN"), range requests.

    hub.py MODEL_FOLDER REPO LOG [CERTIFICATE]

Prints one JSON line with the two ports, then serves until its standard input ends. With CERTIFICATE (a PEM
file with its key) it speaks TLS. Either port is also a proxy for plain HTTP, to both and to the name
hub.invalid. Faults are set with `POST /_faults` (a JSON list) and taken from the front; each is {"at": "api",
"head", "get", "cdn" or "xet", "do": ..., "path": part of a file's name, "times": how often (0: always), ...}.
Each answer is a JSON line in LOG with the bytes that were sent, and whether a token came with the request.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import ssl
import struct
import sys
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LFS = (".safetensors", ".bin")
CHUNK = 64 << 10


class Script:
    """The repository, the faults still to come, and the log."""

    def __init__(self, folder: Path, repo: str, log: Path) -> None:
        self.folder, self.repo, self.log = folder, repo, log
        self.lock = threading.Lock()
        self.faults: list[dict[str, Any]] = []
        self.number = 0  # of the list of faults: an answer that ends late is still of the list it began under
        self.cdn_port = self.api_port = 0
        self.token: str | None = None
        self.xet = False
        self.scheme = "http"
        self.commit = hashlib.sha1(repo.encode()).hexdigest()
        self.hashes: dict[str, tuple[str, str]] = {}
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            sha256, sha1 = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % path.stat().st_size)
            with path.open("rb") as stream:
                while block := stream.read(1 << 22):
                    sha256.update(block)
                    if not path.name.endswith(LFS):
                        sha1.update(block)
            self.hashes[str(path.relative_to(folder))] = (sha256.hexdigest(), sha1.hexdigest())

    def fault(self, at: str, path: str) -> dict[str, Any] | None:
        with self.lock:
            for fault in self.faults:
                if fault["at"] == at and fault.get("path", "") in path:
                    if fault.get("skip", 0) > 0:
                        fault["skip"] -= 1
                        continue
                    if fault.get("times", 1) > 0:
                        fault["times"] = fault.get("times", 1) - 1
                        if fault["times"] == 0:
                            self.faults.remove(fault)
                    return fault
        return None

    def note(self, **fields: Any) -> None:
        with self.lock, self.log.open("a") as stream:
            stream.write(json.dumps(fields) + "\n")


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: Script
    host = "api"

    def log_message(self, *_: Any) -> None:
        return

    def _token(self) -> str | None:
        return (self.headers.get("authorization") or "").removeprefix("Bearer ") or None

    def _reply(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.script.note(
            host=self.host, method=self.command, path=self.path, status=status, token=self._token(), sent=0
        )
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _play(self, fault: dict[str, Any] | None) -> bool:
        """The faults that are a whole answer; True when one was given."""
        if fault is None:
            return False
        match fault["do"]:
            case "status":
                self._reply(fault["status"], fault.get("headers", {}), fault.get("body", "").encode())
            case "html":
                self._reply(200, {"Content-Type": "text/html"}, b"<!DOCTYPE html><html>log in</html>")
            case "loop":
                self._reply(302, {"Location": self.path})
            case "hang":
                self.script.note(host=self.host, method=self.command, path=self.path, status=0, sent=0)
                time.sleep(fault.get("seconds", 60))
                self.close_connection = True
            case "refuse":
                self._reset()
            case _:
                return False
        return True

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        data = json.loads(self.rfile.read(length))
        with self.script.lock:
            self.script.faults = data.get("faults", [])
            self.script.number += 1
            self.script.token = data.get("token")
            self.script.xet = data.get("xet", False)
            self.script.commit = data.get("commit", self.script.commit)
        self._reply(200, {})

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._serve()

    def _as_proxy(self) -> None:
        """An absolute address is a request to a proxy: answered as the host that it names."""
        if self.path.startswith("http://"):
            where = urllib.parse.urlsplit(self.path)
            self.host = "cdn" if where.port == self.script.cdn_port else "api"
            self.path = where.path + (f"?{where.query}" if where.query else "")

    def _serve(self) -> None:
        self._as_proxy()
        path = self.path.partition("?")[0]
        script = self.script
        if self.host == "cdn":
            self._file(path.removeprefix("/cdn/"), "cdn")
        elif path.startswith(f"/api/models/{script.repo}/xet-read-token"):
            if not self._play(script.fault("xet", path)):
                self._reply(
                    200,
                    {
                        "X-Xet-Cas-Url": f"http://127.0.0.1:{script.cdn_port}/cas",
                        "X-Xet-Access-Token": "xet",
                        "X-Xet-Token-Expiration": str(int(time.time()) + 3600),
                    },
                )
        elif path.startswith(f"/api/models/{script.repo}/tree/"):
            self._tree()
        elif path.startswith(f"/api/models/{script.repo}"):
            if not self._play(script.fault("api", path)):
                self._info(path)
        elif found := re.fullmatch(f"/{script.repo}/resolve/([^/]+)/(.+)", path):
            self._resolve(found[2])
        else:
            self._reply(401 if self._token() is None else 404, {"X-Error-Code": "RepoNotFound"})

    def _refused(self) -> bool:
        if self.script.token is not None and self._token() != self.script.token:
            self._reply(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
            return True
        return False

    def _info(self, path: str) -> None:
        if self._refused():
            return
        script = self.script
        revision = path.partition("/revision/")[2]
        if revision not in ("", "main", script.commit):
            self._reply(404, {"X-Error-Code": "RevisionNotFound"})
            return
        wrong = script.fault("size", path)
        siblings = []
        for name, (sha256, sha1) in script.hashes.items():
            size = (script.folder / name).stat().st_size
            if wrong and wrong["path_of"] in name:
                size += wrong["add"]
            item: dict[str, Any] = {"rfilename": name, "size": size, "blobId": sha1}
            if name.endswith(LFS):
                item["lfs"] = {"sha256": sha256, "size": size, "pointerSize": 130}
            siblings.append(item)
        extra = script.fault("files", path)
        siblings += extra["add"] if extra else []
        body = {
            "_id": "1", "id": script.repo, "modelId": script.repo, "sha": script.commit, "private": False,
            "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": [], "siblings": siblings,
        }  # fmt: skip
        self._reply(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def _tree(self) -> None:
        """The same list as `hf download` asks for it."""
        rows = []
        for name, (sha256, sha1) in self.script.hashes.items():
            size = (self.script.folder / name).stat().st_size
            row: dict[str, Any] = {"type": "file", "oid": sha1, "size": size, "path": name}
            if name.endswith(LFS):
                row["lfs"] = {"oid": sha256, "size": size, "pointerSize": 130}
            rows.append(row)
        self._reply(200, {"Content-Type": "application/json"}, json.dumps(rows).encode())

    def _resolve(self, name: str) -> None:
        if self._refused() or self._play(self.script.fault(self.command.lower(), name)):
            return
        script = self.script
        if name not in script.hashes:
            self._reply(404, {"X-Error-Code": "EntryNotFound"})
            return
        sha256, sha1 = script.hashes[name]
        headers = {"X-Repo-Commit": script.commit, "ETag": f'"{sha1}"'}
        size = (script.folder / name).stat().st_size
        if name.endswith(LFS):
            headers |= {
                "X-Linked-Size": str(size),
                "X-Linked-ETag": f'"{sha256}"',
                "Location": f"{script.scheme}://127.0.0.1:{script.cdn_port}/cdn/{name}?X-Signature=1",
            }
            if script.xet:
                headers |= {
                    "X-Xet-Hash": sha256,
                    "X-Xet-Refresh-Route": f"http://127.0.0.1:{script.api_port}/api/models/{script.repo}"
                    f"/xet-read-token/{script.commit}",
                }
            self._reply(302, headers)
        elif self.command == "HEAD":
            self._reply(200, {**headers, "Content-Length": str(size)})
        else:
            self._file(name, "get")

    def _file(self, name: str, at: str) -> None:
        script = self.script
        if name.startswith("cas"):
            if not self._play(script.fault("cas", name)):
                self._reply(500, {})
            return
        fault = script.fault(at, name)
        if self._play(fault):
            return
        do: str = fault["do"] if fault else ""
        number = script.number
        path = script.folder / name
        size = path.stat().st_size
        first = 0
        if (wanted := self.headers.get("range")) and do != "no-ranges":
            first = int(wanted.removeprefix("bytes=").partition("-")[0])
            if first >= size:
                self._reply(416, {"Content-Range": f"bytes */{size}"})
                return
        shown = size + (fault.get("add", 0) if fault and do == "wrong-size" else 0)
        self.send_response(206 if wanted and do != "no-ranges" else 200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(shown - first))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{shown - 1}/{shown}")
        self.end_headers()
        sent = 0
        try:
            sent = self._send(path, first, size, fault)
        finally:
            script.note(
                script=number, host=self.host, method="GET", path=name, status=206 if first else 200,
                first=first, sent=sent or getattr(self, "sent", 0), token=self._token(), at=time.monotonic(),
            )  # fmt: skip

    def _send(self, path: Path, first: int, size: int, fault: dict[str, Any] | None) -> int:
        do = fault["do"] if fault else ""
        limit = size
        if fault and do in ("cut", "reset", "stall"):
            limit = min(size, (first if fault.get("each") else 0) + fault["after"])
            limit = max(limit, first)
        self.sent = 0
        with path.open("rb") as stream:
            if fault is None and not isinstance(self.connection, ssl.SSLSocket):
                self.wfile.flush()
                offset = first
                while offset < size:
                    done = os.sendfile(
                        self.connection.fileno(), stream.fileno(), offset, min(1 << 20, size - offset)
                    )
                    if done == 0:
                        break
                    offset += done
                    self.sent = offset - first
                return self.sent
            stream.seek(first)
            while first + self.sent < limit:
                step = fault["bytes"] if fault and do == "drip" else CHUNK
                block = bytearray(stream.read(min(step, limit - first - self.sent)))
                place = (fault.get("offset", -1) if fault else -1) - first - self.sent
                if do == "flip" and 0 <= place < len(block):
                    block[place] ^= 1
                self.connection.sendall(block)
                self.sent += len(block)
                if fault and do == "drip":
                    time.sleep(fault["seconds"])
        if fault and do == "stall":
            time.sleep(fault.get("seconds", 60))
        if do == "reset":
            self._reset()
        if do in ("cut", "stall", "wrong-size"):
            self.close_connection = True
        return self.sent


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_: Any) -> None:
        return


def main() -> None:
    script = Script(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
    servers = []
    for host in ("api", "cdn"):
        handler = type(host, (Answer,), {"script": script, "host": host})
        servers.append(Server(("127.0.0.1", 0), handler))
        if len(sys.argv) > 4:
            script.scheme = "https"
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(sys.argv[4])
            servers[-1].socket = context.wrap_socket(servers[-1].socket, server_side=True)
    script.api_port, script.cdn_port = (server.server_address[1] for server in servers)
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps({"api": script.api_port, "cdn": script.cdn_port, "commit": script.commit}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
