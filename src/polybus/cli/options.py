"""Options that several verbs share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from polybus import config as configuration
from polybus.client.urls import DEFAULT_URL
from polybus.config import Config
from polybus.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

url_option = click.option(
    "--url",
    envvar="POLYBUS_URL",
    default=DEFAULT_URL,
    show_default=True,
    show_envvar=True,
    help=(
        "The bus: boson://, boson+properties:// or goms://, each also with +tls; http://, "
        "https://, ws:// or wss://; or queue://."
    ),
)
from_option = click.option(
    "--from",
    "start",
    default="latest",
    show_default=True,
    help="earliest, latest, EPOCH:OFFSET or an ISO time.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def data_options(command: F) -> F:
    """`--data` and `--config`, for verbs that work on a data folder."""
    command = click.option(
        "--config", "config_path", type=click.Path(dir_okay=False), help="TOML or JSON file."
    )(command)
    return click.option("--data", help="Folder of the log.  [default: ./polybus-data]")(command)


def load_config(data: str | None, config_path: str | None) -> Config:
    """The settings, with the folder that `--data` names if it does. Raises ConfigError."""
    config = configuration.load(config_path)
    return config if data is None else msgspec.structs.replace(config, data=data)


def existing_data(config: Config) -> Path:
    """The data folder. Raises UsageError `log.no-data` if there is none."""
    data = Path(config.data)
    if not data.is_dir():
        raise UsageError("log.no-data", f"there is no data folder {data}")
    return data
