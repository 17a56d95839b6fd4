"""Options that several verbs share, and the settings that they choose."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import click
import msgspec
from click.core import ParameterSource

from polybus import config_file
from polybus.client.options import DEFAULT_URL, with_scheme
from polybus.config import PORT, Config
from polybus.errors import UsageError
from polybus.log.cluster_location import read_location
from polybus.log.layout import is_data_folder, is_foreign
from polybus.log.topics import storage_error

F = TypeVar("F", bound=Callable[..., Any])


def without_secret(context: click.Context, option: click.Parameter, url: str | None) -> str | None:
    """The URL of an option, with a warning if it exposes a password."""
    is_argument = context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
    host = (url or "").partition("://")[2].partition("/")[0]
    if is_argument and "@" in host:
        text = "every user of this machine can see the password or token in --url"
        click.echo(f"warning: {text}; use POLYBUS_URL, POLYBUS_TOKEN or polybus login", err=True)
    return url


_url = functools.partial(
    click.option, "--url", envvar="POLYBUS_URL", show_default=True, show_envvar=True
)
url_option = _url(
    default=DEFAULT_URL,
    callback=without_secret,
    help="The bus: boson://, boson+properties:// or goms://, each also with +tls; http://, "
    "https://, ws:// or wss://; or queue://.",
)
http_url_option = _url(
    default=f"http://127.0.0.1:{PORT}",
    help="The bus: http:// or https://.",
    callback=lambda context, option, url: with_scheme(
        without_secret(context, option, url) or "", "http"
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
data_option = click.option("--data", help="Folder of the log.  [default: ./polybus-data]")
config_option = click.option(
    "--config", "config_path", type=click.Path(dir_okay=False), help="TOML or JSON file."
)
port_option = click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Port of all connectors except queues; 0 means any free port.",
)
topics_option = click.option(
    "--topic", "topics", multiple=True, help="Declare a topic; may be repeated."
)


def settings_options(command: F) -> F:
    """Add `--data` and `--config`; the command gets the settings they choose as `config`."""

    @data_option
    @config_option
    @functools.wraps(command)
    def with_config(*, data: str | None, config_path: str | None, **given: Any) -> Any:
        return command(config=load_config(data, config_path), **given)

    return cast(F, with_config)


def load_config(
    data: str | None, config_path: str | None = None, topics: tuple[str, ...] = ()
) -> Config:
    """The settings of a file and the environment, changed by options. Raises ConfigError."""
    config = config_file.load(config_path)
    if data is not None:
        config = msgspec.structs.replace(config, data=data)
    return msgspec.structs.replace(config, topics=[*config.topics, *topics])


def only_files(config: Config, what: str) -> None:
    """Refuse a command that needs the log in files. Raises UsageError `cluster.unsupported`."""
    place = config.log if config.is_cluster else read_location(Path(config.data))
    if place is not None:
        text = f"{what} needs the messages in files, but `log` is {place}"
        raise UsageError("cluster.unsupported", text)


def files_of(config: Config, what: str) -> Path:
    """The data folder with the messages. Raises as `existing_data` and `only_files` do."""
    only_files(config, what)
    data = existing_data(config)
    if not is_data_folder(data):
        raise UsageError("log.no-data", f"{data} has nothing of a bus")
    return data


def existing_data(config: Config) -> Path:
    """The data folder.

    Raises UsageError `log.no-data` if it is missing, or only other programs use it; StorageError
    `log.denied`.
    """
    data = Path(config.data)
    try:
        if not data.is_dir():
            raise UsageError("log.no-data", f"there is no data folder {data}")
        if is_foreign(data):
            raise UsageError("log.no-data", f"{data} has folders, and nothing of a bus")
    except OSError as error:
        raise storage_error(error, f"cannot open {data}") from error
    return data
