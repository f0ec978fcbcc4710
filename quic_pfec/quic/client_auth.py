"""Mutual TLS for a server: aioquic can ask for a client certificate but neither insists on one nor checks its chain."""

from __future__ import annotations

from aioquic import tls
from aioquic.quic.connection import QuicConnectionError
from aioquic.quic.packet import QuicErrorCode, QuicFrameType

from quic_pfec.quic.observable import ObservableConnection

__all__ = ["ClientAuthConnection"]

CERTIFICATE_REQUIRED = 116  # RFC 8446 §6.2; aioquic has no name for it


class ClientAuthConnection(ObservableConnection):
    """A server whose configuration names authorities (`load_verify_locations`) admits only clients they signed.

    Others are closed with CRYPTO_ERROR when their handshake completes, before any of their 1-RTT data is read.
    """

    @property
    def _client_authorities(self) -> bool:
        configuration = self._configuration
        return not self._is_client and bool(configuration.cafile or configuration.cadata or configuration.capath)

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        self.tls._request_client_certificate = self._client_authorities

    def _confirm_handshake(self) -> None:
        if self._client_authorities:
            certificate, configuration = self.tls._peer_certificate, self._configuration
            if certificate is None:
                raise _refused(CERTIFICATE_REQUIRED, "a client certificate is required")
            try:
                tls.verify_certificate(
                    certificate,
                    self.tls._peer_certificate_chain,
                    cadata=configuration.cadata,
                    cafile=configuration.cafile,
                    capath=configuration.capath,
                )
            except tls.Alert as alert:
                raise _refused(int(alert.description), str(alert)) from alert
        super()._confirm_handshake()


def _refused(alert: int, reason: str) -> QuicConnectionError:
    return QuicConnectionError(QuicErrorCode.CRYPTO_ERROR + alert, QuicFrameType.CRYPTO, reason)
