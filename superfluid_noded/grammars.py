"""Compiles the constraint of a new session before the scheduler hears of the session, off the event loop.

Stands between the agent and the schedulers. A session without a constraint, or with one that is compiled already, passes at once;
any other waits for one thread, and everything that is said about it meanwhile (cancelled, another class) waits behind it. One
that cannot be compiled is rejected like any other session, and no lane ever hears of it. The head has judged the same text
before, in a process that it can kill; here nothing can be killed, the compiler's fuel is the bound (core/grammar/compiler.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from superfluid_core.errors import ErrorCode, InvalidRequestError
from superfluid_core.grammar.compiler import Grammars
from superfluid_core.scheduler.plan import Cancel, Effect, Input, Reject, SetQos, Submit
from superfluid_core.session import SessionKey

WAITING_MAX = 64
RETRY_MS = 500

Forward = Callable[..., None]


class GrammarDesk:
    """Holds sessions back while their constraints are compiled. Event-loop only."""

    def __init__(self, forward: Forward, tell: Callable[[list[Effect]], None]) -> None:
        self._forward = forward
        self._tell = tell
        self._grammars: dict[str, Grammars] = {}
        self._held: dict[SessionKey, list[Input]] = {}
        self._pool: ThreadPoolExecutor | None = None

    @property
    def waiting(self) -> int:
        return len(self._held)

    def add(self, names: tuple[str, ...], grammars: Grammars) -> None:
        """Compile for a model."""
        self._grammars.update(dict.fromkeys(names, grammars))

    def submit(self, *inputs: Input) -> None:
        """Pass on what concerns no constraint, in order; hold the rest."""
        passed: list[Input] = []
        for item in inputs:
            match item:
                case Submit(spec=spec) if spec.grammar is not None:
                    grammars = self._grammars.get(spec.model)
                    if grammars is None or grammars.has(spec.grammar):
                        passed.append(item)
                    else:
                        self._hold(item, grammars)
                case Cancel(key=key) | SetQos(key=key) if key in self._held:
                    self._held[key].append(item)
                case _:
                    passed.append(item)
        if passed or not inputs:
            self._forward(*passed)

    def close(self) -> None:
        """End the thread; what waits is dropped with the process."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _hold(self, item: Submit, grammars: Grammars) -> None:
        key = item.spec.key
        if len(self._held) >= WAITING_MAX:
            words = "too many constraints wait to be compiled"
            self._tell([Reject(key, ErrorCode.OVERLOADED, words, True, RETRY_MS)])
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar-open")
        self._held[key] = [item]
        assert item.spec.grammar is not None, "only constrained sessions are held"
        work = asyncio.get_running_loop().run_in_executor(
            self._pool, grammars.refusal, item.spec.grammar
        )
        work.add_done_callback(partial(self._compiled, key))

    def _compiled(self, key: SessionKey, work: asyncio.Future[InvalidRequestError | None]) -> None:
        held = self._held.pop(key)
        if work.cancelled():
            return
        refusal = work.result()
        if refusal is None:
            self._forward(*held)
        else:
            self._tell([Reject(key, refusal.code, refusal.message, False)])
