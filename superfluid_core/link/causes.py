"""Why a handshake failed, in words for a person, as far as either end can know.

A head with another key notices at the node's certificate and leaves, so the node sees no more than a reset. A node that
dislikes the head's certificate says so by an alert, which reaches the head after its own handshake succeeded. Never a
secret in these texts: keys are named by their id. An errno is only called a failed connection when it came from connecting:
the same class of exception also carries faults of this machine, such as a descriptor that the event loop no longer knows.
"""

from __future__ import annotations

import os
import socket
import ssl
from enum import Enum

from superfluid_core.errors import ErrorCode, SuperfluidError
from superfluid_core.link.link import LinkClosedError
from superfluid_core.link.tls import Credentials

# numbers of OpenSSL's verification results
_ANOTHER_KEY = (2, 18, 19, 20, 21, 7)
_NOT_YET, _EXPIRED, _PURPOSE = 9, 10, 26

_ALERTS = {
    "UNKNOWN_CA": "it trusts another key",
    "UNSUPPORTED_CERTIFICATE": "it does not accept our certificate's role",
    "CERTIFICATE_EXPIRED": "it holds our certificate for expired",
    "BAD_CERTIFICATE": "it does not accept our certificate",
    "CERTIFICATE_REQUIRED": "it wants a certificate",
    "PROTOCOL_VERSION": "it speaks another version of TLS",
    "NO_APPLICATION_PROTOCOL": "it does not speak the link's protocol",
    "HANDSHAKE_FAILURE": "it found nothing in common in TLS",
}


class Stage(Enum):
    """What was being done when it failed."""

    CONNECT = "connect"
    HANDSHAKE = "handshake"


def why_dial_failed(
    error: BaseException, keys: Credentials | None, stage: Stage = Stage.HANDSHAKE
) -> tuple[str, ErrorCode]:
    """Explain to the head. TLS sees the node; `keys` None is a head without a key."""
    if stage is Stage.CONNECT or isinstance(error, TimeoutError):
        return _why_not_connected(error)
    if isinstance(error, LinkClosedError):
        if error.cause is not None:
            return why_dial_failed(error.cause, keys)
        return _closed_early(error.reason, keys)
    if isinstance(error, ssl.SSLError):
        return _tls_failure(error, keys)
    if isinstance(error, SuperfluidError):
        return f"refused at the handshake: {error.message}", error.code
    if isinstance(error, ConnectionError):
        return _closed_early("the connection was reset", keys)
    if isinstance(error, OSError):
        return f"the connection broke in the handshake: {_errno_words(error)}", ErrorCode.NO_WORKER
    return f"failed: {type(error).__name__}", ErrorCode.INTERNAL


def why_join_failed(error: BaseException, stage: Stage, *, has_key: bool) -> tuple[str, ErrorCode]:
    """Explain to a node that dialled a head."""
    if stage is Stage.CONNECT:
        return _why_not_connected(error)
    code = error.code if isinstance(error, SuperfluidError) else ErrorCode.NO_WORKER
    words = why_refused(error, has_key=has_key)
    return words if words.startswith("peer reset") else f"refused at the handshake: {words}", code


def why_unresolved(error: BaseException) -> str:
    """Explain why a name has no address, in the resolver's words where it has any."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, socket.gaierror):
        unknown = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
        return "no such name" if error.errno in unknown else str(error.strerror or "failed")
    return "no such name" if isinstance(error, UnicodeError) else _errno_words(error)


def _why_not_connected(error: BaseException) -> tuple[str, ErrorCode]:
    """Judge a failure of connecting. Errors that connecting cannot have are ours, and said to be."""
    if isinstance(error, TimeoutError):
        return "timed out", ErrorCode.TIMEOUT
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: nothing listens there", ErrorCode.NO_WORKER
    if isinstance(error, FileNotFoundError | FileExistsError | ValueError):
        what = f"{type(error).__name__}: {_errno_words(error)}"
        return f"a fault of this process while connecting ({what})", ErrorCode.INTERNAL
    return f"cannot connect: {_errno_words(error)}", ErrorCode.NO_WORKER


def _errno_words(error: BaseException) -> str:
    """Say what the number means: asyncio puts words of its own, with the address, into `strerror`."""
    number = getattr(error, "errno", None)
    return os.strerror(number) if isinstance(number, int) and number > 0 else str(error)[:200]


def _closed_early(reason: str, keys: Credentials | None) -> tuple[str, ErrorCode]:
    hint = (
        "it may want a fleet key, and this head has none"
        if keys is None
        else "it may be no Superfluid node, or run without a key"
    )
    return f"closed before WELCOME ({reason}): {hint}", ErrorCode.NO_WORKER


def _tls_failure(error: ssl.SSLError, keys: Credentials | None) -> tuple[str, ErrorCode]:
    ours = "" if keys is None else f" (ours: key {keys.key_id})"
    refused = "refused at the handshake:"
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _ANOTHER_KEY:
            return f"{refused} it trusts another key{ours}", ErrorCode.UNAUTHORIZED
        return f"{refused} {_bad_certificate(error, 'node')}", ErrorCode.UNAUTHORIZED
    reason = error.reason or ""
    for alert, words in _ALERTS.items():
        if "ALERT" in reason and alert in reason:
            return f"{refused} {words}{ours}", ErrorCode.UNAUTHORIZED
    if reason in ("WRONG_VERSION_NUMBER", "UNSUPPORTED_PROTOCOL", "HTTP_REQUEST"):
        words = "it answers without TLS 1.3: it runs without a key, or is no Superfluid node"
        return f"{refused} {words}", ErrorCode.PROTOCOL_ERROR
    if "EOF" in reason:
        return _closed_early("the connection ended", keys)
    return f"{refused} TLS failed ({reason or 'no reason given'})", ErrorCode.PROTOCOL_ERROR


def _bad_certificate(error: ssl.SSLCertVerificationError, role: str) -> str:
    if error.verify_code == _PURPOSE:
        return f"its certificate is not that of a {role}"
    if error.verify_code == _EXPIRED:
        return "its certificate has expired"
    if error.verify_code == _NOT_YET:
        return "its certificate is not valid yet"
    return f"its certificate does not verify ({error.verify_message})"


def why_refused(error: BaseException, *, has_key: bool) -> str:
    """Explain to the node why a handshake did not come to WELCOME."""
    if isinstance(error, LinkClosedError):
        if error.cause is not None and not isinstance(error.cause, SuperfluidError):
            return why_refused(error.cause, has_key=has_key)
        return error.reason
    if isinstance(error, ssl.SSLError):
        return _tls_refusal(error)
    if isinstance(error, SuperfluidError):
        return error.message
    if isinstance(error, TimeoutError):
        return "no WELCOME came about within the handshake deadline"
    if isinstance(error, ConnectionError):
        if has_key:
            return "peer reset during the handshake, usually another key"
        return "peer reset during the handshake"
    if isinstance(error, OSError):
        return f"connection failed: {error.strerror or error}"
    return f"failed: {type(error).__name__}"


def _tls_refusal(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _ANOTHER_KEY:
            return "its certificate is signed by another key"
        return _bad_certificate(error, "head")
    reason = error.reason or ""
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_MESSAGE", "RECORD_TOO_SMALL"):
        return "it does not speak TLS: a head without a key, or no head at all"
    if reason in ("UNSUPPORTED_PROTOCOL", "NO_SHARED_CIPHER"):
        return "it does not speak TLS 1.3"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it shows no certificate"
    if "ALERT" in reason or "EOF" in reason:
        return "peer reset during the handshake, usually another key"
    return f"TLS failed ({reason or 'no reason given'})"
