"""TLS from files that are read again when they change, so that a renewed certificate needs no restart."""

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from sharp.core.file_watch import signature, watch
from sharp.core.regular_file import read_regular_file
from sharp.serving.api.errors import InputError
from sharp.serving.config import TlsConfig

logger = logging.getLogger(__name__)

HANDSHAKE_ROUNDS = 4
MOST_BYTES = 2**20  # of a certificate or key file
VALIDITY_PROBLEMS = {9: "is not valid yet", 10: "has expired"}  # X509_V_ERR_* of OpenSSL


@dataclass(frozen=True)
class _Material:
    cert: bytes
    key: bytes
    client_ca: bytes | None
    context: ssl.SSLContext


class Tls:
    """The certificates of both ports. New connections get what the files hold now, unless that cannot be used."""

    def __init__(self, config: TlsConfig) -> None:
        """Read the files.

        Raises:
            InputError: a file is missing or no PEM, or certificate and key do not belong together.
        """
        self.config = config
        before = signature(config.files)
        self._material = _read(config)
        watch(self, before)

    def http_context(self) -> ssl.SSLContext:
        """Return a context that hands each new connection over to the newest context."""
        context = _context(self.config)

        def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            """Let a new connection use the newest certificate."""
            connection.context = self._material.context

        context.sni_callback = choose  # called for every handshake, with or without a name
        return context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return credentials that take a new certificate at the next handshake."""
        served = self._material

        def fetch() -> Any | None:
            """Return the newest certificate for gRPC; None if it did not change."""
            nonlocal served
            newest = self._material
            if newest is served:
                return None
            served = newest
            return _grpc_configuration(newest)

        return grpc.dynamic_ssl_server_credentials(
            _grpc_configuration(served),
            fetch,  # type: ignore[arg-type]  # None means no change, which the stubs do not know
            require_client_authentication=self.config.client_ca is not None,
        )

    @property
    def watched(self) -> tuple[Path, ...]:
        """The files of the certificate, of its key and of the clients' authorities."""
        return self.config.files

    def reload(self) -> None:
        """Read the files again. If they cannot be used, new connections still get the old certificate."""
        try:
            self._material = _read(self.config)
            logger.info("TLS: %s was read again", self.config.cert)
        except InputError as error:  # the file may be half-written; its next change is read again
            logger.warning("TLS: %s; new connections still get the old certificate", error)


def _read(config: TlsConfig) -> _Material:
    """Read and check certificate, key and CA.

    InputError if they cannot be used; one that is not valid now is logged.
    """
    context = _context(config)
    if problem := _validity_problem(config):
        logger.warning("TLS: the certificate %s %s; clients will refuse it", config.cert, problem)
    return _Material(
        read_regular_file(config.cert, MOST_BYTES),
        read_regular_file(config.key, MOST_BYTES),
        None if config.client_ca is None else read_regular_file(config.client_ca, MOST_BYTES),
        context,
    )


def _context(config: TlsConfig) -> ssl.SSLContext:
    """Return Python's TLS context of the files. InputError if one is missing or cannot be used."""
    for file in config.files:
        if not file.is_file():
            raise InputError(f"the TLS file {file} does not exist; correct the path")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.cert, config.key, password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise InputError(
            f"{config.cert} and {config.key} cannot be used: they must be a PEM certificate chain and its key, without "
            f"a password ({_reason(error)})"
        ) from error
    if config.client_ca is not None:
        try:
            context.load_verify_locations(config.client_ca)
        except (ssl.SSLError, OSError) as error:
            raise InputError(
                f"{config.client_ca} cannot be used: it must hold PEM certificates ({_reason(error)})"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _validity_problem(config: TlsConfig) -> str:
    """Return why a client would refuse the certificate by its dates; empty if it would not.

    This is found out by a handshake in memory, because Python has no other public way to ask OpenSSL.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(config.cert, config.key, password=_no_password)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trust the certificate whoever issued it
    client.load_verify_locations(config.cert)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(HANDSHAKE_ROUNDS):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return VALIDITY_PROBLEMS.get(error.verify_code, "")
            except ssl.SSLError:
                return ""
    return ""


def _no_password() -> str:
    """Raise ValueError when OpenSSL asks for a key's password."""
    raise ValueError("the key is encrypted")  # otherwise OpenSSL asks the terminal


def _reason(error: Exception) -> str:
    """Return OpenSSL's reason for an error, or the error's text."""
    return str(getattr(error, "reason", None) or error)


def _grpc_configuration(material: _Material) -> Any:
    """Return certificate, key and CA as gRPC takes them."""
    return grpc.ssl_server_certificate_configuration(
        [(material.key, material.cert)], root_certificates=material.client_ca
    )
