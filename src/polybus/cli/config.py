"""`polybus config`: the settings that a bus would run with."""

from collections.abc import Iterator
from typing import Any

import click
import msgspec

from polybus import config_file
from polybus.cli.common.options import config_option, json_option
from polybus.cli.common.output import echo, echo_json, say
from polybus.config import Config
from polybus.services.accounts.accounts import is_loopback


@click.group(epilog="Example: polybus config check --config server.json")
def config() -> None:
    """Show or check the settings: file, environment (POLYBUS_...) and defaults together."""


@config.command(epilog="Example: polybus config show --config server.json > polybus.toml")
@config_option
@json_option
def show(config_path: str | None, as_json: bool) -> None:
    """Print the effective value of every setting, as a valid TOML file."""
    loaded = config_file.load(config_path)
    # `load` has copied the topics file into `topics`, so the output needs no other file.
    values = msgspec.to_builtins(msgspec.structs.replace(loaded, topic_config=None))
    echo_json(values) if as_json else click.echo(as_toml(values), nl=False)


@config.command(epilog="Example: polybus config check --config server.json")
@config_option
@json_option
def check(config_path: str | None, as_json: bool) -> None:
    """Check the settings; exit 2 with one line that names the key if a setting is wrong.

    Warns about what is open to others: addresses, plain text, sign-ups, web pages.
    """
    loaded = config_file.load(config_path)
    connectors, topics = len(loaded.connectors), len(loaded.topic_list())
    found = list(open_risks(loaded))
    summary = {"ok": True, "connectors": connectors, "topics": topics, "warnings": found}
    echo(as_json, summary, f"ok: {connectors} connectors, {topics} topics")
    for text in () if as_json else found:
        say(f"warning: {text}")


def open_risks(config: Config) -> Iterator[str]:
    """What users other than the owner of the bus can do, with the key that permits it."""
    who = {
        "open": "anyone who can reach the bus is the default account (accounts.default = open)",
        "loopback": "every program on this machine is the default account "
        "(accounts.default = loopback)",
        "off": "",
    }[config.accounts.default]
    if who:
        yield who
    for number, one in enumerate(config.connectors):
        if is_loopback(one.ip):
            continue
        where = f"connectors[{number}] listens beyond this machine ({one.ip}:{one.port})"
        if one.protocol == "udp":
            yield f"{where} with UDP, which is not encrypted"
        elif one.tls is None or not one.tls.required:
            yield f"{where} and takes plain connections (tls.required)"
    if config.accounts.signup:
        yield "anyone who can reach the bus can create an account (accounts.signup)"
    if "*" in config.http.cors_origins:
        yield "every web page may call the API in its visitors' browsers (http.cors-origins)"


def as_toml(values: dict[str, Any]) -> str:
    """Settings as TOML: plain keys first, then a table per group; unset keys are comments."""
    plain = {key: value for key, value in values.items() if not isinstance(value, dict)}
    lines = [_assignment(key, value) for key, value in plain.items()]
    for name, group in values.items():
        if isinstance(group, dict):
            lines += ["", f"[{name}]"]
            lines += [_assignment(key, value) for key, value in group.items()]
    return "\n".join(lines) + "\n"


def _assignment(key: str, value: Any) -> str:
    if value is None:
        return f"# {key} is not set"
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        items = "".join(f"    {_value(item)},\n" for item in value)
        return f"{key} = [\n{items}]"
    return f"{key} = {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{key} = {_value(one)}" for key, one in value.items() if one is not None)
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    # TOML writes strings, numbers and booleans as JSON does.
    return msgspec.json.encode(value).decode()
