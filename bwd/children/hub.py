"""The Hub as the download child sees it: manifest of a revision, place of a file, its bytes from an offset.

huggingface_hub does the talking (API, authentication, redirects, proxies, xet). Every failure comes out as
one HubError with a cause; its text never holds a header, and so never the token.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import HfApi, errors, get_hf_file_metadata, hf_hub_url
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import get_session, hf_raise_for_status

from bwd.core.fetching import Cause, parse_retry_after, size_text, wanted
from bwd.core.manifest import Entry, Manifest, is_safe

# Seconds. A connection that brings nothing for READ_TIMEOUT is given up and taken up again where it stopped.
CONNECT_TIMEOUT, READ_TIMEOUT = 15.0, 60.0
# Bytes of one piece at most, and how long a slow line may take to fill it: what is lost when the process is
# killed. The HTTP library hands out 64 kB at a time, which costs more than hashing them.
PIECE, PIECE_SECONDS = 1 << 20, 0.05


# What comes out of the libraries; anything else is a defect of ours and must show as one.
_LIBRARY = (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError, ValueError, RuntimeError)


class HubError(Exception):
    """`cause` decides what happens next; `retry_after` is what the Hub asked for, in seconds."""

    def __init__(self, cause: Cause, message: str, hint: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.cause = cause
        self.hint = hint
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class Location:
    """Where a file's bytes are: `url`, and the xet data of the library when the file is stored there."""

    url: str
    xet: Any = None


@dataclass(frozen=True, slots=True)
class Body:
    """An open answer: its first byte's offset in the file, the file's size as the server sees it (None: it
    does not say), and the pieces. A piece holds until the next one is asked for."""

    start: int
    size: int | None
    pieces: Iterator[bytes | memoryview]


class Hub:
    """One repository on one endpoint, with or without a token."""

    def __init__(self, repo: str, endpoint: str, token: str | None, *, read_timeout: float) -> None:
        self.repo = repo
        self.endpoint = endpoint.rstrip("/")
        self._token: str | bool = token or False
        self._timeout = httpx2.Timeout(CONNECT_TIMEOUT, read=read_timeout)
        self._api = HfApi(endpoint=self.endpoint, token=self._token)

    def manifest(self, revision: str | None) -> Manifest:
        """The files of `revision` (a commit, branch or tag; None: the default branch) that a server needs, at
        the commit that it stands for now."""
        with self._judged(f"{self.repo}@{revision}" if revision else self.repo):
            info = self._api.model_info(
                self.repo, revision=revision, files_metadata=True, timeout=self._timeout.read
            )
        siblings = {item.rfilename: item for item in info.siblings or ()}
        files = []
        for path in wanted(siblings):
            item = siblings[path]
            if not is_safe(path):
                raise HubError(Cause.UNSAFE, f"{self.repo} names a file outside its folder: {path!r}")
            if item.size is None:
                raise HubError(Cause.SERVER, f"the Hub gives no size for {path}")
            lfs = item.lfs
            files.append(
                Entry(path, item.size, lfs.sha256 if lfs else None, item.blob_id if lfs is None else None)
            )
        if not info.sha or not any(e.path == "config.json" for e in files):
            raise HubError(
                Cause.NOT_FOUND,
                f"{self.repo} has no config.json: it is not a model that vLLM can load",
                "set MODEL to a repository of safetensors weights",
            )
        return Manifest(self.repo, info.sha, "hub", tuple(files), {"endpoint": self.endpoint})

    def locate(self, revision: str, path: str) -> Location:
        with self._judged(path):
            url = hf_hub_url(self.repo, path, revision=revision, endpoint=self.endpoint)
            found = get_hf_file_metadata(
                url, token=self._token, timeout=self._timeout.read, endpoint=self.endpoint
            )
        return Location(found.location, found.xet_file_data)

    @contextlib.contextmanager
    def body(self, location: Location, path: str, offset: int) -> Iterator[Body]:
        """The file's bytes from `offset` on (or from an earlier one, when the server knows no ranges)."""
        # The token goes to the endpoint's own host, never to where it redirects to.
        token = self._token if origin(location.url) == origin(self.endpoint) else False
        headers = {**build_hf_headers(token=token), "Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        with (
            self._judged(path),
            get_session().stream("GET", location.url, headers=headers, timeout=self._timeout) as answer,
        ):
            if answer.status_code == 416:
                yield Body(0, None, iter(()))
                return
            hf_raise_for_status(answer)
            if answer.headers.get("content-type", "").startswith("text/html") and not path.endswith(".html"):
                raise HubError(
                    Cause.WEB_PAGE,
                    f"{urlsplit(location.url).hostname} sent a web page instead of {path}",
                    "a proxy or a login page of the network answers in the Hub's place: open a browser there",
                )
            encoded = answer.headers.get("content-encoding", "identity") != "identity"
            start, size = _range(answer, offset)
            if encoded:
                yield Body(start, None, answer.iter_bytes())
            else:
                yield Body(start, size, _pieces(answer))

    @contextlib.contextmanager
    def xet_body(self, location: Location, entry: Entry, offset: int) -> Iterator[Body]:
        """The same over xet: an ordered stream, so that what is on disk is always a true beginning."""
        from hf_xet import XetFileInfo  # type: ignore[import-untyped]
        from huggingface_hub.utils._xet import (
            get_xet_session,
            refresh_xet_connection_info,
            xet_headers_without_auth,
        )

        headers = build_hf_headers(token=self._token)
        if origin(location.xet.refresh_route) != origin(self.endpoint):
            raise HubError(Cause.REFUSED, "the xet token would have to come from another host than the Hub")
        with self._judged(entry.path):
            info = refresh_xet_connection_info(file_data=location.xet, headers=headers)
            session: Any = get_xet_session()  # type: ignore[no-untyped-call]
            group = session.new_download_stream_group(
                endpoint=info.endpoint,
                token=info.access_token,
                token_expiry_unix_secs=info.expiration_unix_epoch,
                token_refresh_url=location.xet.refresh_route,
                token_refresh_headers=headers,
                custom_headers=xet_headers_without_auth(headers),
            )
            stream = group.download_stream(XetFileInfo(location.xet.file_hash, entry.size), offset or None)
            try:
                yield Body(offset, entry.size, stream)
            finally:
                stream.cancel()

    @contextlib.contextmanager
    def _judged(self, what: str) -> Iterator[None]:
        try:
            yield
        except HubError:
            raise
        except _LIBRARY as error:
            raise self._judge(error, what) from None

    def _judge(self, error: Exception, what: str) -> HubError:
        """Any failure of the library as a cause. The order is from the narrow to the wide."""
        response = getattr(error, "response", None)
        if isinstance(error, errors.OfflineModeIsEnabled):
            return HubError(Cause.OFFLINE, f"{what} is not here, and HF_HUB_OFFLINE forbids to fetch it")
        if isinstance(error, errors.HFValidationError):
            return HubError(
                Cause.NOT_FOUND, f"{self.repo!r} is no repository id", "give MODEL as ORGANISATION/NAME"
            )
        if isinstance(error, httpx2.TooManyRedirects):
            return HubError(
                Cause.REDIRECTS, f"the way to {what} is a circle of redirects", "check HF_ENDPOINT and proxy"
            )
        if response is not None:
            return self._status(response.status_code, response.headers, what)
        if _untrusted(error):
            return HubError(
                Cause.REFUSED,
                f"the certificate that came with {what} is not one to trust",
                "a proxy that looks into TLS has a CA of its own: name its file in SSL_CERT_FILE",
            )
        if isinstance(error, (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError)):
            if isinstance(error, (httpx2.InvalidURL, httpx2.UnsupportedProtocol)):
                return HubError(Cause.REFUSED, f"{self.endpoint} is no address", "check HF_ENDPOINT")
            return HubError(Cause.NETWORK, f"{_words(error)} while fetching {what} from {self.endpoint}")
        if isinstance(error, OSError):
            if error.errno in FULL:
                return full(what)
            if isinstance(error, ConnectionError) or error.errno is None:
                return HubError(Cause.NETWORK, f"{_words(error)} while fetching {what}")
            return HubError(Cause.DISK, f"cannot write {what}: {error.strerror}")
        if isinstance(error, ValueError):
            # the API answered 200 with something that is not its JSON
            return HubError(
                Cause.WEB_PAGE,
                f"{urlsplit(self.endpoint).hostname} did not answer as the Hub does",
                "check HF_ENDPOINT; a proxy or a login page of the network may answer in its place",
            )
        return HubError(Cause.SERVER, f"{_words(error)} while fetching {what}")

    def _status(self, status: int, headers: Any, what: str) -> HubError:
        code = headers.get("x-error-code", "")
        page = f"{self.endpoint}/{self.repo}"
        if code == "GatedRepo":
            return HubError(
                Cause.GATED,
                f"{self.repo} is gated ({status})",
                f"accept its terms at {page} and "
                + ("check that HF_TOKEN may read it" if self._token else "set HF_TOKEN in .env"),
            )
        if status == 401:
            if self._token:
                return HubError(
                    Cause.TOKEN,
                    f"the Hub refused the token (401), or {self.repo} is private or does not exist",
                    "set HF_TOKEN to a token that may read it, or remove it for a public model",
                )
            return HubError(
                Cause.TOKEN,
                f"{self.repo} does not exist, or is private and needs a token (401)",
                "check MODEL; for a private or gated model set HF_TOKEN in .env",
            )
        if status == 403:
            return HubError(
                Cause.FORBIDDEN, f"the Hub forbids {what} (403)", f"open {page} with the account of HF_TOKEN"
            )
        if status == 404:
            if code == "RevisionNotFound":
                return HubError(
                    Cause.NOT_FOUND, f"{what}: no such revision (404)", "correct or remove MODEL_REVISION"
                )
            return HubError(Cause.NOT_FOUND, f"{what} is not at {self.endpoint} (404)", "check MODEL")
        if status == 429:
            wait = parse_retry_after(headers.get("retry-after"))
            if wait is None:
                wait = _ratelimit(headers.get("ratelimit", ""))
            return HubError(
                Cause.RATE_LIMITED,
                "the Hub asks for fewer requests (429)",
                "" if self._token else "a token in HF_TOKEN raises the limit",
                wait,
            )
        if status >= 500 or status == 408:
            return HubError(
                Cause.SERVER,
                f"the Hub has trouble ({status}) with {what}",
                retry_after=parse_retry_after(headers.get("retry-after")),
            )
        return HubError(Cause.REFUSED, f"the Hub refused {what} ({status})")


def origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    return parts.scheme, (parts.hostname or "").lower(), port


def _range(answer: httpx2.Response, offset: int) -> tuple[int, int | None]:
    """(first byte, size of the file) of an answer to a request from `offset` on."""
    if answer.status_code == 206:
        span, _, size = answer.headers.get("content-range", "").removeprefix("bytes ").partition("/")
        first = span.partition("-")[0]
        return int(first) if first.isdigit() else offset, int(size) if size.isdigit() else None
    length = answer.headers.get("content-length", "")
    return 0, int(length) if length.isdigit() else None


def _pieces(answer: httpx2.Response) -> Iterator[bytes | memoryview]:
    """The body in large pieces: what the library has read already comes from it, the rest straight from its
    connection into one buffer. Where that cannot be (a body without a length, TLS inside TLS), all of it
    comes from the library."""
    through = answer.iter_raw()
    length, line = answer.headers.get("content-length", ""), _connection(answer)
    if line is None or not length.isdigit() or "transfer-encoding" in answer.headers:
        yield from through
        return
    left = int(length)
    # The library's first piece is all that came with the headers, or else one read: after it nothing is left
    # in its buffer. `through` must live as long as this reads: its end closes the connection.
    first = next(through, b"")
    left -= len(first)
    yield first
    if left <= 0:
        yield from through
        return
    line.settimeout(answer.request.extensions["timeout"]["read"])
    buffer = memoryview(bytearray(PIECE))
    while left > 0:
        filled, error = _fill(line, buffer[: min(PIECE, left)])
        left -= filled
        if filled:
            yield buffer[:filled]
        if error is not None:
            raise error
        if not filled:
            return


def _connection(answer: httpx2.Response) -> socket.socket | None:
    """The socket that the body comes from in the clear; None where the library itself must decrypt."""
    stream = answer.extensions.get("network_stream")
    if stream is None or answer.extensions.get("http_version") not in (b"HTTP/1.1", b"HTTP/1.0"):
        return None
    found = stream.get_extra_info("socket")
    if isinstance(stream.get_extra_info("ssl_object"), ssl.SSLObject):
        return None
    return found if isinstance(found, socket.socket) else None


def _fill(line: socket.socket, room: memoryview) -> tuple[int, httpx2.HTTPError | None]:
    """Receive until `room` is full, PIECE_SECONDS are over, or the line ends: bytes, and what went wrong
    after them."""
    filled, end = 0, 0.0
    while filled < len(room):
        try:
            got = line.recv_into(room[filled:])
        except TimeoutError:
            return filled, httpx2.ReadTimeout("")
        except OSError:
            return filled, httpx2.ReadError("")
        filled += got
        now = time.monotonic()
        end = end or now + PIECE_SECONDS
        if got == 0 or now >= end:
            break
    return filled, None


def _ratelimit(value: str) -> float | None:
    """Seconds until the window of the Hub's RateLimit header starts anew: `"api";r=0;t=55`."""
    fields = dict(part.strip().partition("=")[::2] for part in value.split(";"))
    return float(fields["t"]) if fields.get("r") == "0" and fields.get("t", "").isdigit() else None


def _untrusted(error: BaseException | None) -> bool:
    """Whether a refused certificate is behind a failure of the library."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _words(error: Exception) -> str:
    """A failure in words of ours: the library's text may quote headers."""
    known = {
        "ConnectError": "no connection",
        "ConnectTimeout": "no connection in time",
        "ReadTimeout": "nothing came any more",
        "ReadError": "the connection broke",
        "RemoteProtocolError": "the connection ended early",
        "ProxyError": "the proxy refused",
    }
    return known.get(type(error).__name__, type(error).__name__)


FULL = (errno.ENOSPC, errno.EDQUOT)
"""What a full disk says, or a full quota."""


def full(where: str) -> HubError:
    return HubError(
        Cause.NO_SPACE,
        f"the disk of {where} is full",
        "free space (`bwd weights prune`) or set BWD_STATE_DIR to another disk; it goes on from there",
    )


def no_space(needed: int, free: int, where: str) -> HubError:
    return HubError(
        Cause.NO_SPACE,
        f"the weights need {size_text(needed)} more and {where} has {size_text(free)} free",
        f"free {size_text(needed - free)} (`bwd weights prune`), or set BWD_STATE_DIR to another disk",
    )
