"""A compiled model gives the tokens and gradients of the same model without torch.compile."""

import copy

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from transformers import CompileConfig, DynamicCache

import kvprune
import zoo
from helpers import attach_uneven, random, random_ids
from kvprune.errors import PruneError
from kvprune.ops.attend.operator import soft_attention_in_graph
from kvprune.ops.attend.soft import soft_attention
from kvprune.ops.form import AttentionForm
from kvprune.ops.gate import Gate
from kvprune.ops.timeline import make_timeline

KINDS = ["gpt2", "llama", "qwen3", "gemma2"]


class Counting:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self, backend=lambda graph, inputs: graph.forward):
        self.backend, self.graphs = backend, []

    def __call__(self, graph, inputs):
        self.graphs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return self.backend(graph, inputs)

    def __deepcopy__(self, memo):
        return self  # `generate` copies its options

    @property
    def large(self) -> int:
        """Graphs of the model; hooks alone make none with so many operations."""
        return sum(nodes > 10 for nodes in self.graphs)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model_of(kind: str, **options) -> kvprune.Pruned:
    model = zoo.make(kind)
    model.generation_config.eos_token_id = None
    return attach_uneven(model.eval(), **options)


def decode(model, ids, steps: int, cache) -> torch.Tensor:
    """The logits of every step; which token comes next does not depend on them."""
    found = []
    with torch.no_grad():
        for step in range(steps):
            new = ids if step == 0 else random_ids(len(ids), 1, seed=step)
            found.append(model(new, past_key_values=cache).logits[:, -1])
    return torch.stack(found)


@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_for_all_steps(kind):
    pruned = model_of(kind)
    ids = random_ids(2, 9)
    want = decode(pruned.model, ids, 20, kvprune.PrunedCache(pruned))
    dropped = pruned.sparsity()
    backend = Counting()
    compiled = torch.compile(pruned.model, fullgraph=True, backend=backend, dynamic=True)
    cache = kvprune.PrunedCache(pruned)
    assert torch.equal(decode(compiled, ids, 3, cache), want[:3])
    before = backend.large
    # rows grow and shrink, and another cache comes: the same graphs
    assert torch.equal(decode(compiled, ids, 20, kvprune.PrunedCache(pruned)), want)
    # layers with a window are transformers' own: one more while they fill, one when they are full
    assert backend.large - before <= (2 if pruned.left_alone else 0)
    assert torch.equal(pruned.sparsity().per_layer, dropped.per_layer)
    assert 0 < dropped.total < 1


def test_one_function_is_one_graph():
    pruned = model_of("llama")
    ids, backend = random_ids(2, 9), Counting()

    @torch.compile(fullgraph=True, backend=backend)
    def read(ids, cache):
        return pruned.model(ids, past_key_values=cache).logits

    with torch.no_grad():
        want = pruned.model(ids).logits
        assert torch.equal(read(ids, kvprune.PrunedCache(pruned)), want)
        assert torch.equal(read(ids, None), want)
    assert len(backend.graphs) == 2  # with a cache, and without one


def test_generate_compiles_on_request():
    pruned = model_of("gpt2")
    ids = random_ids(3, 7)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "pad_token_id": 0}
    want = pruned.generate(ids, do_sample=False, **options)
    backend = Counting()
    config = CompileConfig(backend=backend, fullgraph=True, mode=None)
    got = pruned.generate(ids, do_sample=False, compile_config=config, **options)
    assert torch.equal(got, want)
    assert backend.large
    beams = {"num_beams": 2, "do_sample": False, **options}
    assert torch.equal(
        pruned.generate(ids, compile_config=config, **beams), pruned.generate(ids, **beams)
    )


def test_inductor_gives_the_same_tokens():
    pruned = model_of("llama")
    ids = random_ids(2, 7)
    want = pruned.generate(ids, do_sample=False, max_new_tokens=6, pad_token_id=0)
    config = CompileConfig(fullgraph=True, mode=None)
    got = pruned.generate(
        ids, do_sample=False, max_new_tokens=6, pad_token_id=0, compile_config=config
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize(("kind", "padded"), [("gpt2", False), ("gemma2", True)])
def test_training_has_the_same_gradients(kind, padded):
    pruned = model_of(kind, alpha=1.2)
    model = pruned.model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    ids = random_ids(2, 11)
    mask = None
    if padded:
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
    backend = Counting(aot_eager)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for alpha in (1.0, 1.3, 2.0):
        pruned.alpha = alpha
        found = []
        for run in (model, compiled):
            model.zero_grad()
            logits = run(ids, attention_mask=mask, use_cache=False).logits
            loss = logits.square().mean() + pruned.sparsity_loss()
            loss.backward()
            found.append([loss, *(p.grad for p in model.parameters() if p.grad is not None)])
        for got, want in zip(found[1], found[0], strict=True):
            torch.testing.assert_close(got, want)
        if alpha == 1.0:
            first = list(backend.graphs)
    assert backend.graphs == first  # another α is no other graph


def test_the_operator_is_sound():
    B, H, T, D = 1, 2, 5, 4
    q, k, v = (random(B, H, T, D, seed=i, dtype=torch.float32) for i in range(3))
    votes = (random(B, T, 3, seed=3).float(), random(B, T, 3, seed=4).float(), torch.tensor(0.5))
    inputs = [x.requires_grad_() for x in (q, k, v, *votes)]
    time = make_timeline(None, (B, T), torch.device("cpu"))
    form = AttentionForm(0.5, softcap=3.0, sinks=torch.zeros(H, requires_grad=True))
    alpha = torch.tensor(1.4, dtype=torch.float64)
    out, kept = soft_attention_in_graph(q, k, v, [votes], time, Gate("alpha", alpha), form)
    want, want_kept = soft_attention(q, k, v, [votes], time, Gate("alpha", 1.4), form)
    assert torch.equal(out, want)
    assert torch.equal(kept, want_kept)
    inputs.append(form.sinks)
    got = torch.autograd.grad(out.square().sum() + kept.sum(), inputs)
    expected = torch.autograd.grad(want.square().sum() + want_kept.sum(), inputs)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    flat = list(votes)
    torch.library.opcheck(
        torch.ops.kvprune.soft_attention.default,
        (q, k, v, form.sinks, flat, time.clock, time.visible_from, time.votable_from, False,
         "alpha", alpha, 0.5, 3.0, 0.0, torch.tensor(0)),
    )  # fmt: skip


def test_what_a_graph_cannot_do_is_refused():
    pruned = model_of("llama")
    ids = random_ids(2, 5)
    compiled = torch.compile(pruned.model, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"under torch.no_grad\(\), or without torch.compile"):
        compiled(ids)
    with torch.no_grad():
        with pytest.raises(Exception, match="DynamicCache cannot be pruned in a compiled model"):
            compiled(ids, past_key_values=DynamicCache())
        other = kvprune.attach(zoo.make("llama").eval(), kvprune.PruningConfig(rank=5))
        with pytest.raises(PruneError, match="made for another model or another method"):
            compiled(ids, past_key_values=kvprune.PrunedCache(other))


def test_copies_have_numbers_of_their_own():
    pruned = model_of("llama")
    ids = random_ids(2, 5)
    compiled = torch.compile(pruned.model, fullgraph=True, backend="eager")
    cache = kvprune.PrunedCache(pruned)
    with torch.no_grad():
        compiled(ids, past_key_values=cache)
        twin = copy.deepcopy(cache)
        compiled(random_ids(2, 1), past_key_values=twin)
    assert (cache.seen, twin.seen) == (5, 6)


def test_a_pass_that_broke_off_is_noticed():
    pruned = model_of("llama")
    compiled = torch.compile(pruned.model, fullgraph=True, backend="eager")
    cache = kvprune.PrunedCache(pruned)
    with torch.no_grad():
        compiled(random_ids(2, 5), past_key_values=cache)
        compiled(random_ids(2, 1), past_key_values=cache)
        store = cache.stores[1]
        table, store.table = store.table, None
        store.lazy_initialization = lambda *_: 1 / 0
        with pytest.raises(ZeroDivisionError):
            compiled(random_ids(2, 1), past_key_values=cache)
        store.table = table
        with pytest.raises(PruneError, match="broke off"):
            compiled(random_ids(2, 1), past_key_values=cache)


def test_commands_compile_on_request(tmp_path, monkeypatch, capsys):
    """The same text, and a clear word where there is no compiler."""
    from typer.testing import CliRunner

    import model_folders
    from kvprune.cli import app

    model_folders.byte_tokenizer().save_pretrained(tmp_path)
    model = zoo.make("gpt2", vocab_size=257)
    model.save_pretrained(tmp_path)
    attach_uneven(model).save(tmp_path / "adapter")
    backend = Counting()
    compile = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda model, **options: compile(model, **{**options, "backend": backend})
    )

    def run(*arguments, **kwargs):
        arguments = [*arguments, "--adapter", tmp_path / "adapter", "--max-new-tokens", 9]
        done = CliRunner().invoke(app, [str(argument) for argument in arguments], **kwargs)
        assert done.exception is None, done.exception
        return done

    want = run("generate", tmp_path, "Once").stdout
    assert run("generate", tmp_path, "Once", "--compile").stdout == want
    assert backend.large == 1
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    chat = ["chat", tmp_path, "--template", template]
    said = run(*chat, input="Hello\n").stdout
    assert run(*chat, "--compile", input="Hello\n").stdout == said
    assert backend.large == 2
    monkeypatch.setattr("kvprune.utils.compiling.why_not", lambda device: "there is no compiler")
    refused = run("generate", tmp_path, "Once", "--compile")
    assert refused.stdout == want
    assert "kvprune: not compiled: there is no compiler" in refused.stderr
    assert backend.large == 2


def test_no_compiler_is_said(monkeypatch):
    from kvprune.utils.compiling import why_not

    assert why_not("cpu") == ""
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("/nowhere/c++",))
    assert why_not("cpu") == "there is no C++ compiler; install g++, or set CXX to one"
