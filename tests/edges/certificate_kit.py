"""Certificates for tests: authorities, and what they sign."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

VALID = datetime.timedelta(days=2)


class Authority:
    """Signs certificates; `path` is its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._builder(self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(_pem(certificate.sign(self._key, hashes.SHA256())))

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - VALID)
            .not_valid_after(now + VALID)
        )

    def sign(self, *names: str, password: bytes | None = None) -> tuple[Path, Path]:
        """A certificate with these common names, for localhost too, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names])
        alternative = x509.SubjectAlternativeName([x509.DNSName("localhost")])
        builder = self._builder(subject, key).add_extension(alternative, critical=False)
        stem = "-".join(names) or "nobody"
        cert, key_path = self._folder / f"{stem}-cert.pem", self._folder / f"{stem}-key.pem"
        cert.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))
        encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password is not None:
            encryption = serialization.BestAvailableEncryption(password)
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
            )
        )
        return cert, key_path


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
