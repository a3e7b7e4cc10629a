"""Sends requests when they are due, in a closed or an open loop, and collects the outcomes.

The clock is the event loop's, so tests can control it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from quantkit.bench.request import Answer, Outcome, Request

Ask = Callable[[Request], Awaitable[Answer]]
"""Sends one request; failures are part of the answer, not exceptions."""


def nothing() -> None:
    """The default listener, which does nothing."""


async def closed(
    requests: Sequence[Request], ask: Ask, users: int, tick: Callable[[], None] = nothing
) -> list[Outcome]:
    """A fixed number of users, each with one request in flight at a time."""
    clock = asyncio.get_running_loop().time
    found: dict[int, Outcome] = {}
    waiting = iter(enumerate(requests))  # one queue for all users

    async def user() -> None:
        for number, request in waiting:
            due = clock()
            answer = await ask(request)
            found[number] = Outcome(due, answer, request.n_output, request.exact)
            tick()

    await asyncio.gather(*(user() for _ in range(min(users, len(requests)))))
    return [found[number] for number in sorted(found)]


async def scheduled(
    requests: Sequence[Request],
    times: Sequence[float],
    ask: Ask,
    tick: Callable[[], None] = nothing,
) -> list[Outcome]:
    """Send every request at its time, however many are still unanswered."""
    clock = asyncio.get_running_loop().time
    start = clock()

    async def one(request: Request, time: float) -> Outcome:
        due = start + time
        await asyncio.sleep(due - clock())
        answer = await ask(request)
        tick()
        return Outcome(due, answer, request.n_output, request.exact)

    return list(await asyncio.gather(*map(one, requests, times)))
