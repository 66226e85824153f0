"""The quick walk sees what torch's own sees."""

import weakref

import torch
from torch import nn

from wsync.glance import Watch
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


def test_what_cannot_be_told_at_a_glance_is_told_by_a_walk() -> None:
    sparse = nn.Linear(2, 2)
    sparse.register_buffer("index", torch.eye(3).to_sparse())
    watch = Watch()
    first, second = watch.look(sparse), watch.look(sparse)
    assert first.key != second.key
    assert {id(tensor) for tensor in first.tensors} == {id(tensor) for _, tensor, _ in named_tensors(sparse)}


def test_a_glance_sees_every_change() -> None:
    linear = nn.Linear(3, 3)
    module = nn.Sequential(linear, nn.BatchNorm1d(3))
    watch = Watch()
    seen = [watch.look(module).key]

    def look() -> None:
        assert watch.look(module).key not in seen
        seen.append(watch.look(module).key)
        assert watch.look(module).key == seen[-1]

    assert watch.look(module).key == seen[0]
    weight = linear.weight
    weight.data = weight.data.t()
    look()
    weight.data = weight.data.clone()
    look()
    linear.weight = nn.Parameter(weight.data)
    look()
    module[1].register_buffer("more", torch.zeros(1))
    look()
    module[1]._buffers = {("other" if name == "more" else name): b for name, b in module[1]._buffers.items()}
    look()
    module[1]._parameters["other"] = nn.Parameter(torch.zeros(1))
    look()
    module[1]._parameters["third"], module[1]._parameters["other"] = module[1]._parameters["other"], None
    look()
    module.append(nn.Identity())
    look()
    module[2] = nn.Identity()
    look()
    module[1]._parameters.clear()
    look()


def test_a_watch_tells_modules_apart_and_keeps_none_alive() -> None:
    watch, first = Watch(), nn.Linear(2, 2)
    key = watch.look(first).key
    second = nn.Linear(2, 2)
    assert watch.look(second).key != key
    assert [id(tensor) for tensor in watch.look(first).tensors] == [id(first.weight), id(first.bias)]
    gone = weakref.ref(first), weakref.ref(first.weight)
    del first
    assert [thing() for thing in gone] == [None, None]
