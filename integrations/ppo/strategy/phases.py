"""Who is on the device in which phase of an iteration."""

from collections.abc import Mapping, Sequence

from integrations.ppo.arguments import Arguments

ENGINE = ("engine weights", "engine kv_cache")


def phases(
    args: Arguments, models: Sequence[str], optimizers: Sequence[str], *, engine: bool
) -> Mapping[str, Sequence[str]]:
    """Phase -> residents in the order in which they come, as `wsync.MemoryManager` takes them.

    Args:
        args: `disable_engine_sleep`, `offload_models` and `adam_offload` say who leaves at all.
        models: those that train and can leave, the actor first.
        optimizers: of these models.
        engine: whether this rank owns one. Ranks that do not need not name it.
    """
    tags = ENGINE if engine else ()
    held = [*(tags if args.disable_engine_sleep else ())]
    held += [] if args.offload_models else models
    held += [] if args.adam_offload else optimizers
    wanted = {
        "rollout": tags,
        "sync": [*models[:1], *tags[:1]],
        "score": models,
        "train": [*models, *optimizers],
    }
    return {name: list(dict.fromkeys([*some, *held])) for name, some in wanted.items()}
