"""Slots on a device, between the streams of whoever fills or reads them and a stream on which they are moved.

    user's stream    fill or read of slot k ---record used--+      +--wait moved---> next fill or read of slot k
                                                            v      |
    stream of moves                            wait used---> broadcast ---record moved

No thread waits for the device: what is recorded has begun to be true when the host is already elsewhere.
"""

from collections.abc import Sequence
from typing import Any

import torch

from wsync.transports.slots import SlotMemory


class DeviceSlots(SlotMemory):
    """Slots out of torch's allocator. Either side of a transport: one fills and sends, the other receives and reads.

    Attributes:
        stream: on which they are moved, ahead of other work.
    """

    def __init__(self, slots: Sequence[torch.Tensor], device: torch.device) -> None:
        """Takes over tensors that were made on the stream that is current on `device`."""
        super().__init__(slots)
        self.stream: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._device = device
        self._used = [self._recorded(torch.cuda.current_stream(device)) for _ in slots]
        self._moved: list[Any] = [None for _ in slots]
        for slot in slots:
            slot.record_stream(self.stream)

    def before_write(self, slot: int) -> None:
        """See `SlotMemory`."""
        stream, moved = torch.cuda.current_stream(self._device), self._moved[slot]
        if moved is not None:
            stream.wait_event(moved)
        if slots := self.slots:  # another thread may close it
            slots[slot].record_stream(stream)

    def after_write(self, slot: int) -> None:
        """See `SlotMemory`."""
        self._used[slot] = self._recorded(torch.cuda.current_stream(self._device))

    before_read, after_read = before_write, after_write

    def before_move(self, slot: int) -> None:
        """Work on `stream` from now on comes after what its user has queued on `slot`."""
        self.stream.wait_event(self._used[slot])

    def after_move(self, slot: int) -> Any:
        """What is queued on `stream` so far moves `slot`. Returns the event of its end."""
        self._moved[slot] = self._recorded(self.stream)
        return self._moved[slot]

    def _recorded(self, stream: Any) -> Any:
        make: Any = torch.cuda.Event
        event = make()
        event.record(stream)
        return event
