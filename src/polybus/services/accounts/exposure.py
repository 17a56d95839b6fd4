"""Whether strangers could use a bus: checked before it listens."""

from collections.abc import Sequence

from polybus import names
from polybus.config import Config, Connector
from polybus.errors import ConfigError
from polybus.services.accounts.accounts import is_loopback
from polybus.services.accounts.store import AccountStore


def check_exposure(config: Config, store: AccountStore) -> None:
    """Refuse to listen beyond loopback if anyone could use the bus, or if no one could.

    Raises ConfigError `accounts.open` or `accounts.none`, which say what to set.
    """
    beyond = [
        (f"connectors[{index}]", connector)
        for index, connector in enumerate(config.connectors)
        if not is_loopback(connector.ip)
    ]
    if not beyond:
        return
    key, connector = beyond[0]
    where = f"{key} listens on {connector.ip}, beyond this machine"
    if config.accounts.default == "open":
        text = f"{where}, and needs no login (accounts.default = open)"
        choice = "set it to loopback and create accounts, or start with --insecure"
        raise ConfigError("accounts.open", f"{text}: {choice}")
    for key, connector in beyond:
        if _is_open_queue(connector):
            text = f"{key}: {connector.ip} needs no login and acts as account {connector.account!r}"
            choice = "set token-required, or start with --insecure"
            raise ConfigError("accounts.open", f"{text}: {choice}")
    if not any(one.password or one.tokens for one in store.accounts.values()):
        command = f"polybus accounts create NAME --password-stdin --data {config.data}"
        text = f"{where}, and there is no account to log in to"
        raise ConfigError("accounts.none", f"{text}: run {command}, or listen on 127.0.0.1")


def _is_open_queue(connector: Connector) -> bool:
    is_queue: Sequence[str] = connector.protocols
    is_named = connector.account != names.ACCOUNT
    return "queue" in is_queue and is_named and not connector.token_required
