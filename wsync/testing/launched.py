"""What a launcher leaves in the environment of a rank, for libraries that look there."""

import os

from wsync.testing.ranks import Rank


def as_under_torchrun(me: Rank, **more: str) -> None:
    """Set RANK, LOCAL_RANK and WORLD_SIZE of this process, and `more`. For processes that `run_ranks` started."""
    os.environ.update(RANK=str(me.rank), LOCAL_RANK=str(me.rank), WORLD_SIZE=str(me.world_size), **more)
