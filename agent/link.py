"""The agent's standing with the coordinator: registered or not, reachable or not. Decides what an error means.

One task registers; every other call waits until that is done, and hands its errors in here. Makes no other call.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from agent.client import AgentClient, Registration
from agent.logs import Logger
from eval_kernel.errors import (
    AccessError,
    CallError,
    CertificateExpired,
    ConfigError,
    FedevalError,
    NotRegistered,
    StaleIncarnation,
    Unauthenticated,
    Unavailable,
    Unreachable,
    VersionRefused,
)

#: Pauses between two tries: FIRST, doubled each time up to LONGEST, times 0.5 to 1.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.4, 5.0
#: While the coordinator does not answer, a line so often.
REMIND_SECONDS = 60.0
#: How long it may refuse all calls with the same credentials: these calls may have begun before there were such.
REFUSED_SECONDS = 2.0
#: And a look so often at why.
DIAGNOSE_SECONDS = 10.0


class Backoff:
    """Pauses that grow and differ from agent to agent, so that a restarted coordinator is not stormed."""

    def __init__(self) -> None:
        """Begin with the shortest."""
        self._pause = FIRST_PAUSE_SECONDS

    def reset(self) -> None:
        """Something worked: begin again with the shortest."""
        self._pause = FIRST_PAUSE_SECONDS

    async def wait(self) -> None:
        """Pause."""
        await asyncio.sleep(self._pause * random.uniform(0.5, 1.0))
        self._pause = min(self._pause * 2, LONGEST_PAUSE_SECONDS)


class Link:
    """Registers, and again whenever that is needed. ``generation`` counts the registrations."""

    def __init__(
        self,
        client: AgentClient,
        log: Logger,
        registered: Callable[[Registration], Awaitable[None]],
        give_up_after: float | None,
    ) -> None:
        """``registered`` is awaited after each registration, before anything else may call."""
        self._client = client
        self._log = log
        self._registered = registered
        self._give_up_after = give_up_after
        self._up = asyncio.Event()
        self._down = asyncio.Event()
        self._silence = asyncio.Event()  # set while the coordinator does not even say that it cannot serve
        self._silent_since: float | None = time.monotonic()
        self._reminded: float | None = None
        self._capabilities_json = "{}"
        self._retired = False
        self._refused_since: float | None = None
        self._refused_with: object = None
        self.generation = 0
        self.heartbeat_seconds = 1.0

    @property
    def up(self) -> bool:
        """Whether the agent is registered and the coordinator answered last time."""
        return self._up.is_set() and self._silent_since is None

    @property
    def answers(self) -> bool:
        """Whether the coordinator answered last time, registered or about to be."""
        return self._silent_since is None

    def announce(self, capabilities_json: str) -> None:
        """Set what is announced, and announce it again if that was done before."""
        self._capabilities_json = capabilities_json
        self.lose(self.generation)

    def lose(self, generation: int) -> None:
        """A registration is no longer good."""
        if generation == self.generation:
            self._up.clear()
            self._down.set()

    def retire(self) -> None:
        """The good-bye is about to be said: that the coordinator then knows this agent no longer is no news."""
        self._retired = True

    async def ready(self) -> int:
        """Wait until the agent is registered; return the registration's number."""
        await self._up.wait()
        return self.generation

    async def replaced(self, generation: int) -> None:
        """Wait until a registration is no longer the present one."""
        while self.generation == generation and self._up.is_set():
            await self._down.wait()

    async def serve(self) -> None:
        """Keep the agent registered. Raises what makes going on senseless."""
        backoff = Backoff()
        while True:
            self._down.clear()
            try:
                answer = await self._client.register(self._capabilities_json)
            except FedevalError as error:
                if isinstance(error, CallError) and not isinstance(
                    error, NotRegistered | Unauthenticated | CertificateExpired
                ):
                    raise  # refused: another try would be refused too
                self.failed(error, -1)
                await backoff.wait()
                continue
            self.answered()
            backoff.reset()
            self.generation += 1
            self.heartbeat_seconds = answer.heartbeat_seconds
            await self._registered(answer)
            if not self._down.is_set():
                self._up.set()
                await self._down.wait()

    def answered(self) -> None:
        """A call succeeded."""
        if self._silent_since is not None and self._reminded is not None:
            self._log.info("the coordinator answers", after_seconds=round(time.monotonic() - self._silent_since))
        self._silent_since = self._reminded = None
        self._refused_since = None
        self._silence.clear()

    def _may_be_late(self, error: AccessError) -> bool:
        """Whether a refused call may only have been made with what has been replaced since.

        A coordinator that begins again makes a new token; a call may outlast the certificate of its connection.
        """
        if isinstance(error, CertificateExpired) and self._client.certificate_problem() is not None:
            return False
        now, shown = time.monotonic(), self._client.shown()
        if self._refused_since is None or shown != self._refused_with:
            self._refused_since, self._refused_with = now, shown
        return now - self._refused_since < REFUSED_SECONDS

    async def diagnose(self) -> None:
        """Look, for as long as nobody answers, whether that can heal. Raises what cannot."""
        while True:
            await self._silence.wait()
            error = await self._client.diagnosis()
            if error is not None and self._silence.is_set():
                raise error
            await asyncio.sleep(DIAGNOSE_SECONDS * random.uniform(0.5, 1.0))

    def failed(self, error: FedevalError, generation: int) -> None:
        """Take a call's error: note it if the call may be repeated, raise it if this agent must stop."""
        if isinstance(error, Unauthenticated | CertificateExpired) and self._may_be_late(error):
            return
        if isinstance(error, VersionRefused | StaleIncarnation | AccessError | ConfigError):
            raise error
        if isinstance(error, NotRegistered):
            if self._retired:
                return
            self._log.info("registering again", reason=str(error))
            self.lose(generation)
            return
        now = time.monotonic()
        if not isinstance(error, Unreachable):
            # It does answer, if not as it should.
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now
        if isinstance(error, Unreachable) and not isinstance(error, Unavailable):
            self._silence.set()
        if self._silent_since is not None and self._give_up_after is not None:
            silence = now - self._silent_since
            if silence >= self._give_up_after:
                raise Unreachable(f"{error} (given up after {silence:.0f} s)")
        if self._reminded is None or now - self._reminded >= REMIND_SECONDS:
            self._reminded = now
            self._log.warning("trying again", reason=str(error), code=error.code)
