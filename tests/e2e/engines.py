"""Every engine in the table, in each of the ways to run it."""

import multiprocessing as mp
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

import wsync
from examples.demo_engines import without_torchrun
from tests.e2e.families import FAMILIES, NEW_TOKENS
from tests.engines import sglang_inside, vllm_program
from tests.engines.inside import Seen
from tests.engines.pull_trap import Trap
from wsync.adapters.engines.hf import HFEngine
from wsync.config import PathMode

Tokens = list[list[int]]

STUBS = Path(__file__).parents[1] / "stubs"
EXTENSION = "wsync.adapters.engines.vllm_worker.WorkerExtension"
PLAIN_EXTENSION = "examples.vllm_plain_weights.PlainWeights"
OPEN_EXTENSION = "tests.engines.vllm_plain.PlainExtension"
"""As the one before, and tests can look inside."""

EXPERTS_EXTENSION = "tests.engines.vllm_experts.ExpertsExtension"
COMPUTED_EXTENSION = "tests.engines.vllm_computed_experts.ComputedExtension"

SECRET = "of the engine in a world of its own"
PATIENCE_S = 120.0


class Serving(Protocol):
    """A started engine."""

    @property
    def handle(self) -> object:
        """What is synced."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]]) -> Tokens:
        """Greedy, `NEW_TOKENS` after each prompt."""
        ...

    def close(self) -> None:
        """End its processes."""
        ...


@runtime_checkable
class OpenEngine(Serving, Protocol):
    """A started engine of which the workers can be looked into."""

    def look(self) -> list[Seen]:
        """The parameters of every worker that this rank has, see `tests.engines.inside`."""
        ...

    def load(self, folder: Path) -> None:
        """The engine's own loader takes the checkpoint in `folder`."""
        ...

    def set_trap(self, trap: Trap) -> None:
        """In all workers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A way to run an engine."""

    start: Callable[[Path], Serving]
    """On the checkpoint in a folder."""

    needs: str | None = None
    """The optional library: "vllm" or "sglang"."""

    ranks: int = 2
    """Of the trainer."""

    everywhere: bool = False
    """Every rank owns one, or a part of one; else rank 0 alone."""

    tp: int = 1
    """Workers of one engine."""

    families: Sequence[str] = FAMILIES
    transport: str = "auto"
    path: PathMode = "auto"
    senders: int = 1
    """Trainer ranks that send in turn."""

    travel: Sequence[str] = ()
    """Ends of the names of tensors that are not pulled, as no plain copy expresses what the engine does to them."""

    @property
    def engines(self) -> int:
        """How many there are in all."""
        return self.ranks // self.tp if self.everywhere else 1


class HereHF:
    """transformers in the trainer's process."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.handle: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(self, prompts: Sequence[Sequence[int]]) -> Tokens:
        """See `Serving`."""
        return _one_by_one(HFEngine(self.handle), prompts)

    def close(self) -> None:
        """See `Serving`."""


class WorkerHF:
    """transformers in a worker process of wsync's own."""

    def __init__(self, folder: Path) -> None:
        self.handle = HFEngine.launch(folder, dtype=torch.float32)

    def generate(self, prompts: Sequence[Sequence[int]]) -> Tokens:
        """See `Serving`."""
        return _one_by_one(self.handle, prompts)

    def close(self) -> None:
        """See `Serving`."""
        self.handle.shutdown()


class RemoteHF:
    """transformers in a process that the trainer knows by an address and a secret only."""

    def __init__(self, folder: Path) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, folder), daemon=True)
        self._process.start()
        theirs.close()
        self.handle = wsync.RemoteEngine(self._hear(), secret=SECRET, timeout_s=PATIENCE_S)

    def generate(self, prompts: Sequence[Sequence[int]]) -> Tokens:
        """See `Serving`."""
        self._pipe.send(prompts)
        tokens: Tokens = self._hear()
        return tokens

    def close(self) -> None:
        """See `Serving`."""
        self._pipe.close()
        self._process.join(PATIENCE_S)

    def _hear(self) -> Any:
        assert self._pipe.poll(PATIENCE_S), "the engine's world says nothing"
        return self._pipe.recv()


class VLLM:
    """`vllm.LLM` with the given arguments."""

    def __init__(self, folder: Path, dtype: str = "float32", **arguments: Any) -> None:
        from vllm import LLM

        self.handle: Any = LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype=dtype,
            enforce_eager=True,
            max_model_len=128,
            kv_cache_memory_bytes=64 << 20,
            block_size=32,
            seed=0,
            **arguments,
        )

    def generate(self, prompts: Sequence[Sequence[int]]) -> Tokens:
        """See `Serving`."""
        from vllm import SamplingParams

        greedy = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, detokenize=False)
        answers = self.handle.generate([{"prompt_token_ids": p} for p in prompts], greedy, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    def look(self) -> list[Seen]:
        """See `OpenEngine`."""
        return vllm_program.look(self.handle, buffers=False)

    def load(self, folder: Path) -> None:
        """See `OpenEngine`."""
        vllm_program.load_fresh(self.handle, folder)

    def set_trap(self, trap: Trap) -> None:
        """See `OpenEngine`."""
        self.handle.collective_rpc("wsync_test_trap", args=(trap.as_message(),))

    def close(self) -> None:
        """See `Serving`."""
        core = self.handle.llm_engine.engine_core
        if hasattr(core, "resources"):  # in this process there is nothing to end
            core.shutdown()


class SGLang:
    """`sglang.Engine`, its schedulers in other processes."""

    def __init__(self, folder: Path, tp: int = 1, plugins: str = "wsync,wsync-tests", dtype: str = "float32") -> None:
        sys.path.insert(0, str(STUBS))
        paths = [str(STUBS), os.environ.get("PYTHONPATH", "")]
        os.environ |= {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tp))),
            "SGLANG_PLUGINS": plugins,
        }
        # It imports 3,000 modules in each of three processes: without their bytecode that takes a minute.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        with without_torchrun():
            import sglang

            self.handle: Any = sglang.Engine(
                model_path=str(folder),
                skip_tokenizer_init=True,
                device="cpu",
                dtype=dtype,
                attention_backend="torch_native",
                sampling_backend="pytorch",
                disable_cuda_graph=True,
                disable_overlap_schedule=True,
                mem_fraction_static=0.1,
                max_total_tokens=4096,
                context_length=128,
                skip_server_warmup=True,
                tp_size=tp,
            )

    def generate(self, prompts: Sequence[Sequence[int]]) -> Tokens:
        """See `Serving`."""
        greedy = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        answers = self.handle.generate(input_ids=list(map(list, prompts)), sampling_params=greedy)
        return [answer["output_ids"] for answer in answers]

    def look(self) -> list[Seen]:
        """See `OpenEngine`."""
        return sglang_inside.look(self.handle)

    def load(self, folder: Path) -> None:
        """See `OpenEngine`. The cache stays: whether a sync drops it is for the next tokens to show."""
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        manager = self.handle.tokenizer_manager
        request = UpdateWeightFromDiskReqInput(model_path=str(folder), flush_cache=False)
        success, message, *_ = self.handle.loop.run_until_complete(manager.update_weights_from_disk(request, None))
        assert success, message

    def set_trap(self, trap: Trap) -> None:
        """See `OpenEngine`."""
        sglang_inside.trap(self.handle, trap)

    def close(self) -> None:
        """See `Serving`."""
        self.handle.shutdown()


def _one_by_one(engine: HFEngine, prompts: Sequence[Sequence[int]]) -> Tokens:
    return [engine.generate([prompt], max_new_tokens=NEW_TOKENS)[0] for prompt in prompts]


def _serve(pipe: Connection, folder: Path) -> None:
    """Body of the engine's world: answers prompts, until the other side hangs up."""
    torch.set_num_threads(1)
    engine = HereHF(folder)
    with wsync.serve(engine.handle, secret=SECRET) as served:
        pipe.send(served.address)
        while True:
            try:
                prompts = pipe.recv()
            except EOFError:
                return
            with served.using():
                pipe.send(engine.generate(prompts))


def _vllm_here(folder: Path, *, plain: bool = False, **arguments: Any) -> VLLM:
    """Its worker in this process. `plain`: no weights are packed, as in the GPU build."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if plain:
        import tests.engines.vllm_experts  # noqa: F401 - importing it is the switch
    return VLLM(folder, **arguments)


def _vllm_parts(tp: int) -> Callable[[Path], VLLM]:
    """A part of one engine on each rank, or with `tp` 1 an engine on each."""
    return lambda folder: _vllm_here(
        folder, plain=True, tensor_parallel_size=tp, distributed_executor_backend="external_launcher"
    )


def _vllm_workers(tp: int, extension: str) -> Callable[[Path], VLLM]:
    """Engine core and workers in other processes."""

    def start(folder: Path) -> VLLM:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(tp)))
        with without_torchrun():
            return VLLM(
                folder,
                tensor_parallel_size=tp,
                distributed_executor_backend="mp" if tp > 1 else "uni",
                worker_extension_cls=extension,
            )

    return start


_FEW = ("llama", "qwen3-moe")
_EXPERTS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
"""Of the family with experts, in which no other MLP is."""

KINDS: Mapping[str, Kind] = {
    "hf": Kind(start=HereHF),
    "hf-worker": Kind(start=WorkerHF),
    "hf-remote": Kind(start=RemoteHF, transport="gloo", families=_FEW),
    "hf-remote-turns": Kind(start=RemoteHF, transport="gloo", senders=2, families=_FEW),
    "vllm": Kind(start=_vllm_here, needs="vllm", ranks=1),
    "vllm-launcher": Kind(start=_vllm_parts(1), needs="vllm", everywhere=True),
    "vllm-launcher-tp2": Kind(start=_vllm_parts(2), needs="vllm", everywhere=True, tp=2, families=_FEW),
    "vllm-workers": Kind(start=_vllm_workers(1, EXTENSION), needs="vllm"),
    "vllm-workers-plain": Kind(start=_vllm_workers(1, PLAIN_EXTENSION), needs="vllm", families=_FEW),
    "vllm-workers-tp2": Kind(start=_vllm_workers(2, OPEN_EXTENSION), needs="vllm", tp=2, families=_FEW),
    "vllm-workers-tp2-turns": Kind(
        start=_vllm_workers(2, OPEN_EXTENSION), needs="vllm", tp=2, transport="gloo", senders=2, families=_FEW
    ),
    "sglang": Kind(start=SGLang, needs="sglang"),
    "sglang-tp2": Kind(start=lambda folder: SGLang(folder, tp=2), needs="sglang", tp=2, families=_FEW),
    "sglang-own-calls": Kind(start=lambda folder: SGLang(folder, plugins="none"), needs="sglang", families=_FEW),
    "hf-worker-pull": Kind(start=WorkerHF, path="pull", families=_FEW),
    "hf-pull-4": Kind(start=HereHF, ranks=4, everywhere=True, path="pull", families=_FEW),
    "vllm-launcher-tp2-pull": Kind(
        start=_vllm_parts(2), needs="vllm", everywhere=True, tp=2, path="pull", families=_FEW
    ),
    "vllm-workers-tp2-pull": Kind(
        start=_vllm_workers(2, EXPERTS_EXTENSION), needs="vllm", tp=2, path="pull", families=_FEW
    ),
    "vllm-workers-tp2-pull-4": Kind(
        start=_vllm_workers(2, EXPERTS_EXTENSION), needs="vllm", tp=2, ranks=4, path="pull", families=_FEW
    ),
    "vllm-workers-tp2-pull-part": Kind(
        start=_vllm_workers(2, COMPUTED_EXTENSION),
        needs="vllm",
        tp=2,
        path="pull",
        families=("qwen3-moe",),
        travel=_EXPERTS,
    ),
    "sglang-tp2-pull": Kind(
        start=lambda folder: SGLang(folder, tp=2), needs="sglang", tp=2, path="pull", families=_FEW
    ),
    "sglang-tp2-pull-4": Kind(
        start=lambda folder: SGLang(folder, tp=2), needs="sglang", tp=2, ranks=4, path="pull", families=_FEW
    ),
}
