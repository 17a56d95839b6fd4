"""Registry: the TCP addresses of brokers."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from polybus.errors import ConfigError


@dataclass(slots=True)
class Endpoint:
    """A broker's host, and the TCP port for each of its ports.

    Without `ports`, each port is the TCP port of the same number. With `any_port`, a bind takes any
    free TCP port and records it in `bound`: for programs of one process, and for tests.
    """

    host: str = "127.0.0.1"
    ports: dict[int, int] | None = None
    any_port: bool = False
    bound: dict[int, int] = field(default_factory=dict)


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    ports: dict[int, int] | None = None


class _RegistryFile(msgspec.Struct, forbid_unknown_fields=True):
    brokers: dict[str, _Entry]


class Registry:
    """Maps names to endpoints. A broker that only connects need not be listed."""

    def __init__(self) -> None:
        self._endpoints: dict[str, Endpoint] = {}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Registry":
        """Read a TOML or JSON file: `brokers.NAME.host`, `brokers.NAME.ports.PORT = TCP port`.

        Raises:
            ConfigError: the file cannot be read, or a key or value is wrong.
        """
        file = Path(path)
        try:
            content = file.read_bytes()
            if file.suffix == ".toml":
                loaded = msgspec.convert(
                    tomllib.loads(content.decode()), _RegistryFile, strict=False
                )
            else:
                loaded = msgspec.json.decode(content, type=_RegistryFile)
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
        """Set the address of the broker `name`, replacing an earlier one.

        Raises:
            ConfigError: `config.range`, a TCP port is not 1 to 65535.
        """
        endpoint = Endpoint(host, None if ports is None else dict(ports), any_port)
        for port, tcp_port in (endpoint.ports or {}).items():
            if not 0 < tcp_port <= 65535:
                text = f"brokers.{name}.ports.{port} is {tcp_port}; it must be 1 to 65535"
                raise ConfigError("config.range", text)
        self._endpoints[name] = endpoint

    def endpoint(self, name: str) -> Endpoint | None:
        return self._endpoints.get(name)

    def address(self, name: str, port: int) -> tuple[str, int] | None:
        """The TCP address of a broker's port; None if it is not known yet."""
        endpoint = self._endpoints.get(name)
        if endpoint is None:
            return None
        if endpoint.any_port:
            tcp_port = endpoint.bound.get(port)
        else:
            tcp_port = port if endpoint.ports is None else endpoint.ports.get(port)
        return None if tcp_port is None else (endpoint.host, tcp_port)
