"""The server: websockets in, limits, signals. Knows nothing of how a policy computes, nor of what messages mean."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import gc
import hmac
import logging
import signal
import sys
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from blockcache_runtime.errors import BlockcacheError, EngineError, ObservationError, in_one_line
from blockcache_runtime.observation_log import ObservationLog
from blockcache_runtime.serve.metrics import Metrics
from blockcache_runtime.serve.policies import ServedPolicy
from blockcache_runtime.serve.protocols import PROTOCOLS, Protocol, Question, Served
from blockcache_runtime.serve.settings import Settings
from blockcache_runtime.serve.worker import Worker

OPEN_SECONDS, PING_SECONDS, GRACE_SECONDS = 10.0, 20.0, 10.0
"""For a handshake; between pings and for their answers; for what is under way when the server stops."""
READ_AHEAD = 4  # messages of one client that are kept while it waits for an answer; more stay in the network
MOST_REFUSALS = 20  # in a row, then the connection is closed
_CLOSED = object()
_logger = logging.getLogger("blockcache.serve")


def serve(policy: ServedPolicy, settings: Settings) -> None:
    """Serve a policy until Ctrl-C or SIGTERM; the request that is under way is finished first.

    Args:
        policy: What is served.
        settings: Where, to whom and within which limits.
    """
    asyncio.run(Server(policy, settings).run(lambda line: print(line, flush=True)))


class Server:
    """One policy on one port."""

    def __init__(self, policy: ServedPolicy, settings: Settings) -> None:
        """Nothing is opened before `run`.

        Args:
            policy: What is served.
            settings: Where, to whom and within which limits.
        """
        self.settings, self.metrics = settings, Metrics()
        self.served = Served(policy, settings.renamed, settings.replan or policy.n_action_steps)
        self._key = settings.api_key()
        self._worker = Worker(policy, self.metrics)
        self._log: ObservationLog | None = None
        self._stopping = asyncio.Event()
        self._open: dict[Any, asyncio.Queue[Any]] = {}  # inboxes by the task that converses
        self.port = 0

    async def run(self, say: Callable[[str], None], stop: asyncio.Event | None = None) -> None:
        """Serve until Ctrl-C or SIGTERM.

        Args:
            say: Given one line once the port is open.
            stop: Also stops the server, where somebody sets it within the same loop.
        """
        from websockets.asyncio.server import serve as open_port

        logging.getLogger("websockets.server").setLevel(logging.CRITICAL)  # a hostile client would fill the log
        self._stopping = stop or self._stopping
        self._worker.warm_up(self.settings.connections)
        if self.settings.record:
            self._log = ObservationLog(self.settings.record, self.settings.record_mb * 10**6)
        self._worker.start()
        gc.collect()
        gc.freeze()  # all that is there now stays: looking through it for garbage would stop the server for milliseconds
        try:
            async with open_port(
                self._connection,
                self.settings.host,
                self.settings.port,
                process_request=self._request,
                origins=[None],  # a browser names its page: no page may drive a robot
                compression=None,
                max_size=self.served.most_bytes,
                max_queue=1,
                open_timeout=OPEN_SECONDS,
                ping_interval=PING_SECONDS,
                ping_timeout=PING_SECONDS,
                close_timeout=2.0,
                server_header=None,
            ) as opened:
                self.port = opened.sockets[0].getsockname()[1]
                self._catch_signals()
                say(self._words())
                await self._stopping.wait()
                for inbox in self._open.values():
                    with contextlib.suppress(asyncio.QueueFull):  # who is in the midst of a request looks by itself
                        inbox.put_nowait(_CLOSED)
                opened.close(close_connections=False)  # no new ones; those that are open end after their request
                try:
                    await asyncio.wait_for(opened.wait_closed(), GRACE_SECONDS)
                except asyncio.TimeoutError:
                    for task in self._open:
                        task.cancel()
        except OSError as error:
            place = f"{self.settings.host}:{self.settings.port}"
            raise EngineError(f"cannot listen at {place}: {error.strerror or error}; take another --port") from error
        finally:
            gc.unfreeze()
            self._worker.close()
            if self._log is not None:
                self._log.close()

    def _words(self) -> str:
        shared = f", up to {self._worker.batch} clients in one run" if self._worker.batch > 1 else ""
        whom = "this machine only" if self.settings.is_local else "everybody in that network who has the key"
        place = f"ws://{self.settings.host}:{self.port} ({self.settings.protocol})"
        return (
            f"serving {self.served.policy.name} at {place} to {whom}; "
            f"a chunk takes {self._worker.milliseconds:.1f} ms{shared}; /healthz, /health, /metrics; Ctrl-C stops it"
        )

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # Windows, or not the main thread
            for one in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(one, self._stop)

    def _stop(self) -> None:
        if self._stopping.is_set():
            sys.exit(130)  # asked twice
        self._stopping.set()

    def _request(self, connection: Any, request: Any) -> Any:
        """Plain HTTP, and who may open a websocket."""
        if request.path in ("/healthz", "/health"):
            trouble = self._worker.trouble(self.settings.patience)
            status = HTTPStatus.OK if trouble is None else HTTPStatus.SERVICE_UNAVAILABLE
            if request.path == "/healthz":
                return _response(connection, status, f"{trouble or 'OK'}\n")
            return _response(connection, status, f'{{"status": "{trouble or "ok"}"}}\n', "application/json")
        if self._key is not None and not _has_key(request.headers.get_all("Authorization"), self._key):
            self.metrics.count("refused_total", reason="key")
            hint = "send the header 'Authorization: Api-Key KEY', or ws://any:KEY@host"
            return _response(connection, HTTPStatus.UNAUTHORIZED, f"a key is needed: {hint}\n")
        if request.path == "/metrics":
            if self._log is not None:
                for name, count in (("recorded_total", self._log.added), ("dropped_total", self._log.dropped)):
                    self.metrics.values[name, ""] = count
            return _response(connection, HTTPStatus.OK, self.metrics.text(), "text/plain; version=0.0.4")
        if self.metrics.values["connections", ""] >= self.settings.connections:
            self.metrics.count("refused_total", reason="connections")
            words = f"there are {self.settings.connections} clients already; try again later\n"
            return _response(connection, HTTPStatus.SERVICE_UNAVAILABLE, words)
        return None

    async def _connection(self, socket: Any) -> None:
        from websockets.exceptions import ConnectionClosed

        self.metrics.count("connections")
        self.metrics.count("connections_total")
        protocol = PROTOCOLS[self.settings.protocol](self.served)
        inbox: asyncio.Queue[Any] = asyncio.Queue(READ_AHEAD)
        reader = asyncio.ensure_future(self._read(socket, protocol, inbox))
        self._open[asyncio.current_task()] = inbox
        try:
            if (greeting := protocol.greeting()) is not None:
                await self._send(socket, greeting)
            await self._converse(socket, protocol, inbox)
        except ConnectionClosed:
            pass
        except Exception as error:  # one client's trouble is not the others'
            _logger.warning("a connection ended with %s", in_one_line(error))
        finally:
            self.metrics.count("connections", -1)
            del self._open[asyncio.current_task()]
            reader.cancel()
            with contextlib.suppress(Exception):
                await socket.close(1001)

    async def _read(self, socket: Any, protocol: Protocol, inbox: asyncio.Queue[Any]) -> None:
        """Messages into the inbox, until the connection ends.

        What does not fit stays in the network. But a live client goes on whether or not it is answered: its oldest message
        is taken in, unanswered, and the inbox holds the newest.
        """
        allowed, period = 0.0, 1 / self.settings.rate
        try:
            async for data in socket:
                now = time.perf_counter()
                if allowed > now:
                    await asyncio.sleep(allowed - now)
                allowed = max(allowed, now - 0.1) + period  # a tenth of a second may be made up for
                while protocol.live and inbox.full():
                    if (oldest := inbox.get_nowait()) is not _CLOSED:
                        await self._take(socket, protocol, oldest, newest=False)
                await inbox.put(data)
        except Exception:  # however it ended: the client is gone
            _logger.debug("a connection ended", exc_info=True)
        await inbox.put(_CLOSED)

    async def _converse(self, socket: Any, protocol: Protocol, inbox: asyncio.Queue[Any]) -> None:
        while not self._stopping.is_set() and protocol.refused < MOST_REFUSALS:
            if (data := await inbox.get()) is _CLOSED:
                return
            await self._take(socket, protocol, data, inbox.empty())

    async def _take(self, socket: Any, protocol: Protocol, data: bytes | str, newest: bool) -> None:
        """One message, and the answer to it."""
        started = time.perf_counter()
        reply: bytes | str | None
        try:
            reply = await self._reply(protocol, data, newest)
            protocol.refused = 0
        except BlockcacheError as error:
            self.metrics.count("refused_total", reason=type(error).__name__)
            reply, protocol.refused = protocol.refusal(str(error)), protocol.refused + 1
        if reply is not None:
            await self._send(socket, reply)
            protocol.finished((time.perf_counter() - started) * 1e3)

    async def _reply(self, protocol: Protocol, data: bytes | str, newest: bool) -> bytes | None:
        started = time.perf_counter()
        found = protocol.receive(data, newest)
        if not isinstance(found, Question):
            return found
        try:
            chunk, seconds = await self._worker.ask(found, self.settings.patience)
        finally:
            goes_on = protocol.return_to(found)
        if not goes_on:
            return None
        reply = protocol.answer(chunk, seconds * 1e3)
        self.metrics.count("requests_total")
        self.metrics.histograms["request_seconds"].add(time.perf_counter() - started)
        if self._log is not None:
            self._record(self._log, protocol, found, chunk)
        return reply

    def _record(self, log: ObservationLog, protocol: Protocol, question: Question, chunk: Any) -> None:
        if protocol.recorded_as[0] != question.episode:
            protocol.recorded_as = (question.episode, log.begin_episode())
        with contextlib.suppress(ObservationError):  # of another form than other clients' have; the log counts it
            log.add(question.observation, chunk, protocol.recorded_as[1])

    async def _send(self, socket: Any, message: bytes | str) -> None:
        giving_up = asyncio.get_running_loop().call_later(self.settings.patience, self._give_up, socket)
        try:
            await socket.send(message)
        finally:
            giving_up.cancel()

    def _give_up(self, socket: Any) -> None:
        """On a client that does not read what it asked for: sending to it ends as if it was gone."""
        self.metrics.count("refused_total", reason="unread")
        socket.transport.abort()


def _has_key(sent: list[str], key: str) -> bool:
    """Whether a request carries the key; how long that takes does not tell how much of it was right."""
    kind, _, value = (sent[0] if len(sent) == 1 else "").partition(" ")
    if kind.lower() == "basic":  # clients that know no other way send what stands in the address
        with contextlib.suppress(binascii.Error, ValueError):
            value = base64.b64decode(value, validate=True).decode(errors="replace").partition(":")[2]
    elif kind.lower() not in ("api-key", "bearer"):
        value = ""
    return hmac.compare_digest(value.encode(), key.encode())


def _response(connection: Any, status: HTTPStatus, body: str, kind: str = "text/plain") -> Any:
    response = connection.respond(status, body)
    del response.headers["Content-Type"]
    response.headers["Content-Type"] = f"{kind}; charset=utf-8" if ";" not in kind else kind
    return response
