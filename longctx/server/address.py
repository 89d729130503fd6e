"""Where the server listens: bound before anything is imported or loaded, so that a taken port is told at once."""

from __future__ import annotations

import socket

from longctx.errors import LongctxError

BACKLOG = 1024


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; `LongctxError` for an address that cannot be used."""
    where = f"{host}:{port}" if ":" not in host else f"[{host}]:{port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise LongctxError(f"cannot listen on {host!r}: no such address ({error}); give --host another one") from error
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise LongctxError(f"cannot listen on {where}: {error.strerror}; give another --port or --host") from error
    sock.setblocking(False)
    return sock


def url_of(sock: socket.socket) -> str:
    """The address that a client on this machine can use."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
