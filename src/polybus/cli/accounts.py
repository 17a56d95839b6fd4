"""`polybus accounts`: accounts of a running bus, or in the files of a stopped one."""

import datetime
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from polybus.cli.common import admin
from polybus.cli.common.options import json_option, only_files, settings_options
from polybus.cli.common.output import ask_password, echo, echo_json, echo_table
from polybus.config import Config
from polybus.errors import StorageError, UsageError
from polybus.log import file_modes
from polybus.log.disk import Disk
from polybus.log.interface import Log
from polybus.services.accounts import passwords
from polybus.services.accounts.edits import seen_config, unused_edit
from polybus.services.accounts.records import account_name, view
from polybus.services.accounts.store import AccountStore
from polybus.services.consumers import saved_consumers

ACCOUNTS = "/v1/accounts"
COLUMNS = ("name", "password", "tokens", "grants", "created")
TOKEN_COLUMNS = ("id", "topics", "rights", "expires", "created")
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
Offline = Callable[[AccountStore, Log], Any]

name_argument = click.argument("name")
password_option = click.option(
    "--password-stdin", is_flag=True, help="Read the password from the first line of stdin."
)


@click.group(
    epilog="""\b
Examples:
  polybus accounts create shop
  polybus accounts grant office shop/orders.* subscribe
  polybus accounts token create shop --rights publish --expires 30d
"""
)
def accounts() -> None:
    """Create accounts, share their topics, and make tokens.

    An account has its own topics: two accounts may both have `news`. Works whether the bus runs or
    not, except `delete`.
    """


@accounts.command(epilog="Example: polybus accounts create shop --password-stdin < file")
@name_argument
@password_option
@click.option("--no-password", is_flag=True, help="Allow logins by token only.")
@settings_options
@json_option
def create(
    config: Config, name: str, password_stdin: bool, no_password: bool, as_json: bool
) -> None:
    """Create an account; asks for its password."""
    name = account_name(name)
    password = None if no_password else _password(password_stdin)
    Path(config.data).mkdir(parents=True, exist_ok=True)

    def create_offline(store: AccountStore, log: Log) -> None:
        hashed = None if password is None else passwords.hash_of(password)
        consumers = saved_consumers(Path(config.data), log.bounds, time.time_ns)
        store.create(name, hashed, [*log.topics(), *consumers.groups()])

    body = {"name": name} | ({} if password is None else {"password": password})
    _ask(config, create_offline, "POST", ACCOUNTS, body)
    echo(as_json, {"name": name}, f"created {name}")


@accounts.command("list", epilog="Example: polybus accounts list --json")
@settings_options
@json_option
def list_accounts(config: Config, as_json: bool) -> None:
    """List all accounts."""

    def list_offline(store: AccountStore, log: Log) -> dict[str, Any]:
        return {"accounts": [view(one) for one in store.accounts.values()]}

    found = _ask(config, list_offline, "GET", ACCOUNTS)["accounts"]
    if as_json:
        echo_json(found)
        return
    rows = [
        (one["name"], "yes" if one["password"] else "no")
        + (len(one["tokens"]), len(one["grants"]), one["created"] or None)
        for one in found
    ]
    echo_table(COLUMNS, rows)


@accounts.command(epilog="Example: polybus accounts show shop")
@name_argument
@settings_options
@json_option
def show(config: Config, name: str, as_json: bool) -> None:
    """Show an account, what it shares, and its tokens."""
    found = _account(config, name)
    if as_json:
        echo_json(found)
        return
    click.echo(f"name      {found['name']}")
    click.echo(f"created   {found['created'] or '-'}")
    click.echo(f"password  {'yes' if found['password'] else 'no'}")
    if seen := seen_config(Path(config.data), found["name"]):
        used = f"{seen.file}, of {seen.changed}" if seen.file else "-"
        try:
            edit = unused_edit(Path(config.data), found["name"])
        except StorageError as error:
            edit = error.text
        click.echo(f"config    {edit or used}")
    if found["grants"]:
        click.echo("")
        rows = [(one["to"], one["topics"], ",".join(one["rights"])) for one in found["grants"]]
        echo_table(("shared with", "topics", "rights"), rows)
    if found["tokens"]:
        click.echo("")
        echo_table(TOKEN_COLUMNS, _token_rows(found["tokens"]))


@accounts.command(epilog="Example: polybus accounts passwd shop")
@name_argument
@password_option
@settings_options
def passwd(config: Config, name: str, password_stdin: bool) -> None:
    """Change the password; connections that used the old one are closed."""
    password = _password(password_stdin)

    def set_offline(store: AccountStore, log: Log) -> None:
        store.set_password(name.lower(), passwords.hash_of(password))

    _ask(config, set_offline, "PUT", f"{_path(name)}/password", {"password": password})
    click.echo("changed")


@accounts.command(epilog="Example: polybus accounts delete shop --yes")
@name_argument
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@settings_options
def delete(config: Config, name: str, yes: bool) -> None:
    """Delete an account with all its topics and messages."""
    name = account_name(name)
    _account(config, name)
    if not yes and admin.running(Path(config.data)) is not None:
        click.confirm(f"Delete {name} with all its topics and messages?", abort=True, err=True)

    def delete_offline(store: AccountStore, log: Log) -> None:
        # Its sessions, consumers and staged files would pass to the next account of this name.
        text = "only a running bus can end the sessions of an account; start the bus first"
        raise UsageError("account.stopped", text)

    _ask(config, delete_offline, "DELETE", _path(name))
    click.echo(f"deleted {name}")


@accounts.command(epilog="Example: polybus accounts grant office shop/orders.* subscribe,publish")
@name_argument
@click.argument("topics", metavar="OWNER/TOPIC-PATTERN")
@click.argument("rights")
@settings_options
def grant(config: Config, name: str, topics: str, rights: str) -> None:
    """Let an account use topics of another: RIGHTS are publish, subscribe and administer.

    `*` in a pattern stands for any characters. The account sees the topics as OWNER/TOPIC.
    """
    owner, shared = _shared(topics)
    wanted = [one.strip() for one in rights.split(",")]

    def grant_offline(store: AccountStore, log: Log) -> None:
        store.grant(owner, name.lower(), shared, wanted)

    body = {"to": name.lower(), "topics": shared, "rights": wanted}
    _ask(config, grant_offline, "POST", f"{_path(owner)}/grants", body)
    click.echo(f"{name.lower()} may {', '.join(wanted)}: {owner}/{shared}")


@accounts.command(epilog="Example: polybus accounts revoke office shop/orders.*")
@name_argument
@click.argument("topics", metavar="OWNER/TOPIC-PATTERN")
@settings_options
def revoke(config: Config, name: str, topics: str) -> None:
    """Revoke a grant; its subscriptions end at once."""
    owner, shared = _shared(topics)

    def revoke_offline(store: AccountStore, log: Log) -> None:
        store.revoke(owner, name.lower(), shared)

    body = {"to": name.lower(), "topics": shared}
    _ask(config, revoke_offline, "DELETE", f"{_path(owner)}/grants", body)
    click.echo(f"revoked {owner}/{shared} from {name.lower()}")


@accounts.group(epilog="Example: polybus accounts token create shop --rights publish --expires 30d")
def token() -> None:
    """Make, list and revoke tokens: logins for programs."""


@token.command("create", epilog="Example: polybus accounts token create shop --topics orders.*")
@name_argument
@click.option(
    "--topics", default="", help="Patterns of topics, separated by commas.  [default: all]"
)
@click.option("--rights", default="", help="Rights, separated by commas.  [default: all]")
@click.option("--expires", help="Expires after this time, such as 12h or 30d, or at an ISO time.")
@settings_options
@json_option
def create_token(
    config: Config, name: str, topics: str, rights: str, expires: str | None, as_json: bool
) -> None:
    """Make a token and print it once: its secret is not stored."""
    limits: dict[str, Any] = {
        "topics": [one.strip() for one in topics.split(",") if one.strip()],
        "rights": [one.strip() for one in rights.split(",") if one.strip()],
    }
    if expires is not None:
        limits["expires"] = end_of(expires)

    def create_offline(store: AccountStore, log: Log) -> dict[str, str]:
        return {"token": store.make_token(name.lower(), **limits)}

    made = _ask(config, create_offline, "POST", f"{_path(name)}/tokens", limits)
    echo(as_json, {"token": made["token"]}, made["token"])


@token.command("list", epilog="Example: polybus accounts token list shop")
@name_argument
@settings_options
@json_option
def list_tokens(config: Config, name: str, as_json: bool) -> None:
    """List the tokens of an account, without their secrets."""
    tokens = _account(config, name)["tokens"]
    if as_json:
        echo_json(tokens)
    else:
        echo_table(TOKEN_COLUMNS, _token_rows(tokens))


@token.command("revoke", epilog="Example: polybus accounts token revoke shop 1f3a5c7e9b0d")
@name_argument
@click.argument("identity", metavar="ID")
@settings_options
def revoke_token(config: Config, name: str, identity: str) -> None:
    """Revoke a token; its connections are closed."""

    def revoke_offline(store: AccountStore, log: Log) -> None:
        store.revoke_token(name.lower(), identity)

    path = f"{_path(name)}/tokens/{quote(identity, safe='')}"
    _ask(config, revoke_offline, "DELETE", path)
    click.echo(f"revoked {identity}")


def _account(config: Config, name: str) -> dict[str, Any]:
    def show_offline(store: AccountStore, log: Log) -> dict[str, Any]:
        return view(store.get(name.lower()))

    found: dict[str, Any] = _ask(config, show_offline, "GET", _path(name))
    return found


def _ask(config: Config, offline: Offline, method: str, path: str, body: Any = None) -> Any:
    """Use the running bus, or the files of a stopped one."""
    data = Path(config.data)
    run = admin.running(data)
    if run is not None:
        return admin.ask(run, method, path, body)
    only_files(config, "changing the accounts of a stopped bus")
    from polybus.edges.node import open_log

    log = open_log(config)
    try:
        file_modes.adopt(data)
        return offline(AccountStore(data, disk=Disk()), log)
    finally:
        log.close()


def _path(name: str) -> str:
    return f"{ACCOUNTS}/{quote(name.lower(), safe='')}"


def _password(from_stdin: bool) -> str:
    if from_stdin:
        return sys.stdin.readline().rstrip("\r\n")
    return ask_password("--password-stdin", twice=True)


def _shared(text: str) -> tuple[str, str]:
    owner, slash, topics = text.lower().partition("/")
    if not slash or not owner or not topics:
        wanted = "OWNER/TOPIC-PATTERN, as in shop/orders.*"
        raise UsageError("account.invalid", f"{text[:80]!r} is not valid; write {wanted}")
    return owner, topics


def end_of(text: str) -> float:
    """A duration from now, or a time, in seconds since 1970. Raises click.BadParameter."""
    try:
        if text[-1:] in UNITS_S:
            return time.time() + float(text[:-1]) * UNITS_S[text[-1]]
        found = datetime.datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=datetime.UTC)).timestamp()
    except ValueError as error:
        raise click.BadParameter(
            f"{text!r} is not a time such as 12h, 30d or 2027-01-01"
        ) from error


def _token_rows(tokens: list[dict[str, Any]]) -> list[list[Any]]:
    def shown(one: dict[str, Any]) -> list[Any]:
        expires = one.get("expires")
        until = expires and datetime.datetime.fromtimestamp(expires, datetime.UTC)
        return [
            one["id"],
            ",".join(one["topics"]) or "all",
            ",".join(one["rights"]) or "all",
            until and until.isoformat(timespec="seconds"),
            one["created"],
        ]

    return [shown(one) for one in tokens]
