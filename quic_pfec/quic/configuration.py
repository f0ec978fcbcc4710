"""The QUIC configuration of both sides, from file names and plain options."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path

from aioquic.quic.configuration import SMALLEST_MAX_DATAGRAM_SIZE, QuicConfiguration
from aioquic.quic.logger import QuicFileLogger
from cryptography import x509

from quic_pfec.quantities import described
from quic_pfec.wire.errors import LocalError
from quic_pfec.wire.messages import MAX_CREDENTIAL

__all__ = ["ALPN", "MAX_DATAGRAM_SIZE", "check_token", "configuration"]

ALPN = "pfec/1"
MAX_DATAGRAM_SIZE = 1452
"""UDP payload that fits IPv4 and IPv6 at an MTU of 1,500: one symbol with 1,368 bytes of KV and a REPAIR's bitmap."""


def configuration(
    *,
    is_client: bool,
    alpn: Sequence[str] = (ALPN,),
    ca_certs: str | None = None,
    insecure: bool = False,
    server_name: str | None = None,
    certificate: tuple[str, str] | None = None,
    client_ca: str | None = None,
    congestion_control: str = "cubic",
    idle_timeout_s: float = 30.0,
    max_datagram_size: int = MAX_DATAGRAM_SIZE,
    max_data: int = 16 << 20,
    max_stream_data: int = 8 << 20,
    secrets_log: str | None = None,
    quic_log: str | None = None,
) -> QuicConfiguration:
    """A configuration for `listen` or `open_connection`.

    ca_certs: PEM file that a client trusts (default: the certifi bundle). insecure: verify nothing. certificate:
    (chain, key) PEM files, required for a server, for mutual TLS on a client. client_ca: PEM file; a server then admits
    only clients with a certificate signed by it. idle_timeout_s: RFC 9308 §3.2 suggests at least 30 s.
    max_datagram_size: 1200..65527; an endpoint takes less for an address whose route carries less (see `route`).
    max_data, max_stream_data: initial flow control in bytes; only streams are under it. secrets_log: TLS secrets are
    appended to this file, for analysis of tests only. quic_log: an existing folder for qlog files.

    Raises `LocalError` for contradictions and files that are not what they should be, OSError for files that are not
    there or cannot be read.
    """
    if not SMALLEST_MAX_DATAGRAM_SIZE <= max_datagram_size <= 65527:
        raise LocalError(f"max_datagram_size must be {SMALLEST_MAX_DATAGRAM_SIZE} to 65527, not {max_datagram_size}")
    if not idle_timeout_s > 0:
        raise LocalError("idle_timeout_s must be positive")
    if is_client and client_ca is not None:
        raise LocalError("client_ca is an option of the server")
    if not is_client and certificate is None:
        raise LocalError("a server needs a certificate and its key")
    if not is_client and (insecure or ca_certs is not None or server_name is not None):
        raise LocalError("insecure, ca_certs and server_name are options of the client")
    result = QuicConfiguration(
        alpn_protocols=list(alpn),
        congestion_control_algorithm=congestion_control,
        idle_timeout=idle_timeout_s,
        is_client=is_client,
        max_data=max_data,
        max_datagram_size=max_datagram_size,
        max_stream_data=max_stream_data,
        server_name=server_name,
    )
    if insecure:
        result.verify_mode = ssl.CERT_NONE
    authorities = ca_certs if is_client else client_ca
    if authorities is not None:
        _read_certificates(authorities, "file of authorities")
        result.load_verify_locations(cafile=authorities)
    if certificate is not None:
        _read_certificates(certificate[0], "certificate")
        try:
            result.load_cert_chain(*certificate)
        except (ValueError, TypeError) as error:  # TypeError: a key under a password
            raise LocalError(f"{certificate[1]} is no private key in PEM without a password: {_first(error)}") from None
        except OSError as error:
            raise OSError(f"the private key {certificate[1]} cannot be read: {error.strerror}") from None
        _check_key(result, certificate)
    if secrets_log is not None:
        result.secrets_log_file = open(secrets_log, "a", encoding="ascii")  # noqa: SIM115  as long as the process
    if quic_log is not None:
        result.quic_logger = QuicFileLogger(quic_log)
    return result


def _read_certificates(path: str, what: str) -> None:
    """Raises `LocalError` unless the file holds certificates, which aioquic would find out in the handshake at best;
    OSError if it cannot be read."""
    try:
        x509.load_pem_x509_certificates(Path(path).read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(f"the {what} {path} does not exist") from None
    except OSError as error:
        raise OSError(f"the {what} {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise LocalError(
            f"the {what} {path} holds no certificate in PEM, which begins with '-----BEGIN CERTIFICATE-----' "
            f"(`quic-pfec cert` writes cert.pem): {_first(error)}"
        ) from None


def _first(error: Exception) -> str:
    """The first sentence of a library's phrase, which may go on with links."""
    return str(error).partition(". ")[0]


def _check_key(result: QuicConfiguration, names: tuple[str, str]) -> None:
    """A key of another certificate would only show as a failed handshake, far from its cause."""
    loaded, key = result.certificate, result.private_key
    if loaded is None or key is None or loaded.public_key() != key.public_key():
        raise LocalError(f"the private key {names[1]} does not belong to the certificate {names[0]}")


def check_token(token: object) -> None:
    """Raises `LocalError` for a credential that OPEN cannot carry, or an empty one, which would admit everybody."""
    if token is not None and (not isinstance(token, str) or not 0 < len(token) <= MAX_CREDENTIAL):
        given = f"{len(token)} of them" if isinstance(token, str) else described(token)
        raise LocalError(f"token is a text of 1 to {MAX_CREDENTIAL} characters, not {given}")
