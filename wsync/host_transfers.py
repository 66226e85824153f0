"""Tensors between trainer ranks whose shards are in host memory: gloo, in a process group of wsync's own."""

import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from wsync.background import Background
from wsync.deadline import Deadline
from wsync.errors import RankError, SyncTimeout, TransportError
from wsync.rank_links import RankLinks
from wsync.transfers import LOOK_S, Messages

_GRACE_S = 1.0
"""How much longer a transfer's own thread is waited for, so that its words come through."""


class HostTransfers:
    """See `Transfers`. The first run connects all ranks.

    Nothing inside gloo can be ended: a run that broke, or that a death leaves hanging, is left behind on its thread.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        timeout_s: float,
        links: RankLinks,
        death: Callable[[str], RankError],
        listen: Callable[[], None],
    ) -> None:
        """Local.

        Args:
            rank, size: of this group of ranks.
            store: reached by all of them, and used for nothing else.
            timeout_s: longest wait, in seconds, for gloo to connect.
            links: tell of ranks that die.
            death: what to raise then; it takes what was going on.
            listen: raises if a rank has failed that lives.
        """
        self._rank, self._size, self._store, self._timeout_s = rank, size, store, timeout_s
        self._links, self._death, self._listen = links, death, listen
        self._group: dist.ProcessGroup | None = None

    def run(self, sends: Messages, receives: Messages, deadline: Deadline) -> None:
        """See `Transfers`. All of it is done when this returns."""
        peers = sorted({peer for peer, _ in (*sends, *receives)})
        waiting_for = f"trainer ranks {peers}"

        def move() -> dist.ProcessGroup:
            group = self._group or self._connect()
            works = [group.recv([tensor], peer, 0) for peer, tensor in receives if tensor.numel()]
            works += [group.send([tensor], peer, 0) for peer, tensor in sends if tensor.numel()]
            for work in works:
                work.wait(timedelta(seconds=deadline.remaining(waiting_for)))
            return group

        self._group = self._await(Background(f"the transfer with {waiting_for}", move), deadline)

    def settle(self, deadline: Deadline) -> None:
        """See `Transfers`."""

    def close(self) -> None:
        """See `Transfers`. The group ends with its last reference."""
        self._group = None

    def _connect(self) -> dist.ProcessGroup:
        gloo = dist.ProcessGroupGloo(self._store, self._rank, self._size, timedelta(seconds=self._timeout_s))
        boxed = dist.ProcessGroup(self._store, self._rank, self._size)
        boxed._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        return boxed

    def _await(self, call: Background[dist.ProcessGroup], deadline: Deadline) -> dist.ProcessGroup:
        links = self._links
        call.add_done_callback(links.notify)
        try:
            expires = time.monotonic() + deadline.remaining(call.name) + _GRACE_S
            while not call.done and (left_s := expires - time.monotonic()) > 0:
                if not links.wait_for(lambda: call.done or bool(links.lost), min(left_s, LOOK_S)):
                    self._listen()
                elif not call.done:
                    raise self._death(call.name)
            return call.result(deadline.restart() if call.done else deadline)
        except (SyncTimeout, RankError):
            raise
        except RuntimeError as error:
            if links.wait_for(lambda: bool(links.lost), _GRACE_S):
                raise self._death(call.name) from error
            raise TransportError(
                f"rank {self._rank}: {call.name} broke or passed its deadline of {deadline.timeout_s:g} s: {error}"
            ) from error
