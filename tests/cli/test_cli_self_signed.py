"""`polybus serve --tls-self-signed`: a certificate to try TLS with, and how clients trust it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_kit import COMMAND, environment, polybus
from docs_kit import run_by

import polybus as library
from polybus.cli.serve import self_signed
from polybus.config import Config, Connector, Http, Tls
from polybus.config_file import check
from polybus.errors import ConfigError, PolybusError
from polybus.log import file_modes

BEGIN, COMMANDS, PROGRAM, SENSOR = [
    block.text for block in run_by("cli/test_cli_self_signed.py", "docs/howto/secure.md")
]
INSTALL, SERVE = BEGIN.splitlines()


@contextlib.contextmanager
def served(data: Path) -> Iterator[tuple[int, str]]:
    """The port of a bus with the certificate, and what it said on standard error."""
    with subprocess.Popen(
        [*COMMAND, *shlex.split(SERVE)[1:], *("--port", "0", "--topic", "news")]
        + ["--data", str(data)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            ready = process.stdout.readline().decode()
            found = re.search(r"ready.*?tcp://127\.0\.0\.1:(\d+)", ready)
            assert found, ready
            said = b"".join(process.stderr.readline() for _ in range(6)).decode()
            yield int(found[1]), said
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0


def fingerprint_of(port: int) -> str:
    der = ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", port)))
    return hashlib.sha256(der).hexdigest()


async def publish(port: int, ca_file: Path | None) -> None:
    for scheme in ("boson+tls", "goms+tls", "wss"):
        for host in ("localhost", "127.0.0.1"):
            async with library.connect(f"{scheme}://{host}:{port}", ca_file=ca_file) as client:
                assert await client.publish("news", "1", receipt=True) is not None


def follow_the_page(cert: Path, port: int, fingerprint: str) -> None:
    """The commands and the program of docs/howto/secure.md, with a copy of the certificate."""
    folder = cert.parent.parent / "client"
    folder.mkdir()
    shutil.copy(cert, folder)
    # The certificate of a sensor is one like that of the bus.
    shutil.copy(cert, folder / "sensor-cert.pem")
    shutil.copy(cert.with_name("key.pem"), folder / "sensor-key.pem")
    done = subprocess.run(
        ["bash", "-e", "-c", f"{INSTALL} --quiet\n{COMMANDS.replace('55545', str(port))}"],
        cwd=folder,
        # What the tests need is installed, so nothing is fetched.
        env=environment(
            PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", PIP_NO_INDEX="1"
        ),
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert fingerprint in done.stdout and done.stdout.endswith("\nok\n")
    program = textwrap.indent(PROGRAM.replace("55545", str(port)) + SENSOR, "    ")
    text = f"import asyncio, polybus\nasync def main():\n{program}asyncio.run(main())\n"
    subprocess.run([sys.executable, "-c", text], cwd=folder, env=environment(), check=True)


def test_the_certificate_is_shown_trusted_and_kept(tmp_path: Path) -> None:
    cert, key = tmp_path / "tls" / "cert.pem", tmp_path / "tls" / "key.pem"
    with served(tmp_path) as (port, said):
        shown = re.search(r"SHA-256 fingerprint: ([0-9A-F:]+)\n", said)
        assert shown and shown[1].replace(":", "").lower() == fingerprint_of(port)
        for advice in (f'ca_file="{cert}"', f"SSL_CERT_FILE={cert}", f"--cacert {cert}"):
            assert advice in said
        assert [os.stat(one).st_mode & 0o777 for one in (cert, key)] == [0o600, 0o600]
        asyncio.run(publish(port, cert))
        with pytest.raises(PolybusError, match="client.unreachable.*TLS.*ca_file"):
            asyncio.run(publish(port, None))
        command = ("publish", "news", "2", "--url", f"goms+tls://localhost:{port}")
        assert polybus(*command).returncode == 1
        follow_the_page(cert, port, shown[1])
        # Without TLS it works as before.
        assert polybus("publish", "news", "3", "--url", f"goms://localhost:{port}").returncode == 0
    before = cert.read_bytes()
    with served(tmp_path) as (port, _):
        assert cert.read_bytes() == before


def config(data: Path) -> Config:
    data.mkdir(exist_ok=True)
    made = Config(data=str(data), http=Http(hosts=["bus.example", "[2001:db8::7]"]))
    check(made)
    return made


def test_a_certificate_that_has_expired_or_lost_its_key_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = config(tmp_path)
    cert, key = tmp_path / "tls" / "cert.pem", tmp_path / "tls" / "key.pem"
    with monkeypatch.context() as patched:
        patched.setattr(self_signed, "VALID_DAYS", 0)
        self_signed.make(bus)
    expired = cert.read_bytes()
    self_signed.make(bus)
    made = cert.read_bytes()
    assert made != expired
    self_signed.make(bus)
    assert cert.read_bytes() == made
    key.unlink()
    self_signed.make(bus)
    assert cert.read_bytes() != made


def test_the_key_stays_private_with_group_access(tmp_path: Path) -> None:
    self_signed.make(config(tmp_path))
    file_modes.prepare(tmp_path, group=False)
    file_modes.prepare(tmp_path, group=True)
    assert os.stat(tmp_path).st_mode & 0o070
    assert os.stat(tmp_path / "tls" / "key.pem").st_mode & 0o777 == 0o600


def test_the_certificate_is_valid_by_the_strictest_rules_for_all_names(tmp_path: Path) -> None:
    self_signed.make(config(tmp_path))
    cert = str(tmp_path / "tls" / "cert.pem")
    for name in ("-verify_hostname=bus.example", "-verify_ip=2001:db8::7", "-verify_ip=127.0.0.1"):
        command = ["openssl", "verify", "-x509_strict", "-CAfile", cert, *name.split("="), cert]
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0, name


def test_queues_udp_and_connectors_with_their_own_keep_their_settings() -> None:
    own = Tls(cert="c", key="k")
    before = [
        Connector(),
        Connector(protocol="udp", speaks="goms"),
        Connector(speaks="queue", topic="news"),
        Connector(tls=own),
        Connector(ip="0.0.0.0"),
    ]
    after = self_signed.with_tls(Config(data="d", connectors=before)).connectors
    assert after[0].tls == Tls(cert="d/tls/cert.pem", key="d/tls/key.pem")
    assert after[1:4] == before[1:4]
    # Beyond this machine nobody sends a password in the clear.
    assert after[4].tls == Tls(cert="d/tls/cert.pem", key="d/tls/key.pem", required=True)


def test_without_its_package_the_option_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match="tls.no-cryptography"):
        self_signed.make(config(tmp_path))
