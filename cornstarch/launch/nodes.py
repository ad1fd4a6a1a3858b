"""Runs on several machines: a supervisor on each, and a server beside the first that agrees with all on what to do.

The server knows which machines have arrived, starts every attempt on all of them, ends it on all when a worker of one
has failed or a machine is gone, and asks the `RunDirector` what follows. No torch in this process.
"""

from __future__ import annotations

import errno
import queue
import select
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from cornstarch.errors import ConfigError
from cornstarch.launch.local_launcher import bind_store
from cornstarch.launch.node_messages import (
    LineSocket,
    Message,
    check_token,
    is_signature,
    make_nonce,
    sign,
)
from cornstarch.launch.run_director import Fault, Finish, Outcome, RunDirector, Size
from cornstarch.launch.supervisor import Job, Start
from cornstarch.launch.worker_group import GRACE_SECONDS, StopRequests, WorkerGroup

JOIN_SECONDS = 300.0  # how long a machine may take to arrive, at the start and after it was lost
SETTLE_SECONDS = 10.0  # how long an elastic run waits for more machines once there are enough
_LEAVE_SECONDS = 5.0  # how long the server waits for machines to hear that the run is over
_POLL_SECONDS = 0.1
_MOST_HANDSHAKES = 64


class NodeServer:
    """Decides for all machines; it runs in a thread of the first machine's supervisor."""

    def __init__(self, job: Job, host: str, port: int, token: str) -> None:
        check_token(host, token)
        self._host, self._token, self._range = host, token, job.range
        self._director, self._prepare = RunDirector(job.folder, job.range, job.restarts), job.prepare
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listening = socket.create_server((host, port), family=family, reuse_port=False)
        except OSError as error:
            why = "the port is in use, usually by another run" if error.errno == errno.EADDRINUSE else error.strerror
            raise ConfigError(
                f"--master {host}:{port} cannot be opened on this machine: {why}.\n  It must be an address of the "
                "machine with --node-rank 0, and a free port."
            ) from error
        self.store_socket: socket.socket | None = None
        self._arrivals: queue.SimpleQueue[tuple[int, LineSocket]] = queue.SimpleQueue()
        self._handshakes = threading.BoundedSemaphore(_MOST_HANDSHAKES)
        self._members: dict[int, LineSocket] = {}
        self._attempt: list[int] = []  # the machines of the attempt that is running
        self._outcomes: dict[int, Outcome] = {}  # in the order of their arrival
        self._failed_at: float | None = None
        self._ending_seconds: float | None = None
        self._waiting_since = self._changed_at = time.monotonic()
        self._finish: Finish | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="node-server", daemon=True)

    def start(self) -> None:
        threading.Thread(target=self._accept, name="node-arrivals", daemon=True).start()
        self._thread.start()

    def close(self) -> None:
        """Wait until all machines have heard that the run is over."""
        if self._finish is None:
            self._finish = Finish(1, "The supervisor of the first machine has ended.")
        self._thread.join(_LEAVE_SECONDS + 1)
        self._listening.close()
        if self.store_socket is not None:
            self.store_socket.close()

    # ------------------------------------------------------------------ arrivals

    def _accept(self) -> None:
        with suppress(OSError):  # closed at the end
            while True:
                connection, _ = self._listening.accept()
                if self._handshakes.acquire(blocking=False):
                    threading.Thread(target=self._greet, args=(LineSocket(connection),), daemon=True).start()
                else:
                    connection.close()

    def _greet(self, line: LineSocket) -> None:
        """Let a machine in that knows the token, and prove that we know it."""
        nonce = make_nonce()
        try:
            line.send(nonce=nonce)
            hello = line.receive_one()
            node, theirs = hello.get("node"), str(hello.get("nonce"))
            if not isinstance(node, int) or not is_signature(self._token, hello.get("proof"), nonce, str(node)):
                line.send(refused="the token differs")
                line.close()
                return
            if not 0 <= node < self._range.nodes[1]:
                line.send(refused=f"--node-rank {node}: the run has machines 0 to {self._range.nodes[1] - 1}")
                line.close()
                return
            line.send(welcome=sign(self._token, theirs, "server"))
            self._arrivals.put((node, line))
            if self._is_closed:
                line.close()
        except OSError:
            line.close()
        finally:
            self._handshakes.release()

    # ------------------------------------------------------------------ the loop

    def _serve(self) -> None:
        try:
            while self._finish is None:
                self._serve_once()
        finally:  # whatever happens, nobody may wait for this thread for ever
            self._dismiss(self._finish or Finish(1, "The server of the first machine has failed."))

    def _serve_once(self) -> None:
        for node, line in self._take_arrivals():
            self._add(node, line)
        self._begin_if_ready()
        ready, _, _ = select.select(list(self._members.values()), [], [], _POLL_SECONDS)
        for node in [node for node, line in self._members.items() if line in ready]:
            self._read(node)

    def _take_arrivals(self) -> list[tuple[int, LineSocket]]:
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self._arrivals.get_nowait())
        return found

    def _dismiss(self, finish: Finish) -> None:
        """Tell every machine, also one that has just arrived, that the run is over; wait until they have left."""
        lines, told = list(self._members.values()), 0
        end = time.monotonic() + _LEAVE_SECONDS
        has_told = False
        while time.monotonic() < end and (lines or not has_told):
            lines += [line for _, line in self._take_arrivals()]
            has_told = has_told or bool(lines)
            for line in lines[told:]:
                with suppress(OSError):
                    line.send(finish={"code": finish.code, "reason": finish.reason})
            told = len(lines)
            for line in select.select(lines, [], [], _POLL_SECONDS)[0]:
                try:
                    line.receive()
                except OSError:
                    lines.remove(line)
                    told -= 1
                    line.close()
        self._is_closed = True
        for line in [*lines, *(line for _, line in self._take_arrivals())]:
            line.close()

    def _add(self, node: int, line: LineSocket) -> None:
        if node in self._members:
            with suppress(OSError):
                line.send(refused=f"there is a machine with --node-rank {node} already")
            line.close()
            return
        self._members[node] = line
        self._changed_at = time.monotonic()

    def _begin_if_ready(self) -> None:
        if self._attempt:
            if self._failed_at is None and self._director.wants_other_size(len(self._members)):
                self._broadcast(save=True)
            return
        now, (least, most), count = time.monotonic(), self._range.nodes, len(self._members)
        has_settled = count >= least and now - self._changed_at > SETTLE_SECONDS
        if (count < most and not has_settled) or 0 not in self._members:
            if now - self._waiting_since > JOIN_SECONDS:
                absent = ", ".join(str(node) for node in range(most) if node not in self._members)
                self._finish = Finish(1, f"Machine {absent} of {most} did not arrive within {JOIN_SECONDS:g} s.")
            return
        size = self._director.choose(count)
        if size is None:
            self._finish = Finish(2, self._range.describe_refusal(count))
            return
        if self.store_socket is not None:
            self.store_socket.close()
        try:
            self.store_socket = bind_store(self._host)
        except OSError:  # an address that is translated on its way here
            self.store_socket = bind_store("")
        cause = self._director.cause
        restart = self._director.describe_restart(size)
        restart = f"{cause}: {restart}" if restart.startswith("restart") else restart
        try:
            arguments = self._prepare(size, self._director.attempt + 1)
        except ConfigError as error:
            self._finish = Finish(2, str(error))
            return
        attempt = self._director.begin(size, count)
        self._attempt, self._outcomes = sorted(self._members)[: size.nodes], {}
        self._failed_at = self._ending_seconds = None
        port = self.store_socket.getsockname()[1]
        lost = []
        for index, node in enumerate(self._attempt):
            start = Start(attempt, index, size, self._host, port, restart, arguments)
            try:
                self._members[node].send(start=start._asdict() | {"size": list(size)})
            except OSError as error:
                lost.append((node, str(error.strerror or error)))
        for node, why in lost:  # now: nobody may hear of the end of an attempt before its start
            self._lose(node, why)

    def _read(self, node: int) -> None:
        try:
            messages = self._members[node].receive()
        except OSError as error:
            self._lose(node, str(error.strerror or error))
            return
        for message in messages:
            if "failing" in message:
                self._end_attempt()
            elif "stopping" in message:
                self._end_attempt()
                self._finish = Finish(128 + int(message["stopping"]))
            elif "outcome" in message and node in self._attempt:
                self._note(node, Outcome.from_json(message["outcome"]))

    def _lose(self, node: int, why: str) -> None:
        """Go on without a machine that is gone."""
        self._members.pop(node).close()
        self._changed_at = time.monotonic()
        if node in self._attempt and node not in self._outcomes:
            self._note(node, Outcome(1, Fault(None, 1, f"machine {node} is gone ({why})", is_crash=True)))

    def _note(self, node: int, outcome: Outcome) -> None:
        self._outcomes[node] = outcome
        if outcome.fault is not None or (outcome.is_stopped and outcome.code):
            self._end_attempt()
        if len(self._outcomes) == len(self._attempt):
            ending = None if self._failed_at is None else time.monotonic() - self._failed_at
            self._finish = self._director.decide(list(self._outcomes.values()), ending)
            self._attempt, self._waiting_since = [], time.monotonic()

    def _end_attempt(self) -> None:
        if self._failed_at is None:
            self._failed_at = time.monotonic()
            self._broadcast(end=True)

    def _broadcast(self, **message: Any) -> None:
        for node in list(self._members):
            self._send(node, **message)

    def _send(self, node: int, **message: Any) -> None:
        try:
            self._members[node].send(**message)
        except OSError as error:
            self._lose(node, str(error.strerror or error))


class NodeLink:
    """The link of one machine's supervisor to the server."""

    def __init__(self, node: int, host: str, port: int, token: str, server: NodeServer | None = None) -> None:
        check_token(host, token)
        self._node, self._address, self._token, self._server = node, (host, port), token, server
        self._line: LineSocket | None = None
        self._inbox: list[Message] = []
        self._lost = ""

    @property
    def store_socket(self) -> socket.socket | None:
        return None if self._server is None else self._server.store_socket

    def advance(self, outcome: Outcome | None, ending_seconds: float | None, stops: StopRequests) -> Start | Finish:
        if self._line is None and not self._lost:
            finish = self._connect(stops)
            if finish is not None:
                return finish
        if outcome is not None and not self._lost:
            self._tell(outcome=asdict(outcome))
        while not self._lost:
            for message in self._inbox:
                if "start" in message or "finish" in message:
                    self._inbox.remove(message)
                    return self._parse(message)
            self._inbox.clear()
            assert self._line is not None
            waiting: list[Any] = [self._line, stops]
            ready, _, _ = select.select(waiting, [], [])
            if stops in ready:
                number = stops.read()
                self._tell(stopping=number)
                return Finish(128 + number, f"{signal.Signals(number).name}: the run ends here on all machines.")
            self._receive()
        return Finish(1, self._lost)

    def attach(self, workers: WorkerGroup) -> None:
        assert self._line is not None
        line = self._line

        def react() -> None:
            self._receive()
            if self._lost:
                workers.unwatch(line.fileno())
            if any("save" in message for message in self._inbox):
                workers.save_and_end()
                self._inbox = [message for message in self._inbox if "save" not in message]
            if self._lost or self._inbox:  # nothing but the end of the attempt can have come
                workers.end_soon(GRACE_SECONDS)

        if self._inbox:  # the end came together with the start
            workers.end_soon(GRACE_SECONDS)
        workers.watch(line.fileno(), react)
        workers.on_failure = lambda: self._tell(failing=True)

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
        if self._server is not None:
            self._server.close()

    def _parse(self, message: Message) -> Start | Finish:
        if "finish" in message:
            return Finish(**message["finish"])
        start = message["start"]
        return Start(**{**start, "size": Size(*start["size"])})

    def _connect(self, stops: StopRequests) -> Finish | None:
        """Reach the server, which may be started later than this machine."""
        end, why = time.monotonic() + JOIN_SECONDS, "no answer"
        where = f"{self._address[0]}:{self._address[1]}"
        while time.monotonic() < end:
            try:
                line = LineSocket(socket.create_connection(self._address, timeout=5.0))
                self._greet(line)
                self._line = line
                return None
            except OSError as error:
                why = (error.strerror or str(error)).lower()
            if select.select([stops], [], [], 0.2)[0]:
                return Finish(128 + stops.read())
        return Finish(
            1, f"The supervisor of the first machine could not be reached at {where} within {JOIN_SECONDS:g} s: {why}."
        )

    def _greet(self, line: LineSocket) -> None:
        nonce = make_nonce()
        theirs = str(line.receive_one().get("nonce"))
        line.send(node=self._node, nonce=nonce, proof=sign(self._token, theirs, str(self._node)))
        answer = line.receive_one()
        if "refused" in answer:
            where = f"{self._address[0]}:{self._address[1]}"
            raise ConfigError(f"--master {where} refuses this machine: {answer['refused']}.")
        if not is_signature(self._token, answer.get("welcome"), nonce, "server"):
            raise ConnectionRefusedError("what answers there is not the supervisor of this run")

    def _receive(self) -> None:
        assert self._line is not None
        try:
            self._inbox += self._line.receive()
        except OSError as error:
            self._lost = f"The supervisor of the first machine is gone ({error.strerror or error}): the run ends here."

    def _tell(self, **message: Any) -> None:
        assert self._line is not None
        try:
            self._line.send(**message)
        except OSError as error:
            self._lost = f"The supervisor of the first machine is gone ({error.strerror or error}): the run ends here."


def connect_nodes(job: Job, node: int, host: str, port: int, token: str) -> NodeLink:
    """Return the link of machine `node`; on machine 0 it starts the server."""
    server = None
    if node == 0:
        server = NodeServer(job, host, port, token)
        server.start()
    return NodeLink(node, host, port, token, server)
