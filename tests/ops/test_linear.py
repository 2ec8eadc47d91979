"""Linear layers with few rows: the kernel against plain torch, and models that use it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zoo
from helpers import random, random_ids
from kvprune.integration import few_rows
from kvprune.integration.few_rows import slow_down, speed_up
from kvprune.ops.linear import LINEAR, MOST_ROWS, linear
from kvprune.ops.linear.packed import can_pack

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("backend", LINEAR.available())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 1, 1), (1, 7, 33), (4, 65, 130)])
@pytest.mark.parametrize("biased", [False, True])
def test_against_float64(backend, dtype, rows, outputs, inputs, biased):
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, seed=1, dtype=dtype)
    bias = random(outputs, seed=2, dtype=dtype) if biased else None
    want = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    got = linear(x, weight, bias, backend)
    assert got.dtype is dtype
    # one rounding of the result, and float32's of the sum
    torch.testing.assert_close(got, want.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_views_are_read_as_they_are():
    x, weight = random(6, 40, dtype=torch.bfloat16), random(40, 18, dtype=torch.bfloat16)
    want = F.linear(x[::2, ::2].float(), weight.T[:, ::2].float()).bfloat16()
    torch.testing.assert_close(linear(x[::2, ::2], weight.T[:, ::2]), want)


def test_the_operator_is_sound():
    weight, bias = random(5, 8).float(), random(5).float()
    torch.library.opcheck(
        torch.ops.kvprune.linear.default, (random(2, 8).float(), weight, bias),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


def test_a_model_that_is_sped_up(monkeypatch):
    model = zoo.make("llama").eval()
    calls = []
    monkeypatch.setattr(
        "kvprune.integration.few_rows.linear",
        lambda x, *rest: calls.append(len(x)) or linear(x, *rest),
    )
    few, many = random_ids(2, 2), random_ids(2, MOST_ROWS)
    with torch.no_grad():
        want = model(few).logits, model(many).logits
        speed_up(model)
        speed_up(model)  # once is enough
        torch.testing.assert_close(model(few).logits, want[0])
        assert calls
        assert set(calls) <= {2, 4}
        calls.clear()
        assert torch.equal(model(many, logits_to_keep=many.shape[1]).logits, want[1])
        assert not calls
        twin = copy.deepcopy(model)
        for weight in model.parameters():
            weight.zero_()
        torch.testing.assert_close(twin(few).logits, want[0])  # its own weights
        assert calls
    slow_down(twin)
    assert torch.equal(twin(few).logits, want[0])
    assert not any("forward" in vars(module) for module in twin.modules())


def test_gradients_are_torchs():
    layer = torch.nn.Linear(6, 3)
    speed_up(layer)
    x = random(2, 6).float().requires_grad_()
    layer(x).sum().backward()
    assert torch.allclose(x.grad, layer.weight.sum(0).expand(2, -1))
    assert layer.weight.grad is not None


packs = pytest.mark.skipif(
    not can_pack(torch.zeros(4, 4, dtype=torch.bfloat16)),
    reason="this CPU does not compute in bfloat16",
)


@packs
@pytest.mark.parametrize("rows", [1, 3, 17, 130])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_weights(rows, biased):
    layer = nn.Linear(40, 56, bias=biased).bfloat16().requires_grad_(False)
    x = random(2, rows, 40, dtype=torch.float32).bfloat16()
    want = nn.functional.linear(
        x.double(), layer.weight.double(), layer.bias.double() if biased else None
    )
    speed_up(layer)
    packed = vars(layer)["_packed"]
    assert packed.is_of(layer.weight)
    torch.testing.assert_close(layer(x).double(), want, atol=0.02, rtol=0.01)


@packs
def test_packed_weights_follow_the_layer():
    layer = nn.Linear(8, 8, bias=False).bfloat16().requires_grad_(False)
    x = torch.ones(5, 8, dtype=torch.bfloat16)
    speed_up(layer)
    layer.weight.zero_()
    assert layer(x).count_nonzero() == 0
    layer.weight = nn.Parameter(torch.eye(8).bfloat16(), requires_grad=False)
    assert layer(x).equal(x)
    # a copy has weights of its own
    twin = copy.deepcopy(layer)
    twin.weight.zero_()
    assert twin(x).count_nonzero() == 0
    slow_down(layer)
    assert "_packed" not in vars(layer)


@packs
def test_packed_weights_in_a_graph():
    """One graph for any number of rows, which follows the layer's weights."""
    layer = nn.Linear(40, 56, bias=False).bfloat16().requires_grad_(False)
    speed_up(layer)
    seen = []
    compiled = torch.compile(
        layer, fullgraph=True, dynamic=True, backend=lambda graph, _: seen.append(graph) or graph
    )
    for rows in (17, 3, 5):
        x = random(2, rows, 40, dtype=torch.float32).bfloat16()
        assert torch.equal(compiled(x), layer(x))
    layer.weight.zero_()
    assert compiled(x).count_nonzero() == 0
    assert len(seen) == 1
    calls = [str(node.target) for node in seen[0].graph.nodes if node.op == "call_function"]
    assert calls == ["kvprune.packed_linear"]


@packs
def test_the_operator_of_packed_weights_is_sound():
    layer = nn.Linear(8, 5).bfloat16().requires_grad_(False)
    speed_up(layer)
    x = random(2, 3, 8, dtype=torch.float32).bfloat16()
    torch.library.opcheck(
        torch.ops.kvprune.packed_linear.default,
        (vars(layer)["_packed"].handle, x, layer.weight, layer.bias),
        test_utils=("test_schema", "test_faketensor"),
    )


@packs
def test_no_second_copy_without_memory(monkeypatch):
    monkeypatch.setattr(few_rows, "available", lambda: 100)
    layer = nn.Linear(8, 8).bfloat16()
    speed_up(layer)
    assert "_packed" not in vars(layer)
    assert "forward" in vars(layer)
