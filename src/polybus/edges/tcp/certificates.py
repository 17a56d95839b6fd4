"""The certificates of the connectors, loaded again when their files change.

A connection keeps the certificate that it began with. Files that cannot be used change nothing:
new connections get the last good certificate, and `failures` says why until the files are good
again. A renewal replaces two files, one after the other, so it may fail between them for a moment.
"""

import asyncio
import logging
import os
import ssl
from pathlib import Path
from typing import NamedTuple

from polybus.config import Tls
from polybus.errors import ConfigError

logger = logging.getLogger("polybus.server")

CHECK_S = 5.0

# Of each file: its time of change, size and inode. None if it is missing.
Stamp = tuple[tuple[int, int, int] | None, ...]


class Loaded(NamedTuple):
    context: ssl.SSLContext
    stamp: Stamp


class Certificates:
    """The TLS contexts of one bus.

    Attributes:
        failures: why changed files cannot be used.
    """

    def __init__(self) -> None:
        self._loaded: dict[Tls, Loaded] = {}
        self.failures: dict[Tls, str] = {}

    def add(self, settings: Tls) -> None:
        """Load a connector's certificate. Raises ConfigError."""
        self._loaded[settings] = _load(settings)

    def context(self, settings: Tls) -> ssl.SSLContext:
        """For a connection that begins now."""
        return self._loaded[settings].context

    def reload(self) -> None:
        """Load all again. Raises ConfigError; nothing has changed."""
        fresh = {}
        for settings in self._loaded:
            try:
                fresh[settings] = _load(settings)
            except ConfigError as error:
                self._keep(settings, _stamp(settings), error)
                raise
        self._loaded = fresh
        self.failures.clear()

    async def watch(self) -> None:
        """Load what has changed, until cancelled."""
        while self._loaded:
            await asyncio.sleep(CHECK_S)
            for settings in list(self._loaded):
                await self.refresh(settings)

    async def refresh(self, settings: Tls) -> None:
        """Load one certificate if its files have changed."""
        stamp = await asyncio.to_thread(_stamp, settings)
        if stamp == self._loaded[settings].stamp:
            return
        try:
            self._loaded[settings] = await asyncio.to_thread(_load, settings)
        except ConfigError as error:
            self._keep(settings, stamp, error)
            logger.error("new connections get the previous certificate: %s", error)
        else:
            self.failures.pop(settings, None)
            logger.info("new connections get the changed certificate %s", settings.cert)

    def _keep(self, settings: Tls, stamp: Stamp, error: ConfigError) -> None:
        # Until the files change again there is nothing new to report.
        self._loaded[settings] = self._loaded[settings]._replace(stamp=stamp)
        # Everyone may request the bus's health, so do not name paths.
        reason = error.__cause__ or error
        text = reason.strerror if isinstance(reason, OSError) and reason.strerror else str(reason)
        self.failures[settings] = (
            f"{error.code}: {Path(settings.cert).name} has changed and cannot be used: {text}; "
            "connections get the previous certificate"
        )


def _load(settings: Tls) -> Loaded:
    # First the stamp: a change while they are read is found next time.
    stamp = _stamp(settings)
    return Loaded(tls_context(settings), stamp)


def _stamp(settings: Tls) -> Stamp:
    stamps: list[tuple[int, int, int] | None] = []
    for path in (settings.cert, settings.key, settings.client_ca):
        if path is not None:
            try:
                found = os.stat(path)
            except OSError:
                stamps.append(None)
            else:
                stamps.append((found.st_ctime_ns, found.st_size, found.st_ino))
    return tuple(stamps)


def tls_context(settings: Tls) -> ssl.SSLContext:
    """The context of a connector. Raises ConfigError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # Without a password OpenSSL would ask for that of an encrypted key on the terminal.
        context.load_cert_chain(settings.cert, settings.key, password="")
    except (OSError, ssl.SSLError) as error:
        text = f"tls: cannot load {settings.cert} and {settings.key}: {error}"
        raise ConfigError("config.tls", text) from error
    if settings.client_ca is not None:
        try:
            context.load_verify_locations(settings.client_ca)
        except (OSError, ssl.SSLError) as error:
            text = f"tls.client-ca: cannot load {settings.client_ca}: {error}"
            raise ConfigError("config.tls", text) from error
        # A client may come without a certificate, but not with a wrong one.
        context.verify_mode = ssl.CERT_OPTIONAL
    return context
