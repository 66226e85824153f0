"""libnccl, as far as wsync needs it, by its C interface. Communicators do not block: see decision 013."""

import ctypes
from functools import cache
from typing import Any

from wsync.errors import UnsupportedError

SUCCESS, IN_PROGRESS = 0, 7
KEY_BYTES = 128

_NAME = "libnccl.so.2"
_UINT8 = 1
_MAGIC, _CONFIG_VERSION = 0xCAFEBEEF, 21700
_UNDEFINED = -(1 << 31)


class _Key(ctypes.Structure):
    """`ncclUniqueId`."""

    _fields_ = (("internal", ctypes.c_byte * KEY_BYTES),)


class _Config(ctypes.Structure):
    """`ncclConfig_t` as 2.17 had it. Later ones read as much as its size says, and take their own defaults."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
    )


class Library:
    """The functions, with Python's types. Results are NCCL's codes; a communicator is its address."""

    def __init__(self, functions: Any) -> None:
        """`functions`: a `ctypes.CDLL`."""
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        for name, arguments in {
            "ncclGetVersion": (pointer,),
            "ncclGetUniqueId": (pointer,),
            "ncclCommInitRankConfig": (pointer, integer, _Key, integer, pointer),
            "ncclCommGetAsyncError": (pointer, pointer),
            "ncclCommAbort": (pointer,),
            "ncclBroadcast": (pointer, pointer, ctypes.c_size_t, integer, integer, pointer, pointer),
            "ncclSend": (pointer, ctypes.c_size_t, integer, integer, pointer, pointer),
            "ncclRecv": (pointer, ctypes.c_size_t, integer, integer, pointer, pointer),
            "ncclGroupStart": (),
            "ncclGroupEnd": (),
        }.items():
            function = getattr(functions, name)
            function.argtypes, function.restype = arguments, integer
        functions.ncclGetErrorString.argtypes, functions.ncclGetErrorString.restype = (integer,), ctypes.c_char_p
        functions.ncclGetLastError.argtypes, functions.ncclGetLastError.restype = (pointer,), ctypes.c_char_p
        self._functions = functions

    def version(self) -> str:
        """As people write it."""
        code = ctypes.c_int()
        self._functions.ncclGetVersion(ctypes.byref(code))
        return f"{code.value // 10000}.{code.value % 10000 // 100}.{code.value % 100}"

    def make_key(self) -> tuple[int, bytes]:
        """Code, and what all ranks of a communicator must have. This process then waits for them on a thread."""
        key = _Key()
        code = self._functions.ncclGetUniqueId(ctypes.byref(key))
        return code, bytes(key)

    def begin(self, key: bytes, rank: int, size: int) -> tuple[int, int]:
        """Code, and a communicator on the current device, which is made in the background; 0 if there is none."""
        config = _Config(
            size=ctypes.sizeof(_Config),
            magic=_MAGIC,
            version=_CONFIG_VERSION,
            blocking=0,
            cga_cluster_size=_UNDEFINED,
            min_ctas=_UNDEFINED,
            max_ctas=_UNDEFINED,
        )
        address = ctypes.c_void_p()
        code = self._functions.ncclCommInitRankConfig(
            ctypes.byref(address), size, _Key.from_buffer_copy(key), rank, ctypes.byref(config)
        )
        return code, address.value or 0

    def state(self, communicator: int) -> int:
        """Code of what runs in the background, or of an error that it has met."""
        state = ctypes.c_int()
        code = self._functions.ncclCommGetAsyncError(communicator, ctypes.byref(state))
        return int(code or state.value)

    def broadcast(self, communicator: int, start: int, nbytes: int, stream: int) -> int:
        """Queue a broadcast from rank 0, in place. Code; what is in progress has not been queued yet."""
        return int(self._functions.ncclBroadcast(start, start, nbytes, _UINT8, 0, communicator, stream))

    def send(self, communicator: int, peer: int, start: int, nbytes: int, stream: int) -> int:
        """Code. Within a group: queue device memory to go to `peer`."""
        return int(self._functions.ncclSend(start, nbytes, _UINT8, peer, communicator, stream))

    def receive(self, communicator: int, peer: int, start: int, nbytes: int, stream: int) -> int:
        """Code. Within a group: queue device memory to be written by `peer`."""
        return int(self._functions.ncclRecv(start, nbytes, _UINT8, peer, communicator, stream))

    def start_group(self) -> int:
        """Code. What this thread asks for from now on begins together, when the group ends."""
        return int(self._functions.ncclGroupStart())

    def end_group(self) -> int:
        """Code; what is in progress has not been queued yet."""
        return int(self._functions.ncclGroupEnd())

    def abort(self, communicator: int) -> None:
        """Have what runs on the device end, wait for that, and free all of it. Do not name the communicator again.

        Kernels that are still queued begin and end at once, as soon as the work before them lets them.
        """
        self._functions.ncclCommAbort(communicator)

    def words(self, code: int, communicator: int) -> str:
        """What NCCL says of a code, for people."""
        text = [self._functions.ncclGetErrorString(code)]
        if communicator:
            text.append(self._functions.ncclGetLastError(communicator))
        return ": ".join(part.decode(errors="replace").strip() for part in text if part)


@cache
def load() -> Library:
    """The one that torch has loaded into this process.

    Raises `UnsupportedError` if there is none: a torch without NCCL, or with one built into it.
    """
    try:
        return Library(ctypes.CDLL(_NAME))
    except (OSError, AttributeError) as error:
        raise UnsupportedError(f"{_NAME} cannot be used in this process: {error}") from error
