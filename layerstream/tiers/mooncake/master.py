"""Mooncake's master: where it is, and whether it answers."""

from __future__ import annotations

import os
import re
import socket
import struct
from dataclasses import dataclass
from typing import Self

from layerstream.errors import ConfigError

SIGN_OF_LIFE_S = 1.0
"""Seconds to wait for each of the two: a connection, and an answer."""

_QUESTION = struct.pack("<BBBBIIIHxx", 21, 0, 0, 0, 1, 0xFFFFFFFF, 0, 0)
"""A call of a function that no master has, in its RPC protocol (`req_header` in coro_rpc_protocol.hpp of yalantinglibs:
magic, version, serialisation, kind, number, function, lengths). A master says so, or, if its protocol is another one,
closes the connection: both are signs of life. One that hangs still accepts connections, but says nothing."""


@dataclass(frozen=True, slots=True)
class MasterAddress:
    """Host and port of a master."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "host:port", with an IPv6 address in brackets.

        Raises:
            ConfigError: it is something else.
        """
        match = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):([0-9]{1,5})", text)
        if not match or not 0 < int(match[2]) < 1 << 16:
            raise ConfigError(
                f"option 'master' got {text!r}; allowed: \"host:port\" of a mooncake_master (its option --rpc_port)"
            )
        return cls(match[1].strip("[]"), int(match[2]))

    def answers(self) -> bool:
        """Whether the master gives a sign of life; known after `2 * SIGN_OF_LIFE_S` at the latest."""
        try:
            with socket.create_connection((self.host, self.port), SIGN_OF_LIFE_S) as connection:
                if os.environ.get("MC_RPC_PROTOCOL", "tcp") != "tcp":
                    return True
                connection.sendall(_QUESTION)
                connection.recv(1)
        except ConnectionResetError:
            return True
        except OSError:
            return False
        return True

    def local_address(self) -> str:
        """This machine's address on the way to the master.

        Raises:
            OSError: there is no way, or no such host.
        """
        family, kind, protocol, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
