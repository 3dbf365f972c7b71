"""The one reading of the settings that every entry point uses: `.env`, the profile and the process
environment, from disk to a frozen Settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from bwd.adapters import dotenv_file
from bwd.core.dotenv import DotEnv
from bwd.core.problem import Problem
from bwd.core.settings import Origin, Settings, profile_for, resolve
from bwd.core.settings_values import nearest
from bwd.paths import Paths


def load(paths: Paths, environ: Mapping[str, str], root: Path = Path("/")) -> Settings:
    """The settings in force now. Raises SettingsError with every problem of `.env`, the profile and
    the process environment. `~` in paths is this user's home; a relative path is relative to the
    repository (MODEL stays as given: clients may ask for it by that name). `root` is where /proc and
    /dev are."""
    file = dotenv_file.read(paths.env_file, env_file_name(paths))
    chosen, where = _profile_name(environ, file)
    names = card_names(root)
    picked = chosen
    if chosen == "auto":
        picked = "none" if names is None else profile_for(names)
    profile = _read_profile(paths, picked, where)
    settings = resolve(environ, file, profile)
    origins = dict(settings.origins)
    if chosen == "auto":
        seen = f"{len(names)} x {names[0]}" if names else "no NVIDIA card"
        if names is None:
            seen = "cards whose names the kernel does not list"
        origins["PROFILE"] = Origin(
            settings.origins["PROFILE"].source, f"{where + ', ' if where else ''}auto: {seen}"
        )
    return replace(
        settings,
        profile=picked,
        engine_python=_absolute(settings.engine_python, paths.root),
        hf_home=_absolute(settings.hf_home, paths.root),
        origins=origins,
    )


def env_file_name(paths: Paths) -> str:
    """How messages call the settings file: `.env`, or where it really is."""
    return _shown(paths, paths.env_file)


def card_names(root: Path = Path("/")) -> tuple[str, ...] | None:
    """Names of the NVIDIA cards as the kernel module lists them: no library is loaded and nothing
    can hang, so that every command picks the same profile. Empty without a card; None when there
    are device files of cards but no list (WSL, some containers)."""
    found: list[str] = []
    try:
        for card in sorted((root / "proc/driver/nvidia/gpus").iterdir()):
            for line in (card / "information").read_text("utf-8", "replace").splitlines():
                field, _, value = line.partition(":")
                if field.strip() == "Model":
                    found.append(value.strip())
    except OSError:
        found.clear()
    if not found and any((root / "dev" / name).exists() for name in ("nvidiactl", "nvidia0", "dxg")):
        return None
    return tuple(found)


def _profile_name(environ: Mapping[str, str], file: DotEnv) -> tuple[str, str]:
    """The profile asked for, and where; "auto" when nobody asks."""
    text = environ.get("PROFILE", "").strip()
    if text:
        return _word(text), "process environment"
    entry = file.last().get("PROFILE")
    if entry is not None and entry.value:
        return _word(entry.value), file.where(entry)
    return "auto", ""


def _word(text: str) -> str:
    return text.casefold() if text.casefold() in ("auto", "none") else text


def _read_profile(paths: Paths, name: str, where: str) -> DotEnv | None:
    if name == "none":
        return None
    known = {path.stem: path for folder in _profile_folders(paths) for path in sorted(folder.glob("*.env"))}
    if name in known:
        return dotenv_file.read(known[name], _shown(paths, known[name]))
    close = nearest(name, known)
    hint = f"use {close}" if close else f"use auto, none, {', '.join(known)}"
    # A name out of `profile_for` without its file would be an incomplete installation.
    return DotEnv(
        "", problems=(Problem("PROFILE", where or "env/profiles", f"there is no profile {name!r}", hint),)
    )


def _profile_folders(paths: Paths) -> tuple[Path, Path]:
    """This machine's own, and the repository's; of two files of one name the repository's counts."""
    return paths.local_profiles, paths.profiles


def _shown(paths: Paths, path: Path) -> str:
    try:
        return str(path.relative_to(paths.root))
    except ValueError:
        return str(path)


def _absolute(text: str | None, root: Path) -> str | None:
    if text is None:
        return None
    # normpath, not resolve: a venv's python is a link, and following it would leave the venv
    return os.path.normpath(root / Path(text).expanduser())
