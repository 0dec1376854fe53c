"""What may be sent when: the link's state machine as one table, the same at both ends.

Rules of this file: a state is a row, a kind of message a key, the value the state after it. What is not in the table is a
breach of whoever sent it. The direction of each message is the schema's business (`Spec.senders`), with the handshake's
order left to be told here:

    START --HELLO--> GREETED --WELCOME--> OPEN ...        REFUSE (of the link) or ERROR --> CLOSED
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from superfluid_core.wire import messages as m
from superfluid_core.wire.schema import Role


class State(Enum):
    """Where the link stands. BROKEN: the peer broke the protocol; all that is left is to say so."""

    START = auto()
    GREETED = auto()
    OPEN = auto()
    BROKEN = auto()
    CLOSED = auto()

    __hash__ = object.__hash__  # that of Enum is written in Python, and every message asks for it


class Kind(Enum):
    """Messages as the table tells them apart."""

    HELLO = auto()
    WELCOME = auto()
    REFUSE_LINK = auto()
    ERROR = auto()
    OTHER = auto()

    __hash__ = object.__hash__


_KINDS: Mapping[type[Any], Kind] = {
    m.Hello: Kind.HELLO,
    m.Welcome: Kind.WELCOME,
    m.LinkError: Kind.ERROR,
}


def kind_of(message: m.Message) -> Kind:
    if isinstance(message, m.Refuse) and message.session == 0:
        return Kind.REFUSE_LINK
    return _KINDS.get(type(message), Kind.OTHER)


TRANSITIONS: Mapping[State, Mapping[Kind, State]] = {
    State.START: {
        Kind.HELLO: State.GREETED,
        Kind.REFUSE_LINK: State.CLOSED,
        Kind.ERROR: State.CLOSED,
    },
    State.GREETED: {
        Kind.WELCOME: State.OPEN,
        Kind.REFUSE_LINK: State.CLOSED,
        Kind.ERROR: State.CLOSED,
    },
    State.OPEN: {
        Kind.OTHER: State.OPEN,
        Kind.ERROR: State.CLOSED,
    },
    State.BROKEN: {Kind.ERROR: State.CLOSED},
    State.CLOSED: {},
}


def next_state(state: State, message: m.Message) -> State | None:
    """Say what the machine is in after this message; None when it is out of order."""
    kind = kind_of(message)
    if kind is Kind.OTHER and state is State.OPEN:  # nearly every message: no look into the table
        return state
    return TRANSITIONS[state].get(kind)


_TO_HEAD = (m.Welcome, m.Refuse, m.LinkError)

EXPECTED: Mapping[Role, Mapping[State, tuple[type[Any], ...]]] = {
    Role.HEAD: {State.START: _TO_HEAD, State.GREETED: _TO_HEAD},
    Role.NODE: {State.START: (m.Hello,), State.GREETED: ()},
}
"""Before OPEN, the messages whose header is acceptable to a role at all; their sizes follow."""
