"""The contracts. Trainers, engines and transports meet only here.

One sync, in the order of these classes:

    Producer --fill--> slot --Sender--> wire --Receiver--> views --Loader--> parameter
                                   Engine: begin ... finish | abort

After an error between `Engine.begin` and `Engine.finish` the engine is *torn* if any byte may have been written:
it holds no version and refuses to serve until a full sync succeeds. If nothing had been written it still serves its
old version. Each method says what it raises and what state it leaves.
"""

from wsync.protocols.engine import Engine, Loaded
from wsync.protocols.loader import Loader, Manifest
from wsync.protocols.producer import Producer
from wsync.protocols.transport import Receiver, ReferringTransport, Sender, Ticket, Transport

__all__ = [
    "Engine",
    "Loaded",
    "Loader",
    "Manifest",
    "Producer",
    "Receiver",
    "ReferringTransport",
    "Sender",
    "Ticket",
    "Transport",
]
