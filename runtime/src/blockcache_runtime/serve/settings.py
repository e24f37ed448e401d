"""What a server is started with: one table for every command line. Knows nothing of sockets."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field, fields
from typing import Any

from blockcache_runtime.errors import EngineError

KEY_VARIABLE = "BLOCKCACHE_API_KEY"
LEAST_KEY = 16  # characters


def _option(default: Any, words: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": words, **more})


@dataclass(frozen=True)
class Settings:
    """Each field is an option of `blockcache serve` and of `python -m blockcache_runtime serve`."""

    protocol: str = _option("openpi", "What clients speak.", choices=("openpi", "vla-eval"))
    host: str = _option("127.0.0.1", f"The address to listen at; any but this machine's own needs {KEY_VARIABLE}.")
    port: int = _option(8000, "0 takes a free one.")
    replan: int = _option(
        0, "With vla-eval: actions of a chunk that are executed. 0: as many as the policy was made for."
    )
    rename: tuple[str, ...] = _option((), "An input's name as clients send it, and the policy's: THEIRS=OURS.")
    connections: int = _option(16, "Clients at a time.")
    rate: float = _option(1000.0, "Requests a second of one client; one that asks more often waits.")
    patience: float = _option(30.0, "Seconds that a request may wait, and a client may take to read an answer.")
    record: str = _option("", "A directory to keep requests and answers in, for 'check' and 'tune'.")
    record_mb: int = _option(1000, "Megabytes that --record may take; the oldest are deleted.")

    def __post_init__(self) -> None:
        limits = {"port": (0, 65535), "connections": (1, 1024), "record_mb": (1, 10**6), "replan": (0, 10**4)}
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                raise EngineError(f"{name} is {low} to {high}, got {getattr(self, name)}")
        if not 0 < self.rate <= 1e6 or not 0 < self.patience <= 86_400:
            raise EngineError(f"rate and patience are positive numbers, got {self.rate} and {self.patience}")
        if odd := [item for item in self.rename if item.count("=") != 1 or not all(item.split("="))]:
            raise EngineError(f"--rename takes THEIRS=OURS, got {odd[0]!r}")

    @property
    def renamed(self) -> dict[str, str]:
        """The policy's names by the clients'."""
        return dict(item.split("=") for item in self.rename)

    @property
    def is_local(self) -> bool:
        """Whether only programs on this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def api_key(self) -> str | None:
        """The key that clients must send, from the environment; a server that others can reach has to have one."""
        key = os.environ.get(KEY_VARIABLE) or None
        if key is not None and len(key) < LEAST_KEY:
            raise EngineError(f"the key in {KEY_VARIABLE} has {len(key)} characters, expected {LEAST_KEY} or more")
        if key is None and not self.is_local:
            raise EngineError(
                f"at {self.host} anybody in that network could drive the policy and read /metrics: set {KEY_VARIABLE} to a "
                "key of your own, which clients then send, or listen at 127.0.0.1"
            )
        return key


def options() -> list[tuple[str, Any, dict[str, Any]]]:
    """Each option as it is typed, its default and what is said of it."""
    return [(f"--{item.name.replace('_', '-')}", item.default, dict(item.metadata)) for item in fields(Settings)]
