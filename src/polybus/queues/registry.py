"""Registry: the TCP addresses of brokers."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from polybus.errors import ConfigError
from polybus.structs import convert, decode


class _Endpoint(msgspec.Struct, forbid_unknown_fields=True):
    """A broker's host, and the TCP port for each of its ports: by default, of the same number."""

    host: str = "127.0.0.1"
    ports: dict[int, int] | None = None


class _RegistryFile(msgspec.Struct, forbid_unknown_fields=True):
    brokers: dict[str, _Endpoint]


class Registry:
    """Maps names to endpoints. A broker that only connects need not be listed."""

    def __init__(self) -> None:
        self._endpoints: dict[str, _Endpoint] = {}
        self._any_port: set[str] = set()

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
                loaded = convert(msgspec.toml.decode(content), _RegistryFile, strict=False)
            else:
                loaded = decode(content, _RegistryFile)
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

        With `any_port`, a bind takes any free TCP port: for programs of one process, and for tests.

        Raises:
            ConfigError: `config.range`, a TCP port is not 1 to 65535.
        """
        for port, tcp_port in (ports or {}).items():
            if not 0 < tcp_port <= 65535:
                text = f"brokers.{name}.ports.{port} is {tcp_port}; it must be 1 to 65535"
                raise ConfigError("config.range", text)
        known = None if ports is None else dict(ports)
        self._endpoints[name] = _Endpoint(host, {} if any_port else known)
        self._any_port.discard(name)
        if any_port:
            self._any_port.add(name)

    def __contains__(self, name: str) -> bool:
        return name in self._endpoints

    def address(self, name: str, port: int, *, binds: bool = False) -> tuple[str, int] | None:
        """The TCP address of a broker's port; None if it is not known yet."""
        endpoint = self._endpoints.get(name)
        if endpoint is None:
            return None
        if binds and name in self._any_port:
            return endpoint.host, 0
        tcp_port = port if endpoint.ports is None else endpoint.ports.get(port)
        return None if tcp_port is None else (endpoint.host, tcp_port)

    def bound(self, name: str, port: int, tcp_port: int | None) -> None:
        """A broker listens on this TCP port now; with None, no longer."""
        ports = self._endpoints[name].ports
        if name in self._any_port and ports is not None:
            ports.pop(port, None)
            if tcp_port is not None:
                ports[port] = tcp_port
