"""Ports to listen on."""

from __future__ import annotations

import socket

from glm5ray.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0: any free one. Raises :class:`ConfigError` if it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(2048)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port"
        ) from error
    return bound


def url_of(host: str, port: int) -> str:
    """``http://127.0.0.1:8000``."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
