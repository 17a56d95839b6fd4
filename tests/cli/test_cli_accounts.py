"""`polybus accounts`, through the real command, on a stopped and on a running bus."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path

import pytest
from cli_kit import polybus, serve

from polybus.cli import accounts, login  # noqa: F401

pytestmark = pytest.mark.slow  # each test runs the command many times


def accounts_of(data: Path, *arguments: str, stdin: bytes = b"") -> str:
    done = polybus("accounts", *arguments, "--data", str(data), stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def test_accounts_of_a_stopped_bus_are_managed_in_its_files(tmp_path: Path) -> None:
    data = tmp_path / "new"
    assert accounts_of(data, "create", "Shop", "--password-stdin", stdin=b"first password\n") == (
        "created shop\n"
    )
    accounts_of(data, "create", "office", "--no-password")
    accounts_of(data, "grant", "office", "shop/ord*", "subscribe,publish")
    accounts_of(data, "passwd", "shop", "--password-stdin", stdin=b"second password\n")
    token = accounts_of(data, "token", "create", "office", "--expires", "2h").strip()
    assert re.fullmatch(r"pbt_[0-9a-f]{12}_[\w-]{43}", token)
    found = {one["name"]: one for one in json.loads(accounts_of(data, "list", "--json"))}
    assert set(found) == {"default", "shop", "office"}
    assert found["shop"]["grants"] == [
        {"to": "office", "topics": "ord*", "rights": ["publish", "subscribe"]}
    ]
    (listed,) = json.loads(accounts_of(data, "token", "list", "office", "--json"))
    assert listed["id"] == token.split("_")[1]
    record = data / "accounts" / "shop" / "account.json"
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    for secret in ("first password", "second password", token.split("_", 2)[2]):
        assert secret not in record.read_text() + accounts_of(data, "show", "office", "--json")
    assert "ord*" in accounts_of(data, "show", "shop")
    assert listed["id"] in accounts_of(data, "token", "list", "office")
    accounts_of(data, "token", "revoke", "office", listed["id"])
    accounts_of(data, "revoke", "office", "shop/ord*")
    assert "ord*" not in accounts_of(data, "show", "shop")
    polybus("topics", "create", "shop/orders", "--data", str(data))
    assert (data / "accounts" / "shop" / "topics" / "orders" / "topic.json").exists()
    done = polybus("accounts", "delete", "shop", "--yes", "--data", str(data))
    assert b"account.stopped" in done.stderr
    with serve(data):
        accounts_of(data, "delete", "shop", stdin=b"y\n")
    assert not (data / "accounts" / "shop").exists()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("create", "a/b", "--no-password"), b"account.invalid"),
        (("create", "default", "--no-password"), b"account.invalid"),
        (("show", "nobody"), b"account.unknown"),
        (("grant", "nobody", "default/x", "publish"), b"account.unknown"),
        (("grant", "default", "x", "publish"), b"account.invalid"),
        (("revoke", "default", "default/x"), b"account.no-grant"),
        (("token", "revoke", "default", "x"), b"account.no-token"),
        (("token", "create", "default", "--rights", "all"), b"account.invalid"),
    ],
)
def test_what_cannot_be_done_is_an_error_that_says_why(
    tmp_path: Path, arguments: tuple[str, ...], code: bytes
) -> None:
    polybus("topics", "create", "x", "--data", str(tmp_path))
    done = polybus("accounts", *arguments, "--data", str(tmp_path))
    assert done.returncode != 0
    assert code in done.stderr


def test_a_published_message_reaches_the_account_that_a_topic_is_shared_with(
    tmp_path: Path,
) -> None:
    for name in ("shop", "office"):
        accounts_of(tmp_path, "create", name, "--password-stdin", stdin=b"pw\n")
    accounts_of(tmp_path, "grant", "office", "shop/orders", "subscribe")
    polybus("topics", "create", "shop/orders", "--data", str(tmp_path))
    token = accounts_of(tmp_path, "token", "create", "office").strip()
    with serve(tmp_path) as bus:
        own = bus.url("goms").replace("://", "://shop:pw@")
        done = polybus("publish", "orders", "boots", "--receipt", "--url", own)
        assert done.returncode == 0, done.stderr
        for url, topic, given in (
            (own, "orders", ""),
            (bus.url("boson"), "shop/orders", token),
        ):
            tail = ("tail", topic, "--from", "earliest", "--count", "1", "--url", url)
            done = polybus(*tail, POLYBUS_TOKEN=given)
            assert done.returncode == 0, done.stderr
            assert b"boots" in done.stdout
        wrong = own.replace("pw@", "wrong@")
        done = polybus("publish", "orders", "boots", "--url", wrong)
        assert b"auth.failed" in done.stderr and b"wrong@" not in done.stderr


@pytest.mark.parametrize(
    ("command", "option"),
    [("accounts create shop --data {}", "--password-stdin"), ("login shop", "--token-stdin")],
)
def test_a_script_without_a_password_is_told_the_option(
    tmp_path: Path, command: str, option: str
) -> None:
    done = polybus(*command.format(tmp_path).split())
    assert done.returncode == 2 and b"GetPassWarning" not in done.stderr
    assert f"no terminal for the password; use {option}" in done.stderr.decode()


def test_a_login_is_stored_for_this_user_until_it_is_revoked(tmp_path: Path) -> None:
    data, home = tmp_path / "data", str(tmp_path / "home")
    accounts_of(data, "create", "shop", "--password-stdin", stdin=b"pw\n")
    polybus("topics", "create", "shop/orders", "--data", str(data))
    with serve(data) as bus:
        url = bus.url("http")
        done = polybus("login", "shop", "--url", url, stdin=b"wrong\n", XDG_CONFIG_HOME=home)
        assert b"auth.failed" in done.stderr
        done = polybus("login", "shop", "--url", url, stdin=b"pw\n", XDG_CONFIG_HOME=home)
        assert done.returncode == 0, done.stderr
        stored = tmp_path / "home" / "polybus" / "tokens.json"
        assert stat.S_IMODE(stored.stat().st_mode) == 0o600
        token = json.loads(stored.read_text())[f"127.0.0.1:{bus.port}"]
        for scheme in ("goms", "boson", "http"):
            to = ("publish", "orders", "boots", "--receipt", "--url", bus.url(scheme))
            done = polybus(*to, XDG_CONFIG_HOME=home)
            assert done.returncode == 0, done.stderr
        done = polybus("login", "--out", "--url", url, XDG_CONFIG_HOME=home)
        assert done.returncode == 0, done.stderr
        assert json.loads(stored.read_text()) == {}
        done = polybus("login", "--token-stdin", "--url", url, stdin=token.encode())
        assert b"auth.failed" in done.stderr
        assert json.loads(accounts_of(data, "token", "list", "shop", "--json")) == []
