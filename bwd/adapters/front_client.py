"""Talks to front over its control socket: puts the gate, reads what is in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from bwd.core import gate as gates
from bwd.core.gate import Gate


@dataclass(frozen=True, slots=True)
class Stats:
    """What front reports: requests in flight, streams among them, requests held, and since it started
    those served, refused and broken. `gate` is the one that it was
    given last, None before the first. `listening` is "host:port", "" while the port is not its own, and
    `why` says why not."""

    in_flight: int = 0
    streams: int = 0
    held: int = 0
    served_total: int = 0
    refused_total: int = 0
    held_total: int = 0
    broken_total: int = 0
    gate: Gate | None = None
    listening: str = ""
    longest_in_flight_s: float = 0.0
    why: str = ""


class FrontClient:
    def __init__(self, socket: Path, timeout: float = 2.0) -> None:
        self._socket = socket
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None
        self.absent = False
        """Nobody listened on the socket when it was last asked: there is no front."""

    async def put(self, gate: Mapping[str, object]) -> tuple[Stats | None, str]:
        """Put the gate: what front does now, and "" when it took the gate, else why not."""
        data, why = await self._ask("PUT", "/gate", gate)
        return (None if why else _stats(data)), why

    async def stats(self) -> Stats | None:
        """What front does now; None when it cannot be asked."""
        data, why = await self._ask("GET", "/stats", None)
        return None if why else _stats(data)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask(self, method: str, path: str, body: Mapping[str, object] | None) -> tuple[Any, str]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(path=str(self._socket)), trust_env=False
            )
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._session.request(method, f"http://front{path}", json=body) as response,
            ):
                self.absent = False
                if response.status >= 300:
                    text = (await response.text())[:200].replace("\n", " ")
                    return None, f"front answers {response.status} {text}"
                if response.content_type == "application/json":
                    return await response.json(), ""
                return None, ""
        except TimeoutError:
            self.absent = False
            return None, f"front does not answer in {self._timeout:.0f} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self.absent = isinstance(error, aiohttp.ClientConnectorError)
            return None, f"front is not there ({type(error).__name__})"


def _stats(data: Any) -> Stats | None:
    if not isinstance(data, dict):
        return None
    try:
        return Stats(
            in_flight=int(data.get("in_flight", 0)),
            streams=int(data.get("streams", 0)),
            held=int(data.get("held", 0)),
            served_total=int(data.get("served_total", 0)),
            refused_total=int(data.get("refused_total", 0)),
            held_total=int(data.get("held_total", 0)),
            broken_total=int(data.get("broken_total", 0)),
            gate=None if data.get("gate_age_s") is None else gates.parse(data.get("gate")),
            listening=str(data.get("listening") or ""),
            longest_in_flight_s=float(data.get("longest_in_flight_s") or 0.0),
            why=str(data.get("listen_error") or ""),
        )
    except (TypeError, ValueError):
        return None
