"""No secret is an argument of a command, where everybody on the machine sees it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from polybus.cli import main
from polybus.client.options import Credentials, parse
from polybus.errors import UsageError


def options(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    """Every option that takes a value, of a command and those below it."""
    for one in command.params:
        if isinstance(one, click.Option) and not one.is_flag:
            yield from ((context.command_path, name) for name in one.opts)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from options(found, click.Context(found, parent=context, info_name=name))


def test_no_option_takes_a_secret() -> None:
    found = list(options(main, click.Context(main, info_name="polybus")))
    assert ("polybus pipeline run", "--token-file") in found
    secrets = [one for one in found if one[1] in ("--token", "--password", "--secret", "--key")]
    assert secrets == []


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("POLYBUS_URL", "POLYBUS_TOKEN", "POLYBUS_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def test_a_password_in_an_argument_is_warned_of_and_not_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = "boson://shop:secret@127.0.0.1:1"
    for verb in (["publish", "news", "x"], ["sessions", "delete", "x"], ["replay", "news"]):
        argued = CliRunner().invoke(main, [*verb, "--url", url.replace("boson", "http")])
        assert argued.output.count("warning: every user of this machine") == 1
        assert "secret" not in argued.output
        plain = CliRunner().invoke(main, [*verb, "--url", "http://127.0.0.1:1"])
        assert "warning" not in plain.output
    monkeypatch.setenv("POLYBUS_URL", url)
    assert "warning" not in CliRunner().invoke(main, ["publish", "news", "x"]).output


def test_a_file_has_the_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("pbt_1_x\n")
    monkeypatch.setenv("POLYBUS_TOKEN_FILE", str(path))
    assert parse("boson://127.0.0.1").credentials == Credentials("", "pbt_1_x")
    assert parse("queue://127.0.0.1:1").credentials is None
    monkeypatch.setenv("POLYBUS_TOKEN", "pbt_2_y")
    assert parse("boson://127.0.0.1").credentials == Credentials("", "pbt_2_y")
    monkeypatch.delenv("POLYBUS_TOKEN")
    for content in (b"", b"pbt_3 pbt_4", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"client\.token-file") as caught:
            parse("boson://127.0.0.1")
        assert "pbt_3" not in caught.value.text
    path.unlink()
    with pytest.raises(UsageError, match=r"client\.token-file"):
        parse("boson://127.0.0.1")
    done = CliRunner().invoke(main, ["pipeline", "check", "--token-file", str(path)])
    assert done.exit_code == 2 and "client.token-file" in done.output
