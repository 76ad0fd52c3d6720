"""cluster.yaml: Ray's own file for ``ray up``, checked before anything is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from glm5ray.actors import authentication
from glm5ray.errors import ConfigError, EngineUnavailable

_PLACEHOLDERS = ("HEAD_ADDRESS", "WORKER_ADDRESS")


def read_cluster_file(path: str | Path) -> dict[str, Any]:
    """The file, checked by Ray's own validator and for what that lets pass. Raises :class:`ConfigError`."""
    try:
        values = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}; name a cluster file, such as cluster.yaml") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} holds a {type(values).__name__}; it must be a mapping with cluster_name and provider"
        )
    validate_cluster(values, str(path))
    return values


def validate_cluster(values: dict[str, Any], name: str) -> None:
    """Raises :class:`ConfigError` with the field at fault."""
    text = yaml.safe_dump(values)
    for word in _PLACEHOLDERS:
        if word in text:
            raise ConfigError(f"{name} still says {word}; put the machine's address there")
    problem = _ray_problem(values)
    if problem is not None:
        raise ConfigError(f"{name}: {problem}")
    commands = values.get("head_start_ray_commands") or []
    provider = values.get("provider", {})
    starts = [command for command in commands if "ray start" in command]
    if provider.get("type") == "local":
        if not any("RAY_enable_autoscaler_v2=0" in command for command in starts):
            raise ConfigError(
                f"{name}: head_start_ray_commands has no 'ray start' with RAY_enable_autoscaler_v2=0; without it Ray "
                "2.60 starts one worker machine fewer than provider.worker_ips names"
            )
        if "available_node_types" in values:
            raise ConfigError(f"{name}: available_node_types is not for provider.type local; name worker_ips instead")
    if starts and not all("RAY_AUTH_MODE" in command for command in starts):
        raise ConfigError(
            f"{name}: a 'ray start' of head_start_ray_commands does not set RAY_AUTH_MODE; write RAY_AUTH_MODE=token "
            "before it, or everyone who reaches its ports can run code there"
        )


def ray_up(path: str | Path, *, more: tuple[str, ...] = ()) -> None:
    """``ray up`` with the file, its output going where ours goes. Raises :class:`EngineUnavailable` if it fails."""
    _run(["up", "--yes", *more, str(path)], f"ray up {path}")


def ray_down(path: str | Path) -> None:
    """``ray down`` likewise."""
    _run(["down", "--yes", str(path)], f"ray down {path}")


def _run(arguments: list[str], what: str) -> None:
    command = [sys.executable, "-m", "ray.scripts.scripts", *arguments]
    status = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, env=authentication.prepare()).returncode
    if status:
        raise EngineUnavailable(f"{what} ended with status {status}; its own messages are above")


def _ray_problem(values: dict[str, Any]) -> str | None:
    """What Ray's validator says; its functions are private to Ray, and so are the errors that they raise."""
    from click import ClickException
    from jsonschema import ValidationError
    from ray.autoscaler._private.util import prepare_config, validate_config

    try:
        validate_config(prepare_config(values))
    except ValidationError as error:
        where = ".".join(str(part) for part in error.absolute_path)
        return f"{where + ': ' if where else ''}{error.message.splitlines()[0]}"
    except ClickException as error:
        return " ".join(error.message.split())
    except (KeyError, ValueError, TypeError) as error:
        return f"Ray cannot read it ({type(error).__name__}: {' '.join(str(error).split())})"
    return None
