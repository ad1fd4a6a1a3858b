"""Messages between the supervisors of several machines: lines of JSON over TCP, between sides that know one secret."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
from typing import Any

from cornstarch.errors import ConfigError

TOKEN = "CORNSTARCH_TOKEN"
"""The environment variable with the secret of a run, the same on all of its machines."""
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
_LONGEST = 1 << 20  # bytes of a message
_SEND_SECONDS = 10.0
# A machine that is gone without a word, or behind a cut cable, is noticed after 5 + 3 × 2 seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 11_000}

Message = dict[str, Any]


class LineSocket:
    """A connection that sends and receives messages, one line each."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._received = b""
        connection.settimeout(_SEND_SECONDS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, **message: Any) -> None:
        """Send a message; OSError if the other side is gone."""
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message]:
        """Return the messages that have arrived; wait for some bytes if none have. OSError at the end."""
        data = self.connection.recv(1 << 16)
        if not data:
            raise ConnectionResetError("the connection was closed")
        *lines, self._received = (self._received + data).split(b"\n")
        if len(self._received) > _LONGEST:
            raise ConnectionResetError("a message is too long")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            raise ConnectionResetError("a message is no JSON") from None
        if not all(isinstance(message, dict) for message in messages):
            raise ConnectionResetError("a message is no object")
        return messages

    def receive_one(self) -> Message:
        """Wait for one message, during the handshake."""
        while not (messages := self.receive()):
            pass
        return messages[0]

    def close(self) -> None:
        self.connection.close()


def make_nonce() -> str:
    return secrets.token_hex(16)


def sign(token: str, *parts: str) -> str:
    """Return what only a side that knows the token can compute; the token itself never travels."""
    return hmac.new(token.encode(), "\n".join(parts).encode(), hashlib.sha256).hexdigest()


def is_signature(token: str, signature: object, *parts: str) -> bool:
    return isinstance(signature, str) and hmac.compare_digest(sign(token, *parts), signature)


def parse_address(master: str) -> tuple[str, int]:
    """Return host and port of `--master`."""
    host, _, port = master.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"--master {master}: expected the first machine's name and a port, such as node-0:29500.")
    return host.strip("[]"), int(port)


def check_token(host: str, token: str) -> None:
    """Refuse a run over a network without a secret: anybody there could end it, or take part in it."""
    if not token and host not in LOOPBACK_HOSTS:
        raise ConfigError(
            f"--master {host}: machines that start a run together must share a secret. Set {TOKEN} to the same random "
            "text on all of them, for example of `openssl rand -hex 16`."
        )
