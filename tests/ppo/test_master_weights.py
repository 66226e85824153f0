"""AdamW over bfloat16 weights against AdamW over float32 ones."""

import copy

import torch

from integrations.ppo.strategy.master_weights import MASTER, MasterAdamW, to_bfloat16

RATE = 1e-4


def weights(dtype: torch.dtype) -> torch.nn.Parameter:
    first = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    return torch.nn.Parameter(first.to(dtype))


def steps(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, seeds: range) -> None:
    for seed in seeds:
        grad = torch.randn(64, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        parameter.grad = grad.to(parameter.dtype)
        optimizer.step()


def test_it_steps_what_it_does_not_round() -> None:
    plain, low, rounded = weights(torch.float32), weights(torch.bfloat16), weights(torch.bfloat16)
    ours = MasterAdamW([low], lr=RATE, weight_decay=0.1)
    steps(torch.optim.AdamW([plain], lr=RATE, weight_decay=0.1), plain, range(20))
    steps(ours, low, range(20))
    steps(torch.optim.AdamW([rounded], lr=RATE, weight_decay=0.1), rounded, range(20))
    assert torch.equal(ours.state[low][MASTER], plain.detach())
    assert torch.equal(low, plain.bfloat16())
    assert not torch.equal(rounded, low), "without masters steps are lost, or this shows nothing"
    assert {value.dtype for value in ours.state[low].values()} == {torch.float32}


def test_a_state_comes_back_bit_for_bit() -> None:
    whole, halted, resumed = (weights(torch.bfloat16) for _ in range(3))
    steps(MasterAdamW([whole], lr=RATE), whole, range(6))
    before, after = MasterAdamW([halted], lr=RATE), MasterAdamW([resumed], lr=RATE)
    steps(before, halted, range(3))
    with torch.no_grad():
        resumed.copy_(halted)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    assert torch.equal(after.state[resumed][MASTER], before.state[halted][MASTER])
    steps(after, resumed, range(3, 6))
    assert torch.equal(resumed, whole)


def test_buffers_keep_their_dtype() -> None:
    model = to_bfloat16(torch.nn.BatchNorm1d(4))
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
    assert {one.dtype for one in model.buffers()} == {torch.float32, torch.int64}
