"""The settings as a person may see them: values as they stand in `.env`, secrets hidden."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from bwd.core.keys import KEYS, NCCL, Key
from bwd.core.secret import HIDDEN, Secret
from bwd.core.settings import Settings

_SECRET_NAME: Final = re.compile(
    r"TOKEN|SECRET|PASSW|CREDENTIAL|PRIVATE|(^|_)(API_?)?KEY($|_)", re.IGNORECASE
)
_USERINFO: Final = re.compile(r"(?<=://)[^/@\s]+(?=@)")


@dataclass(frozen=True, slots=True)
class Shown:
    """One row of `bwd config`: `value` is text as in `.env` ("" = not set), `source` one of
    default, profile, file, environment, `where` the place (".env:12")."""

    key: str
    value: str
    source: str
    where: str
    change: str
    doc: str


def rows(settings: Settings) -> tuple[Shown, ...]:
    """Every key with its value and origin; NCCL_ variables a row each."""
    found: list[Shown] = []
    for key in KEYS.values():
        if key is NCCL:
            names = list(settings.nccl)
            found.extend(_row(settings, key, name, settings.nccl[name]) for name in names)
        else:
            found.append(_row(settings, key, key.name, value_text(settings, key)))
    return tuple(found)


def _row(settings: Settings, key: Key, name: str, value: str) -> Shown:
    origin = settings.origins.get(name)
    source, where = (origin.source, origin.where) if origin else ("default", "")
    return Shown(name, value, source, where, key.change, key.doc)


def value_text(settings: Settings, key: Key) -> str:
    """The value of one key as it could stand in `.env`; secrets are `***`."""
    value = getattr(settings, key.field)
    if value is None:
        return "auto" if key.default == "auto" else ""
    if isinstance(value, Secret):
        return HIDDEN
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return shlex.join(value)
    if isinstance(value, Mapping):
        return " ".join(f"{name}={shlex.quote(hide(name, text))}" for name, text in value.items())
    if key.name == "PYTORCH_ALLOC_CONF" and value == "":
        return "none"
    return str(value)


def hide(name: str, value: str) -> str:
    """The value of a variable as it may be shown: `***` when its name says that it is a secret; a
    user name and password in an address are hidden too."""
    if _SECRET_NAME.search(name):
        return HIDDEN
    return _USERINFO.sub(HIDDEN, value)


def secret_texts(settings: Settings) -> tuple[str, ...]:
    """What must not appear in a log: the secrets themselves, and secret values of EXTRA_ENV."""
    texts = [value.reveal() for value in (settings.hf_token, settings.api_key) if value is not None]
    texts += [value for name, value in settings.extra_env.items() if _SECRET_NAME.search(name) and value]
    return tuple(texts)
