"""Registry: where brokers are, for those that meet over TCP."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from polybus.errors import ConfigError


@dataclass(slots=True)
class Place:
    """A broker's host, and which TCP port stands for which of its ports.

    Without `ports`, each port is the TCP port of the same number. With `any_port`, a bind takes any
    free TCP port and notes it here: for programs of one process, and for tests.
    """

    host: str = "127.0.0.1"
    ports: dict[int, int] | None = None
    any_port: bool = False
    taken: dict[int, int] = field(default_factory=dict)


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    ports: dict[int, int] | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    brokers: dict[str, _Entry]


class Registry:
    """Names to places. A broker that only connects need not be in it."""

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Registry:
        """Read a TOML or JSON file: `brokers.NAME.host`, `brokers.NAME.ports.PORT = TCP port`.

        Raises:
            ConfigError: the file cannot be read, or a key or value is wrong.
        """
        file = Path(path)
        try:
            content = file.read_bytes()
            if file.suffix == ".toml":
                loaded = msgspec.convert(tomllib.loads(content.decode()), _File, strict=False)
            else:
                loaded = msgspec.json.decode(content, type=_File)
        except OSError as error:
            raise ConfigError("config.file", f"cannot read {file}: {error.strerror}") from error
        except (ValueError, msgspec.MsgspecError) as error:
            raise ConfigError("config.invalid", f"{file}: {error}") from error
        registry = cls()
        for name, entry in loaded.brokers.items():
            registry.add(name, entry.host, entry.ports)
        return registry

    def add(
        self,
        name: str,
        host: str = "127.0.0.1",
        ports: Mapping[int, int] | None = None,
        *,
        any_port: bool = False,
    ) -> None:
        """Say where the broker `name` is; a name that is there already moves."""
        place = Place(host, None if ports is None else dict(ports), any_port)
        for port, tcp_port in (place.ports or {}).items():
            if not 0 < tcp_port <= 65535:
                text = f"brokers.{name}.ports.{port} is {tcp_port}; it must be 1 to 65535"
                raise ConfigError("config.range", text)
        self._places[name] = place

    def place(self, name: str) -> Place | None:
        return self._places.get(name)

    def address(self, name: str, port: int) -> tuple[str, int] | None:
        """Where to connect to for a broker's port; None while that is not known."""
        place = self._places.get(name)
        if place is None:
            return None
        if place.any_port:
            tcp_port = place.taken.get(port)
        else:
            tcp_port = port if place.ports is None else place.ports.get(port)
        return None if tcp_port is None else (place.host, tcp_port)
