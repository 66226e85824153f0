"""The prediction itself: phases of co-located training, and the steps between them, as sums of named residents."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from wsync.planner.activations import training_activations
from wsync.planner.engine_side import EngineSide, engine_side
from wsync.planner.setting import Setting
from wsync.planner.sync_side import SyncSide, sync_side
from wsync.planner.trainer_side import TrainerSide, trainer_side

ACTOR = "actor"
OPTIMIZER = "optimizer"
ENGINE_WEIGHTS = "engine weights"
KV_CACHE = "engine kv_cache"
"""The same names as residents of `wsync.memory` have."""

GRADIENTS = "gradients"
REDUCE_BUCKET = "reduce bucket"
GATHERED = "gathered layers"
ACTIVATIONS = "activations"
ENGINE_ACTIVATIONS = "engine activations"
CUDA_GRAPHS = "engine CUDA graphs"
SLOTS = "slots"
BOXES = "gather boxes"
STAGING = "staging"
PEERS = "peer contexts"
MERGE = "LoRA merge"
CONTEXTS = "CUDA contexts"
CACHE = "allocator's cache"

PHASES = ("launch", "rollout", "sync", "train")
GENERATING = ("launch", "rollout")
"""Those with a KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """Who is on a GPU at the same time."""

    name: str
    residents: Mapping[str, int]
    """Name -> bytes on the GPU with the most. None of them is 0."""

    peak: int = field(init=False)
    """Bytes of all of them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "residents", {name: nbytes for name, nbytes in self.residents.items() if nbytes})
        object.__setattr__(self, "peak", sum(self.residents.values()))

    @property
    def largest(self) -> str:
        """Name of the largest resident; "" if there is none."""
        return max(self.residents, key=self.residents.__getitem__, default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Everything that can be there, and what is there when."""

    setting: Setting
    trainer: TrainerSide
    engine: EngineSide
    sync: SyncSide

    @classmethod
    def of(cls, setting: Setting) -> "_Parts":
        return cls(setting=setting, trainer=trainer_side(setting), engine=engine_side(setting), sync=sync_side(setting))

    @property
    def always(self) -> Mapping[str, int]:
        processes = 1 if self.setting.transport == "inproc" else 2
        return {CONTEXTS: processes * self.setting.context_bytes, CUDA_GRAPHS: self.setting.cuda_graph_bytes}

    @property
    def kept(self) -> Mapping[str, int]:
        """What stays from the first sync on."""
        return {BOXES: self.sync.boxes, PEERS: self.sync.peer_contexts}

    @property
    def session(self) -> Mapping[str, int]:
        """What a sync takes besides weights."""
        return {SLOTS: self.sync.slots, STAGING: self.sync.staging, **self.kept, MERGE: self.sync.merge}

    @property
    def actor(self) -> Mapping[str, int]:
        """With all that comes and leaves together with it."""
        staying = {GRADIENTS: self.trainer.gradients, REDUCE_BUCKET: self.trainer.reduce_bucket}
        return {ACTOR: self.trainer.actor, **(staying if self.trainer.gradients_stay else {})}

    @property
    def optimizer(self) -> Mapping[str, int]:
        return {OPTIMIZER: self.trainer.optimizer}

    @property
    def kept_actor(self) -> Mapping[str, int]:
        return {} if ACTOR in self.setting.offload else self.actor

    @property
    def kept_optimizer(self) -> Mapping[str, int]:
        return {} if OPTIMIZER in self.setting.offload else self.optimizer

    @property
    def weights(self) -> Mapping[str, int]:
        return {ENGINE_WEIGHTS: self.engine.weights}

    @property
    def awake(self) -> Mapping[str, int]:
        return {**self.weights, KV_CACHE: self.engine.kv_cache}

    @property
    def host(self) -> Mapping[str, int]:
        """What one rank and one worker have in host memory."""
        found: dict[str, int] = {}
        if ACTOR in self.setting.offload:
            found[ACTOR] = sum(self.actor.values())
        if OPTIMIZER in self.setting.offload:
            found |= self.optimizer
        if self.setting.sleep_level == 1:
            found |= self.weights
        return found


def predict(setting: Setting) -> Sequence[PhasePlan]:
    """What each of `PHASES` takes on the GPU with the most.

    In "launch" the engine starts, beside a trainer that is there and offloaded already; in "rollout" it generates; in
    "sync" wsync moves weights; "train" is the start of a backward pass. Gather boxes and contexts stay from the first
    sync on, slots and staging do not (`wsync.sync(..., memory=m)` gives them back).
    """
    parts = _Parts.of(setting)
    idle = {**parts.always, **parts.kept_actor, **parts.kept_optimizer}
    generating = {**idle, **parts.awake, ENGINE_ACTIVATIONS: parts.engine.activations}
    training = {
        **parts.actor,
        **parts.optimizer,
        GRADIENTS: parts.trainer.gradients,
        REDUCE_BUCKET: parts.trainer.reduce_bucket,
        GATHERED: parts.trainer.gathered,
        ACTIVATIONS: training_activations(setting),
    }
    syncing = {**parts.always, **parts.actor, **parts.kept_optimizer, **parts.weights, **parts.session}
    return [
        PhasePlan(name="launch", residents=generating),
        PhasePlan(name="rollout", residents={**generating, **parts.kept}),
        PhasePlan(name="sync", residents=syncing),
        PhasePlan(name="train", residents={**parts.always, **training, **parts.kept}),
    ]


def predict_moves(setting: Setting) -> Sequence[PhasePlan]:
    """What is there at the peak of each step from "train" over "sync" to "rollout" and back, in their order.

    What leaves is there until its copy is done, and what PyTorch's allocator keeps of it until the cache is emptied.
    """
    parts = _Parts.of(setting)
    always = {**parts.always, **parts.kept}
    idle = {**always, **parts.kept_actor, **parts.kept_optimizer}
    syncing = {**always, **parts.actor, **parts.kept_optimizer, **parts.weights}
    steps: list[tuple[str, Mapping[str, int]]] = []
    if OPTIMIZER in setting.offload:
        steps.append(("offload optimizer", {**always, **parts.actor, **parts.optimizer}))
    steps += [("wake weights", syncing), ("sync", {**syncing, **parts.session})]
    if ACTOR in setting.offload:
        cached = {**idle, **parts.weights, CACHE: sum(parts.actor.values()) + parts.sync.merge}
        steps += [("offload actor", {**syncing, CACHE: parts.sync.merge}), ("empty cache", cached)]
    steps += [("wake kv_cache", {**idle, **parts.awake}), ("sleep", {**idle, **parts.awake})]
    if ACTOR in setting.offload:
        steps.append(("reload actor", {**always, **parts.actor, **parts.kept_optimizer}))
    if OPTIMIZER in setting.offload:
        steps.append(("reload optimizer", {**always, **parts.actor, **parts.optimizer}))
    return [PhasePlan(name=name, residents=residents) for name, residents in steps]


def predict_host(setting: Setting) -> Mapping[str, int]:
    """Host memory of the fullest node for what is off its GPUs, name -> bytes.

    What is pinned stays allocated for the next time, so these add up. A copy of an actor that is not sharded is there
    once for each GPU.
    """
    return {name: nbytes * setting.node_gpus for name, nbytes in _Parts.of(setting).host.items() if nbytes}
