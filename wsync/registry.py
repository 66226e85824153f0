"""Which adapters and transports exist, and which one serves an object. Nothing is imported before it is needed.

Other distributions add theirs through the entry point groups `wsync.transports`, `wsync.trainers` and `wsync.engines`;
an entry names a class. A transport's class is called without arguments. A trainer's or engine's class is called with
the user's object, and has a static method `matches(obj) -> bool` that is cheap and imports no framework. Entry points
are asked before the built-in ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, cast

from wsync.config import LoRAMode
from wsync.errors import UnsupportedError
from wsync.protocols import Engine, Producer, Transport

_DISTRIBUTION = "wsync-rl"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    name: str
    target: str
    """"module:attr" of the class."""

    serves: str = ""
    """What it takes, for people."""

    packages: tuple[str, ...] | None = None
    """Only objects with a class from one of these top-level packages can match; None: ask the class."""

    extra: str | None = None
    """Optional dependencies that it needs."""

    distribution: str | None = None
    """Who brought it, "name version" or "" if nobody can tell; None if wsync itself."""

    @property
    def origin(self) -> str:
        """Who brought it, for messages; "" for what is built in."""
        return f", from {self.distribution}" if self.distribution else ""

    @property
    def title(self) -> str:
        """Name, target and origin, for messages."""
        return f"{self.name} ({self.target}{self.origin})"


_TRANSPORTS = (
    _Entry(
        name="inproc",
        target="wsync.transports.inproc:InprocTransport",
        serves="workers in the trainer's process, on any device",
    ),
    _Entry(
        name="shm",
        target="wsync.transports.shm:ShmTransport",
        serves="processes of one host, engine's weights in host memory",
    ),
    _Entry(
        name="cuda_ipc",
        target="wsync.transports.cuda_ipc:CudaIpcTransport",
        serves="processes of one host, weights on one CUDA device or on devices that read each other",
        extra="cuda",
    ),
    _Entry(
        name="nccl",
        target="wsync.transports.collective:NcclTransport",
        serves="processes of any hosts, weights on CUDA devices, each process on its own",
    ),
    _Entry(
        name="hccl",
        target="wsync.transports.collective:HcclTransport",
        serves="not yet: refused with the reason",
    ),
    _Entry(
        name="gloo",
        target="wsync.transports.collective:GlooTransport",
        serves="processes of any hosts, weights in host memory",
    ),
)
_TRAINERS = (
    _Entry(
        name="lora",
        target="wsync.adapters.trainers.lora:LoRAProducer",
        serves="a module with LoRA adapters of PEFT",
        packages=("torch",),
    ),
    _Entry(
        name="deepspeed",
        target="wsync.adapters.trainers.deepspeed:DeepSpeedProducer",
        serves="a DeepSpeedEngine of ZeRO stage 0 to 3, its module, or a module made under zero.Init",
        packages=("torch",),
    ),
    _Entry(
        name="fsdp1",
        target="wsync.adapters.trainers.fsdp1:FSDP1Producer",
        serves="a module with torch.distributed.fsdp.FullyShardedDataParallel in it",
        packages=("torch",),
    ),
    _Entry(
        name="fsdp",
        target="wsync.adapters.trainers.fsdp:FSDPProducer",
        serves="a module sharded by fully_shard or with DTensor parameters",
        packages=("torch",),
    ),
    _Entry(
        name="module",
        target="wsync.adapters.trainers.module:ModuleProducer",
        serves="any other torch.nn.Module",
        packages=("torch",),
    ),
    _Entry(
        name="checkpoint",
        target="wsync.adapters.trainers.checkpoint:CheckpointProducer",
        serves="a str or Path, the folder of a safetensors checkpoint",
        packages=("builtins", "pathlib"),
    ),
)
_ADAPTERS = (
    _Entry(
        name="adapter",
        target="wsync.adapters.trainers.lora_adapter:AdapterProducer",
        serves="with lora='adapter', a module with one active LoRA adapter of PEFT",
        packages=("torch",),
    ),
)
_ENGINES = (
    _Entry(
        name="vllm",
        target="wsync.adapters.engines.vllm:VLLMEngine",
        serves="vllm.LLM",
        packages=("vllm",),
        extra="vllm",
    ),
    _Entry(
        name="vllm",
        target="wsync.adapters.engines.vllm_async:AsyncVLLMEngine",
        serves="vllm.v1.engine.async_llm.AsyncLLM, also known as vllm.AsyncLLMEngine",
        packages=("vllm",),
        extra="vllm",
    ),
    _Entry(
        name="sglang",
        target="wsync.adapters.engines.sglang:SGLangEngine",
        serves="sglang.Engine",
        packages=("sglang",),
        extra="sglang",
    ),
    _Entry(
        name="hf",
        target="wsync.adapters.engines.hf:HFEngine",
        serves="a torch.nn.Module with generate()",
        packages=("torch",),
        extra="hf",
    ),
)


def catalog() -> Mapping[str, Sequence[tuple[str, str, str | None]]]:
    """What is built in, by kind, in the order in which it is asked: (name, what it serves, extra that it needs)."""
    kinds = {"trainers": (*_TRAINERS, *_ADAPTERS), "engines": _ENGINES, "transports": _TRANSPORTS}
    return {kind: [(entry.name, entry.serves, entry.extra) for entry in entries] for kind, entries in kinds.items()}


def transports() -> list[Transport]:
    """Every transport, in the order in which `auto` prefers them. Raises `UnsupportedError` if one cannot load."""
    return [cast(Transport, _load(entry)()) for entry in _entries("transports", _TRANSPORTS)]


def transport(name: str) -> Transport:
    """The transport of that name. Raises `UnsupportedError` listing what there is."""
    entries = {entry.name: entry for entry in _entries("transports", _TRANSPORTS)}
    if name not in entries:
        raise UnsupportedError(f"there is no transport {name!r}; choose one of: {', '.join(sorted(entries))}")
    return cast(Transport, _load(entries[name])())


def transports_for(wanted: object) -> list[Transport]:
    """The candidates for a user's `SyncConfig.transport`: all of them for a name or "auto", else the object itself.

    Raises `UnsupportedError` for a name that is not there, or for an object that is no transport.
    """
    if not isinstance(wanted, str):
        if not _meets(wanted, Transport):
            raise UnsupportedError(f"transport is {_seen(wanted)}; it must be a name or meet wsync.Transport")
        return [cast(Transport, wanted)]
    if wanted != "auto":
        transport(wanted)
    return transports()


def find_trainer(actor: object) -> Any:
    """The producer class for `actor`. Raises `UnsupportedError` with what was seen and what is supported."""
    return _find("actor", actor, _entries("trainers", _TRAINERS), Producer)


def find_engine(engine: object) -> Any:
    """The engine class for `engine`. Raises `UnsupportedError` with what was seen and what is supported."""
    return _find("engine", engine, _entries("engines", _ENGINES), Engine)


def producer_for(actor: object, lora: LoRAMode = "merged") -> Producer:
    """`actor` itself if it meets `wsync.Producer`, else the producer that exports it. Raises as `find_trainer`.

    `lora`: see `wsync.SyncConfig`.
    """
    if _meets(actor, Producer):
        return cast(Producer, actor)
    found = find_trainer(actor) if lora == "merged" else _find("actor", actor, _ADAPTERS, Producer)
    return cast(Producer, found(actor))


def engine_for(engine: object) -> Engine:
    """`engine` itself if it meets `wsync.Engine`, else the adapter that controls it. Raises as `find_engine`."""
    return cast(Engine, engine if _meets(engine, Engine) else find_engine(engine)(engine))


def _entries(kind: str, built_in: Sequence[_Entry]) -> list[_Entry]:
    found = [
        _Entry(
            name=entry.name,
            target=entry.value,
            serves=entry.value,
            distribution=f"{entry.dist.name} {entry.dist.version}" if entry.dist else "",
        )
        for entry in entry_points(group=f"wsync.{kind}")
    ]
    return [*built_in, *found] if kind == "transports" else [*found, *built_in]


def as_list(engine: object) -> Sequence[object]:
    """What a user passes as `engine`: one, several, or None."""
    if engine is None:
        return []
    return list(engine) if isinstance(engine, (list, tuple)) else [engine]


def _load(entry: _Entry) -> Any:
    module, _, attribute = entry.target.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:
        if entry.distribution is None and not isinstance(error, ImportError):
            raise
        cure = f'pip install "{_DISTRIBUTION}[{entry.extra}]"' if entry.extra else "install what it needs"
        if entry.distribution:
            cure = f"install what it needs, or pip uninstall {entry.distribution.split()[0]}"
        raise UnsupportedError(f"{entry.title} cannot be imported: {type(error).__name__}: {error}; {cure}") from error


def _ask(entry: _Entry, obj: object) -> Any:
    """The adapter class of `entry` if it takes `obj`, else None."""
    adapter = _load(entry)
    if entry.distribution is None:
        return adapter if adapter.matches(obj) else None
    try:
        return adapter if adapter.matches(obj) else None
    except Exception as error:
        raise UnsupportedError(
            f"{entry.title} failed when asked whether it takes {_seen(obj)}: {type(error).__name__}: {error}"
        ) from error


def _find(role: str, obj: object, entries: Sequence[_Entry], contract: type) -> Any:
    roots = {root for kind in type(obj).__mro__ for root in [kind.__module__.partition(".")[0]]}
    for entry in entries:
        if entry.packages is None or roots & set(entry.packages):
            adapter = _ask(entry, obj)
            if adapter is not None:
                return adapter
    supported = "; ".join(f"{entry.name}: {entry.serves}{entry.origin}" for entry in entries)
    raise UnsupportedError(
        f"this {role} is {_seen(obj)}, which nothing here can serve. Supported: {supported}; or any object that meets "
        f"wsync.{contract.__name__} (it lacks {', '.join(list(_missing(obj, contract))[:5])})"
    )


def _seen(obj: object) -> str:
    if isinstance(obj, type):
        return f"the class {obj.__module__}.{obj.__qualname__} (pass an instance)"
    return f"a {type(obj).__module__}.{type(obj).__qualname__}"


def _meets(obj: object, contract: type) -> bool:
    return next(_missing(obj, contract), None) is None


def _missing(obj: object, contract: type) -> Iterator[str]:
    # Not isinstance: that looks past a weakref.proxy, which a session may hold instead of the object.
    members: Mapping[str, object] = {**contract.__annotations__, **vars(contract)}
    return (name for name in members if not name.startswith("_") and not hasattr(obj, name))
