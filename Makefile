# Every target sets up what it needs in .venv first; that is quick when it is already there.
ENGINE ?= hf
PYTHON ?= python3
ifeq ($(filter hf vllm sglang,$(ENGINE)),)
$(error ENGINE is '$(ENGINE)'; choose hf, vllm or sglang)
endif
export PYTHON

# The ranks of the demo talk over the loopback device. These settings end with the child process.
LOOPBACK := GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
TORCHRUN := .venv/bin/python -m torch.distributed.run --nproc-per-node 2 \
	--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check bench clean setup-hf setup-vllm setup-sglang setup-trainers setup-all

help:
	@echo 'make demo               train on 2 ranks, sync into a Hugging Face engine, compare the tokens'
	@echo 'make demo ENGINE=vllm   the same with vLLM'
	@echo 'make demo ENGINE=sglang the same with SGLang'
	@echo 'make test               every check and every test, real vLLM and SGLang included'
	@echo 'make check              the same without real engines'
	@echo 'make test-all           make test, and every trainer with every engine and every family of models'
	@echo 'make bench              the benchmarks'
	@echo 'make clean              remove what was built and cached (.venv stays)'
	@echo 'PYTHON=python3.12 make ...   make .venv with this interpreter'

setup-hf:
	@scripts/setup core

setup-vllm:
	@scripts/setup vllm

setup-sglang:
	@scripts/setup sglang

setup-trainers:
	@scripts/setup trainers

setup-all:
	@scripts/setup all

demo: setup-$(ENGINE)
	@env $(LOOPBACK) $(TORCHRUN) -m examples.demo --engine $(ENGINE)

test: setup-all
	@scripts/check

test-all: setup-all
	@scripts/check -m ''

check: setup-trainers
	@scripts/check -m 'not vllm and not sglang and not matrix'

bench: setup-trainers
	@.venv/bin/python -m pytest benchmarks

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
