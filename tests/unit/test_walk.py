"""The quick walk sees what torch's own sees."""

import torch
from torch import nn

from wsync.walk import named_modules, named_tensors


class Tree(nn.Module):
    """Ties, a shared child, an absent child, buffers, nesting."""

    def __init__(self) -> None:
        super().__init__()
        linear = nn.Linear(3, 3)
        self.first = nn.Sequential(linear, nn.BatchNorm1d(3))
        self.again = linear
        self.none = None
        self.register_module("absent", None)
        self.register_parameter("empty", None)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.again.weight
        self.register_buffer("table", torch.arange(4), persistent=False)
        self.last = nn.ModuleDict({"ab": nn.Linear(2, 2)})


def test_the_same_modules_and_tensors_in_the_same_order() -> None:
    tree = Tree()
    assert [module for _, module in named_modules(tree)] == list(tree.modules())
    assert [name for name, _, is_parameter in named_tensors(tree) if is_parameter] == [
        name for name, _ in tree.named_parameters()
    ]
    assert [name for name, _, is_parameter in named_tensors(tree) if not is_parameter] == [
        name for name, _ in tree.named_buffers()
    ]
    live = dict([*tree.named_parameters(), *tree.named_buffers()])
    assert all(tensor is live[name] for name, tensor, _ in named_tensors(tree))
