"""wsync moves the weights of a model in training into the engines that generate with it.

report = wsync.sync(actor, engine)          # on every trainer rank
"""

from wsync.api import connect, sync, sync_async
from wsync.config import SyncConfig
from wsync.errors import (
    AdmissionError,
    ClosedError,
    ConfigError,
    DigestError,
    EngineStateError,
    MemoryStateError,
    MismatchError,
    PeerError,
    ProtocolError,
    RankError,
    SyncTimeout,
    TransportError,
    UnsupportedError,
    WsyncError,
)
from wsync.memory.manager import MemoryManager
from wsync.plan import Bucket, Plan, TensorMeta, TensorSpec, merge_weight_chunks, split_weight_chunks
from wsync.protocols import Engine, Loader, Manifest, Producer, Receiver, Sender, Ticket, Transport
from wsync.regions import Region
from wsync.remote import RemoteEngine
from wsync.report import SyncReport
from wsync.served import Served, serve
from wsync.session import Session

__all__ = [
    "AdmissionError",
    "Bucket",
    "ClosedError",
    "ConfigError",
    "DigestError",
    "Engine",
    "EngineStateError",
    "Loader",
    "Manifest",
    "MemoryManager",
    "MemoryStateError",
    "MismatchError",
    "PeerError",
    "Plan",
    "Producer",
    "ProtocolError",
    "RankError",
    "Receiver",
    "Region",
    "RemoteEngine",
    "Sender",
    "Served",
    "Session",
    "SyncConfig",
    "SyncReport",
    "SyncTimeout",
    "TensorMeta",
    "TensorSpec",
    "Ticket",
    "Transport",
    "TransportError",
    "UnsupportedError",
    "WsyncError",
    "connect",
    "merge_weight_chunks",
    "serve",
    "split_weight_chunks",
    "sync",
    "sync_async",
]
