"""Addresses as people write them: a host, with or without a port."""

from __future__ import annotations

from distbelief.cli.failures import UsageError


def listen_address(text: str) -> str:
    """Where to listen, for the coordinator. Without a port, any that is free.

    >>> listen_address("10.0.0.1"), listen_address("10.0.0.1:5555"), listen_address("::1"), listen_address("[::1]:5555")
    ('tcp://10.0.0.1:*', 'tcp://10.0.0.1:5555', 'tcp://[::1]:*', 'tcp://[::1]:5555')
    """
    host, port = _split(text)
    return f"tcp://{_bracketed(host)}:{port or '*'}"


def join_address(text: str) -> str:
    """Where a coordinator listens that is to be joined.

    >>> join_address("node1:5555"), join_address("tcp://10.0.0.1:5555")
    ('tcp://node1:5555', 'tcp://10.0.0.1:5555')
    """
    host, port = _split(text)
    if not port:
        raise UsageError(
            f"{text!r} has no port", hint="give the address that the coordinator printed, as 10.0.0.1:5555"
        )
    return f"tcp://{_bracketed(host)}:{port}"


def _split(text: str) -> tuple[str, str]:
    rest = text.removeprefix("tcp://")
    if rest.startswith("["):
        host, _, port = rest[1:].partition("]")
        port = port.removeprefix(":")
    elif rest.count(":") > 1:  # an IPv6 address by itself
        host, port = rest, ""
    else:
        host, _, port = rest.partition(":")
    if not host or "/" in host or (port and not (port.isdigit() and 0 < int(port) < 65536)):
        raise UsageError(f"{text!r} is no address", hint="for example 10.0.0.1:5555, node1:5555 or [fd00::1]:5555")
    return host, port


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
