"""Producers for modules under PEFT LoRA, however they are sharded: merged weights, or the adapter alone.

Merged, each rank computes its own part of `W + scaling * B @ A` in float32 as a bucket is staged, and rounds it once,
to the wire dtype. It reads the base weight and never writes it. A and B are small and may be sharded another way than
W, so all ranks gather them whole when a sync opens.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from wsync.adapters.trainers.deepspeed import DeepSpeedProducer
from wsync.adapters.trainers.fsdp import FSDPProducer
from wsync.adapters.trainers.fsdp1 import FSDP1Producer
from wsync.adapters.trainers.lora_layers import Term, examine, is_tuned, model_inside
from wsync.adapters.trainers.lora_merge import check_mergeable, merge
from wsync.adapters.trainers.lora_switches import SwitchedProducer
from wsync.adapters.trainers.module import ModuleProducer
from wsync.adapters.trainers.names import Held, Source, as_held, sources
from wsync.adapters.trainers.sharded import ShardedProducer
from wsync.deadline import Deadline
from wsync.errors import MismatchError, first_five
from wsync.group import Group
from wsync.handshake import merge_specs
from wsync.plan import ALIGNMENT_BYTES, Bucket, Plan, TensorSpec
from wsync.regions import Region

_SHARDINGS: tuple[type[ShardedProducer], ...] = (DeepSpeedProducer, FSDP1Producer, FSDPProducer, ModuleProducer)
"""Each module is taken by one of them."""


class LoRAProducer(SwitchedProducer):
    """Exports the weights that PEFT's `merge_and_unload` would leave, under the names of the model inside.

    Several active adapters add up. Copies that `modules_to_save` trains stand in for the originals.
    """

    def __new__(cls, module: nn.Module) -> "LoRAProducer":
        """A producer for the way in which `module` is sharded."""
        return cast("LoRAProducer", super().__new__(combined(cls, module)))

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._factors = LoRAFactors(module)
        self._seen: Mapping[str, tuple[Term, ...]] = {}  # at the last close look
        self._terms: Mapping[str, tuple[Term, ...]] = {}
        self._whole: Mapping[str, torch.Tensor] = {}
        self._merged: dict[str, torch.Tensor] = {}
        self._last: Mapping[str, int] = {}  # parameter -> the last bucket for which this rank reads it
        self._reached = math.inf

    @staticmethod
    def matches(obj: object) -> bool:
        """Whether `obj` is a PEFT model, or a module with PEFT's layers in it."""
        return is_tuned(obj)

    def metadata(self) -> Sequence[TensorSpec]:
        """See `wsync.Producer`. Raises `UnsupportedError` naming the layer that cannot be merged."""
        specs = super().metadata()
        self._terms = self._seen
        for name, terms in self._terms.items():
            check_mergeable(name, self._layouts[name], terms)
        self._factors.metadata()
        return specs

    def prepare(self, plan: Plan, senders: Sequence[int], group: Group) -> None:
        """See `wsync.Producer`. *Collective*: one round, on who has which part of the factors."""
        super().prepare(plan, senders, group)
        reads = ((*exchange.staged.parents, *exchange.own.parents) for exchange in self._exchanges)
        self._last = {name: index for index, names in enumerate(reads) for name in names}
        self._factors.meet(group)

    def open(self) -> None:
        """See `wsync.Producer`. *Collective* where factors are sharded: gathers them."""
        super().open()
        terms = self._seen
        if terms is not self._terms:
            self._check_switches(terms)
        self._terms = terms
        self._factors.open()
        self._whole = self._factors.collect()
        self._reached = math.inf

    def confirm(self) -> bool:
        """See `wsync.Producer`. The factors were trusted, too."""
        return super().confirm() & self._factors.confirm()

    def stage(self, bucket: Bucket, slot: torch.Tensor | None) -> None:
        """See `wsync.Producer`."""
        self._reached = bucket.index
        super().stage(bucket, slot)

    def close(self) -> None:
        """See `wsync.Producer`."""
        super().close()
        self._factors.close()
        self._whole, self._merged = {}, {}

    def _held(self, module: nn.Module) -> Mapping[str, Held]:
        held = super()._held(module)
        tuned = examine(module, list(held))
        self._seen = tuned.terms
        return {clean: held[name] for name, clean in tuned.names.items()}

    def _sources(self, module: nn.Module, held: Mapping[str, Held]) -> list[Source]:
        return sources(model_inside(module), _untie(held, self._seen))

    def exposes(self, name: str) -> bool:
        """See `wsync.protocols.pull.ExportingProducer`. What is merged lies nowhere."""
        return self._parents[name] not in self._terms

    def _in_place(self, name: str, shape: tuple[int, ...]) -> tuple[str, Region] | None:
        return None if self._parents[name] in self._terms else super()._in_place(name, shape)

    def _readable(self, parents: Collection[str]) -> Mapping[str, torch.Tensor]:
        """Merges what of `parents` has adapters. What was merged before stays if this call or a later bucket needs it.

        So a tensor of several buckets is merged once, though other ranks may send some of them.
        """
        tensors, before = self._opened(), self._merged.items()
        self._merged = {
            name: tensor for name, tensor in before if name in parents or self._last.get(name, -1) > self._reached
        }
        for name in parents:
            if name in self._terms and name not in self._merged:
                self._merged[name] = merge(tensors[name], self._layouts[name], self._terms[name], self._whole)
        return {name: self._merged[name] if name in self._merged else tensors[name] for name in parents}

    def _check_switches(self, terms: Mapping[str, tuple[Term, ...]]) -> None:
        changed = [name for name in {**self._terms, **terms} if _shown(self._terms, name) != _shown(terms, name)]
        if changed:
            raise MismatchError(
                f"{len(changed)} tensors of {self._kind} have other active adapters than at connect: "
                f"{first_five(changed)}; connect again"
            )


class LoRAFactors(SwitchedProducer):
    """Exports A, B and magnitudes of all active adapters by their names in the module, for the ranks themselves."""

    def __new__(cls, module: nn.Module) -> "LoRAFactors":
        """A producer for the way in which `module` is sharded."""
        return cast("LoRAFactors", super().__new__(combined(cls, module)))

    def metadata(self) -> Sequence[TensorSpec]:
        """See `wsync.Producer`."""
        self._specs = super().metadata()
        return self._specs

    def meet(self, group: Group) -> None:
        """*Collective.* Prepare to bring every factor to every rank, all in one bucket."""
        by_rank = group.round("LoRA factors", list(self._specs), Deadline.after(group.timeout_s))
        specs = merge_specs([cast("Sequence[TensorSpec]", specs) for specs in by_rank])
        room = sum(spec.nbytes + ALIGNMENT_BYTES for spec in specs)
        self.prepare(Plan.pack(specs, max(room, ALIGNMENT_BYTES)), range(group.world_size), group)

    def collect(self) -> Mapping[str, torch.Tensor]:
        """*Collective* unless every rank has them whole. Full factors by name; do not write."""
        plan, group = self._prepared()
        found: dict[str, torch.Tensor] = {}
        for bucket in plan.buckets:
            tensors = self.references(bucket)
            if tensors is None:
                slot = self._allocate(bucket.nbytes)
                self.stage(bucket, slot)
                group.agree("LoRA factors", None, Deadline.after(group.timeout_s))
                self.fill(bucket, slot)
                tensors = plan.views(bucket, slot)
            found |= {meta.name: tensor for meta, tensor in zip(bucket.tensors, tensors, strict=True)}
        return found

    def _held(self, module: nn.Module) -> Mapping[str, Held]:
        held = super()._held(module)
        return {name: held[name] for name in examine(module, list(held)).factors()}

    def _sources(self, module: nn.Module, held: Mapping[str, Held]) -> list[Source]:
        return as_held(held)


def combined(lora: type[ShardedProducer], module: nn.Module) -> type[ShardedProducer]:
    """What `lora` exports, with the regions of the producer for the way in which `module` is sharded."""
    sharding = next(kind for kind in _SHARDINGS if cast(Any, kind).matches(module))
    return type(f"{lora.__name__}Over{sharding.__name__}", (lora, sharding), {})


def _untie(held: Mapping[str, Held], terms: Mapping[str, tuple[Term, ...]]) -> dict[str, Held]:
    """`held` with a stand-in for each tensor that is merged: what is added to one of a tied pair parts them."""
    return {
        name: Held(
            tensor=torch.empty(item.shape, dtype=item.tensor.dtype, device="meta"),
            shape=item.shape,
            optional=item.optional,
        )
        if name in terms
        else item
        for name, item in held.items()
    }


def _shown(terms: Mapping[str, tuple[Term, ...]], name: str) -> list[Term]:
    """All of the terms of a tensor but their scalings, which may change from sync to sync."""
    return [replace(term, scaling=0.0) for term in terms.get(name, ())]
