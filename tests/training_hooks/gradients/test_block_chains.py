from loopscope.training_hooks.gradients.gradient_flow import find_chains
from torch import nn


class Block(nn.Module):
    """A block with an inner stack."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


class Other(Block):
    """A block of another class."""


def model(**children: nn.Module) -> nn.Module:
    root = nn.Module()
    for name, child in children.items():
        root.add_module(name, child)
    return root


def stack(count: int, kind: type[nn.Module] = Block) -> nn.ModuleList:
    return nn.ModuleList(kind() for _ in range(count))


def test_stack_of_one_class_is_a_chain():
    """Modules inside its blocks form no separate chain."""
    chains = find_chains(model(embedding=nn.Embedding(3, 2), blocks=stack(3), head=nn.Linear(2, 3)))
    assert chains == {"blocks": ["blocks.0", "blocks.1", "blocks.2"]}


def test_several_stacks_are_separate_chains():
    """The chains have the order of the model."""
    root = model(encoder=model(layers=stack(2)), decoder=model(layers=stack(3, Other)))
    chains = find_chains(root)
    assert [(name, len(blocks)) for name, blocks in chains.items()] == [("encoder.layers", 2), ("decoder.layers", 3)]


def test_mixed_stack_uses_most_frequent_class():
    """Only modules with parameters are counted."""
    mlp = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.ReLU(), nn.ReLU(), nn.Linear(8, 3))
    assert find_chains(mlp) == {"model": ["0", "5"]}
    assert find_chains(nn.Sequential(nn.Embedding(3, 2), nn.Sequential(Block(), Block()))) == {"1": ["1.0", "1.1"]}


def test_stack_named_model_keeps_root_chain():
    """The chain of the root module gets another name."""
    root = nn.Sequential(Block(), nn.Sequential(Block(), Block()), Block())
    root.add_module("model", stack(2))
    assert find_chains(root) == {"(model)": ["0", "2"], "1": ["1.0", "1.1"], "model": ["model.0", "model.1"]}


def test_single_block_stack_is_not_a_chain():
    """A stack inside the single block is found instead."""
    inner = ["blocks.0.inner.0", "blocks.0.inner.2", "blocks.0.inner.4"]
    assert find_chains(model(blocks=stack(1))) == {"blocks.0.inner": inner}
    assert find_chains(model(a=nn.Linear(2, 2), b=nn.Linear(2, 2))) == {}


def test_shared_module_is_one_block():
    shared = Block()
    chains = find_chains(model(blocks=nn.ModuleList([shared, Block(), shared])))
    assert chains == {"blocks": ["blocks.0", "blocks.1"]}


def test_patterns_stop_at_dots():
    """Each pattern makes one chain, and a pattern with fewer than two matches makes none."""
    root = model(layer1=stack(2), layer2=stack(1), rest=nn.Linear(2, 2))
    assert find_chains(root, "layer?.*") == {"layer?.*": ["layer1.0", "layer1.1", "layer2.0"]}
    assert list(find_chains(root, "layer1.*.inner, *").values()) == [
        ["layer1.0.inner", "layer1.1.inner"],
        ["layer1", "layer2", "rest"],
    ]
    assert find_chains(root, "layer2.*") == find_chains(root, "nothing") == {}


def test_blocks_are_found_in_the_containers_of_torch():
    transformer = nn.Transformer(4, 2, num_encoder_layers=2, num_decoder_layers=3, dim_feedforward=4, batch_first=True)
    assert list(find_chains(transformer)) == ["encoder.layers", "decoder.layers"]
