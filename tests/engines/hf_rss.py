"""Prints, as JSON, this process's resident bytes around two sleeps of a model of about 400 MB."""

import gc
import json
import os
import resource
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.engines.hf_models import llama
from wsync.adapters.engines.hf import HFEngine


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main(kind: str, folder: str) -> None:
    torch.set_num_threads(1)
    model = llama(hidden_size=1024, intermediate_size=4096, vocab_size=16384, num_hidden_layers=5)
    if kind == "loaded":
        model.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        gc.collect()
    engine = HFEngine(model)
    engine.generate([[1, 2, 3]], max_new_tokens=1)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    found = {"nbytes": nbytes, "before": resident_bytes()}
    engine.sleep(2)
    found["asleep"] = resident_bytes()
    engine.wake_up()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    found["awake"] = resident_bytes()
    engine.sleep(2)
    found["asleep again"] = resident_bytes()
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
