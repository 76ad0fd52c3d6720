"""Where a checkpoint lies. Without torch: servers need the tokenizer beside the weights, not the weights."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import resources
from pathlib import Path

from glm5ray.errors import CheckpointError


def resolve_checkpoint(name: str) -> Path:
    """The folder of a checkpoint: ``nano`` for the one inside the package, else a path.

    Raises :class:`CheckpointError` that names the nearest thing there is.
    """
    if name == "nano":
        folder = Path(str(resources.files("glm5ray"))) / "nano" / "checkpoint"
        if not (folder / "config.json").is_file():
            raise CheckpointError("this installation has no 'nano' model inside; name a checkpoint folder instead")
        return folder
    folder = Path(name).expanduser()
    if not folder.exists():
        around = [str(folder.parent / entry.name) for entry in _subfolders(folder.parent)]
        close = get_close_matches(str(folder), around, n=1) or get_close_matches(name, ["nano"], n=1)
        hint = (
            f"; did you mean '{close[0]}'?"
            if close
            else "; name a checkpoint folder, or 'nano' for the one inside the package"
        )
        raise CheckpointError(f"there is no checkpoint folder {name}{hint}")
    if not folder.is_dir():
        raise CheckpointError(f"{name} is a file; name the folder that holds config.json and the safetensors files")
    return folder


def _subfolders(folder: Path) -> list[Path]:
    try:
        return [entry for entry in folder.iterdir() if entry.is_dir()]
    except OSError:
        return []
