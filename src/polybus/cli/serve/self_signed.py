"""`polybus serve --tls-self-signed`: a certificate in the data folder, to try TLS with.

No authority vouches for it: a client trusts its file, after comparing the fingerprint.
"""

import datetime
import hashlib
import ipaddress
import ssl
from pathlib import Path

import click
import msgspec

from polybus.config import Config, Tls
from polybus.edges.tcp.certificates import tls_context
from polybus.errors import ConfigError
from polybus.log.disk import replace_file
from polybus.log.layout import certificate_path, private_key_path
from polybus.services.accounts.accounts import is_loopback

VALID_DAYS = 365
NAMES = ("localhost", "127.0.0.1", "::1")
ANY_ADDRESS = ("", "0.0.0.0", "::")


def with_tls(config: Config) -> Config:
    """The settings with the certificate on every connector that has none.

    Beyond loopback TLS is required then: passwords go over the network. Not on queue connectors:
    their clients could no longer connect without TLS.
    """
    data = Path(config.data)
    cert, key = str(certificate_path(data)), str(private_key_path(data))
    connectors = [
        msgspec.structs.replace(one, tls=Tls(cert=cert, key=key, required=not is_loopback(one.ip)))
        if one.tls is None and one.protocol == "tcp" and "queue" not in one.protocols
        else one
        for one in config.connectors
    ]
    return msgspec.structs.replace(config, connectors=connectors)


def make(config: Config) -> None:
    """Create the certificate, unless the data folder has one that is valid.

    Raises:
        ConfigError: `tls.no-cryptography`.
        OSError: it cannot be written.
    """
    data = Path(config.data)
    cert, key = certificate_path(data), private_key_path(data)
    addresses = [one.ip for one in config.connectors if one.ip not in ANY_ADDRESS]
    names = dict.fromkeys([*NAMES, *addresses, *config.http.hosts])
    try:
        if _is_usable(cert, key):
            return
        cert_pem, key_pem = _sign(list(names))
    except ImportError as error:
        text = "--tls-self-signed needs the package cryptography, which is not installed"
        raise ConfigError("tls.no-cryptography", text) from error
    cert.parent.mkdir(mode=0o700, exist_ok=True)
    # A crash between them leaves two that do not match; the next start makes both again.
    replace_file(key, key_pem, mode=0o600)
    replace_file(cert, cert_pem, mode=0o600)


def show(config: Config, port: int) -> None:
    """Print on standard error which certificate it is, and how clients can trust it."""
    cert = certificate_path(Path(config.data))
    digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(cert.read_text())).hexdigest().upper()
    fingerprint = ":".join(digest[at : at + 2] for at in range(0, len(digest), 2))
    click.echo(
        f"self-signed certificate: {cert}\n"
        f"SHA-256 fingerprint: {fingerprint}\n"
        "Clients trust it by its file:\n"
        f'  polybus.connect("boson+tls://localhost:{port}", ca_file="{cert}")\n'
        f"  SSL_CERT_FILE={cert} polybus tail TOPIC --url goms+tls://localhost:{port}\n"
        f"  curl --cacert {cert} https://localhost:{port}/healthz",
        err=True,
    )


def _is_usable(cert: Path, key: Path) -> bool:
    if not cert.exists():
        return False
    try:
        tls_context(Tls(cert=str(cert), key=str(key)))
    except ConfigError:
        return False
    from cryptography import x509

    ends = x509.load_pem_x509_certificate(cert.read_bytes()).not_valid_after_utc
    return ends > datetime.datetime.now(datetime.UTC)


def _sign(names: list[str]) -> tuple[bytes, bytes]:
    """A certificate for these names and addresses, and its key, in PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "polybus self-signed")])
    alternatives: list[x509.GeneralName] = []
    for name in names:
        try:
            alternatives.append(x509.IPAddress(ipaddress.ip_address(name.strip("[]"))))
        except ValueError:
            alternatives.append(x509.DNSName(name.encode("idna").decode()))
    now = datetime.datetime.now(datetime.UTC)
    server = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    certificate = (
        x509.CertificateBuilder(subject_name=subject, issuer_name=subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        # Clocks differ.
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(server, critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private
