"""Ray's token authentication, decided before Ray is imported and never left to a default that changes with versions.

A cluster without it runs code for everyone who reaches one of its ports (CVE-2023-48022, CVE-2025-62593).
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


def token_file() -> Path:
    """Where Ray looks for the token."""
    return Path(os.environ.get(TOKEN_PATH) or Path.home() / ".ray" / "auth_token")


def prepare(environment: dict[str, str] | None = None) -> dict[str, str]:
    """Settings of the environment for Ray's processes: what the user set in ``RAY_AUTH_MODE``, else ``token``.

    With ``token``, a token is made if there is none, readable by its owner alone. Changes nothing but that file;
    returns a copy of ``environment`` (default: this process's) with the mode in it."""
    result = dict(os.environ if environment is None else environment)
    mode = result.setdefault(MODE, "token")
    if mode == "token" and TOKEN not in result:
        _make_token(Path(result.get(TOKEN_PATH) or Path.home() / ".ray" / "auth_token"))
    return result


def _make_token(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    except FileExistsError:
        path.chmod(0o600)  # Ray itself writes it readable for all


def use_token() -> None:
    """For a process that will join a cluster by its address: with ``RAY_AUTH_MODE`` unset and a token at hand, the mode
    is ``token``. Ray 2.60 finds that out by itself for ``auto`` alone."""
    if MODE in os.environ or not (TOKEN in os.environ or token_file().exists()):
        return
    os.environ[MODE] = "token"
    # Private, and in no stub: Ray read the environment when it was imported, and must do so again.
    from ray._raylet import Config  # pyright: ignore[reportAttributeAccessIssue]

    Config.initialize("")
