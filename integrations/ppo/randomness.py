"""Random states that a block leaves as they were."""

from contextlib import AbstractContextManager

import torch


def kept_random_state() -> AbstractContextManager[None]:
    """Give torch the states back that it had before a block: of the host, and of this rank's device alone.

    `torch.random.fork_rng` by itself does so for every device that the process sees, those of other ranks too.
    """
    return torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else [])
