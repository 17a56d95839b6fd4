"""`polybus login`: a token for all further commands of this user."""

import sys
from typing import Any

import click
import msgspec

from polybus.cli.common.options import http_url_option
from polybus.cli.common.output import ask_password, say
from polybus.client.http.blocking import opened
from polybus.client.http.connection import JSON
from polybus.client.options import Address, Credentials, parse, stored_tokens, tokens_path
from polybus.errors import UsageError
from polybus.log.disk import replace_file


@click.command(
    epilog="""\b
Examples:
  polybus login shop
  polybus login shop --url https://bus.example:55545
  polybus login --token-stdin < token
  polybus login --out
"""
)
@click.argument("user", required=False)
@click.option("--token-stdin", is_flag=True, help="Store a token from the first line of stdin.")
@click.option(
    "--expires", default="30d", show_default=True, help="Lifetime of the token, such as 12h or 30d."
)
@click.option("--out", is_flag=True, help="Revoke the stored token, and forget it.")
@http_url_option
def login(user: str | None, token_stdin: bool, expires: str, out: bool, url: str) -> None:
    """Log in to an account, for all further commands with the same host and port.

    Asks for the password, and stores a token in the user's config folder, readable by the user
    only. POLYBUS_TOKEN and a user in --url have priority over it.
    """
    address = parse(url)
    if out:
        _log_out(address)
        return
    if token_stdin:
        token = sys.stdin.readline().strip()
        _ask(address, Credentials("", token), "GET", "/v1/topics")
    else:
        from polybus.cli.accounts import end_of

        user = user or click.prompt("User", err=True)
        password = ask_password("--token-stdin")
        wanted = {"expires": end_of(expires)}
        token = _ask(address, Credentials(user, password), "POST", "/v1/tokens", wanted)["token"]
    _store(stored_tokens() | {address.authority: token})
    say(f"logged in to {address.authority}; the token is in {tokens_path()}")


def _log_out(address: Address) -> None:
    """Revoke the stored token, and forget it."""
    tokens = stored_tokens()
    token = tokens.pop(address.authority, None)
    if token is None:
        raise UsageError(
            "auth.needed", f"no login to {address.authority} is stored on this machine"
        )
    _store(tokens)
    identity = token.split("_")[1] if token.count("_") > 1 else ""
    _ask(address, Credentials("", token), "DELETE", f"/v1/tokens/{identity}")
    say(f"logged out of {address.authority}")


def _ask(
    address: Address, credentials: Credentials, method: str, path: str, body: Any = None
) -> Any:
    url = f"{'https' if address.tls else 'http'}://{address.authority}"
    content = None if body is None else msgspec.json.encode(body)
    headers = {"authorization": credentials.authorization, "content-type": JSON}
    with opened(url, method, path, content, headers=headers) as answer:
        found = answer.read()
    return msgspec.json.decode(found) if found else None


def _store(tokens: dict[str, str]) -> None:
    path = tokens_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(path, msgspec.json.format(msgspec.json.encode(tokens)), mode=0o600)
