"""pip's configuration, as far as it decides where packages come from, and the same for uv.

uv reads nothing of pip's, and the Python at hand may have no pip to ask, so the files are read here: pip's
own documented places, in its own order (system, user, PIP_CONFIG_FILE, environment; the later wins).
"""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pixi_manifest import Wheel

# Settings of pip that would change what is installed or where. The lock decides that.
SCRUBBED = (
    "PIP_CONSTRAINT",
    "PIP_DRY_RUN",
    "PIP_NO_BINARY",
    "PIP_NO_DEPS",
    "PIP_PREFIX",
    "PIP_REQUIREMENT",
    "PIP_ROOT",
    "PIP_TARGET",
    "PIP_USER",
    "UV_BUILD_CONSTRAINT",
    "UV_CONSTRAINT",
    "UV_OVERRIDE",
    "UV_PYTHON",
    "UV_REQUIRE_HASHES",
    "UV_SYSTEM_PYTHON",
    "UV_TARGET",
    "PYTHONHOME",
    "PYTHONPATH",
    "VIRTUAL_ENV",
)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where packages come from. Empty strings and tuples mean: not configured."""

    index: str = ""
    extra_indexes: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    no_index: bool = False
    cert: str = ""
    proxy: str = ""
    trusted_hosts: tuple[str, ...] = ()
    timeout: str = ""


def config_files(environ: Mapping[str, str]) -> list[Path]:
    """pip's configuration files on Linux, weakest first."""
    chosen = environ.get("PIP_CONFIG_FILE", "")
    if chosen == os.devnull:
        return []
    home = Path(environ.get("HOME") or Path.home())
    system = [Path(d) / "pip/pip.conf" for d in environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":") if d]
    user = [home / ".pip/pip.conf", Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip/pip.conf"]
    return [*system, Path("/etc/pip.conf"), *user, *([Path(chosen)] if chosen else [])]


def read_sources(environ: Mapping[str, str]) -> Sources:
    """What pip would use for `pip install` in this environment. A file that cannot be read counts as
    empty."""
    values: dict[str, str] = {}
    for section in ("global", "install"):
        for path in config_files(environ):
            parser = configparser.RawConfigParser()
            try:
                parser.read(path, encoding="utf-8")
            except (OSError, configparser.Error, UnicodeDecodeError):
                continue
            if parser.has_section(section):
                items = parser.items(section)
                values |= {key.lower().replace("_", "-"): value for key, value in items if value}
    for key, value in environ.items():
        if key.startswith("PIP_") and value:
            values[key[4:].lower().replace("_", "-")] = value
    return Sources(
        index=values.get("index-url", ""),
        extra_indexes=tuple(values.get("extra-index-url", "").split()),
        find_links=tuple(values.get("find-links", "").split()),
        no_index=values.get("no-index", "").lower() in ("1", "true", "yes", "on"),
        cert=values.get("cert", ""),
        proxy=values.get("proxy", ""),
        trusted_hosts=tuple(values.get("trusted-host", "").split()),
        timeout=values.get("default-timeout", values.get("timeout", "")),
    )


def child_environ(environ: Mapping[str, str], sources: Sources) -> dict[str, str]:
    """The environment of pip or uv: pip's certificate, proxy and timeout for both, no setting that turns the
    lock's packages into others. An empty PIP_CONSTRAINT would leave a constraint of a pip.conf in force; an
    empty file does not."""
    out = {key: value for key, value in environ.items() if key not in SCRUBBED}
    out |= {"PIP_CONSTRAINT": os.devnull, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if sources.cert:
        out.setdefault("SSL_CERT_FILE", sources.cert)
    if sources.proxy:
        for name in ("HTTP_PROXY", "HTTPS_PROXY"):
            if name not in out and name.lower() not in out:
                out[name] = sources.proxy
    if sources.timeout:
        out.setdefault("UV_HTTP_TIMEOUT", sources.timeout)
    return out


def uv_routes(environ: Mapping[str, str], sources: Sources, index: str | None) -> list[list[str]]:
    """Arguments for uv, one list for each way to try, in order.

    Other builds of a locked version can lie on an extra index, and uv would take one of those and then refuse
    its hash; so the extra indexes come into play only when the main one has failed. A package of another
    index (`index`) is looked for in the find-links first: that index may be out of reach where a mirror of it
    is not.
    """
    links = [word for link in sources.find_links for word in ("--find-links", link)]
    links += [word for host in sources.trusted_hosts for word in ("--allow-insecure-host", host)]
    routes: list[list[str]] = []
    if index is not None:
        if sources.find_links:
            routes.append(["--no-index", *links])
        if not sources.no_index:
            routes.append(["--default-index", index, *links])
        return routes
    if sources.no_index:
        return [["--no-index", *links]]
    own = any(environ.get(name) for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL"))
    main = ["--default-index", sources.index] if sources.index and not own else []
    routes.append([*main, *links])
    if sources.extra_indexes:
        strategy = ["--index-strategy", "unsafe-best-match"]
        extra = [word for url in sources.extra_indexes for word in ("--index", url)]
        routes.append([*main, *extra, *strategy, *links])
        first, *rest = sources.extra_indexes
        alone = ["--default-index", first, *(word for url in rest for word in ("--index", url))]
        routes.append([*alone, *strategy, *links])
    return routes


def pip_route(index: str | None) -> list[str]:
    """Arguments for pip, which reads its own configuration."""
    return ["--extra-index-url", index] if index is not None else []


# ------------------------------------------------------------------ a bundle
def carried(root: Path, wheels: Sequence[Wheel]) -> Path | None:
    """The folder of wheels that `bwd bundle` put into this checkout, when each of `wheels` lies in it by name
    and version: then nothing else is asked. What is installed is decided by the lock's hashes, as ever."""
    folder = root / "bundle" / "wheels"
    try:
        there = {_key(*name.split("-")[:2]) for name in os.listdir(folder) if name.endswith(".whl")}
    except OSError:
        return None
    return folder if all(_key(wheel.name, wheel.version) in there for wheel in wheels) else None


def _key(name: str, version: str = "") -> tuple[str, str]:
    return re.sub(r"[-_.]+", "_", name).lower(), version


def only_from(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for an installer that takes wheels from `folder` alone: no index, none of pip's files.
    The folder goes as an address: pip splits its list of places at spaces."""
    indexes = ("PIP_", "UV_INDEX", "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX", "UV_FIND_LINKS")
    out = {key: value for key, value in environ.items() if not key.startswith(indexes)}
    place = folder.absolute().as_uri()
    return out | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": place}
