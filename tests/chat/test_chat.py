"""A conversation on one cache equals, turn by turn, generate on all of it from scratch."""

import runpy
from pathlib import Path

import pytest
import torch

import kvprune
from helpers import uneven_gates
from kvprune import PruneError, tiny
from kvprune.adapters.pretrained import load_tokenizer
from kvprune.chat import Chat, engine
from kvprune.chat.sampling import Sampler
from kvprune.chat.template import Template

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TURNS = ["Once upon a time there was a girl.", "And what did she say?", "Why?"]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def dense():
    return tiny.load_model()


@pytest.fixture(scope="module")
def pruned():
    pruned = kvprune.attach(tiny.load_model(), kvprune.PruningConfig(rank=8))
    uneven_gates(pruned, spread=3.0)
    return pruned


@pytest.fixture(params=["pruned", "dense"])
def model(request):
    return request.getfixturevalue(request.param)


def written(chat) -> list[int]:
    """The tokens of the last answer."""
    return chat.tokens[len(chat.tokens) - chat.status().tokens :]


def from_scratch(chat, count: int) -> list[int]:
    """The slow way: the conversation up to the answer, read at once, and generate on it."""
    given = torch.tensor([chat.tokens[: len(chat.tokens) - chat.status().tokens]])
    out = chat.model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=count, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip
    return [token for token in out[0, given.shape[1] :].tolist() if token]


@pytest.mark.parametrize("chunk", [256, 7])
def test_turns_equal_generate_from_scratch(model, tokenizer, monkeypatch, chunk):
    monkeypatch.setattr(engine, "CHUNK", chunk)
    chat = Chat(model, tokenizer, system="Be brief.", max_new_tokens=15)
    read = []
    hook = chat.model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    answers = []
    for turn in TURNS:
        answers.append("".join(chat.say(turn)))
        count = chat.status().tokens
        assert count
        reads = list(read)
        assert written(chat) == from_scratch(chat, 15)
        read[:] = reads
    hook.remove()
    # every token was read once: the new ones of a turn, and no turn again
    assert sum(read) == chat.seen
    assert chat.seen >= len(chat.tokens) - 1
    assert [m["content"] for m in chat.messages if m["role"] == "assistant"] == answers
    # the template's text of it all is what was read
    assert Template(tokenizer).text(chat.tokens, special=True).startswith("system: Be brief.")


def test_sizes_of_the_cache(pruned, dense, tokenizer):
    chats = [Chat(model, tokenizer, max_new_tokens=20) for model in (pruned, dense)]
    for chat in chats:
        assert (chat.seen, chat.kept, chat.bytes, chat.dense_bytes) == (0, 0, 0, 0)
        list(chat.say(TURNS[0]))
    sparse, full = chats
    assert 0 < sparse.kept < 0.9 * sparse.seen
    assert sparse.dense_bytes == sparse.seen * 6 * 2 * 256 * 4
    assert full.kept == full.seen
    assert full.bytes == full.dense_bytes == full.seen * 6 * 2 * 256 * 4
    status = sparse.status()
    assert status.seen == sparse.seen
    assert status.tokens_per_second > 0


def test_the_trace_equals_that_of_one_pass(pruned, tokenizer):
    chat = Chat(pruned, tokenizer, max_new_tokens=12)
    for turn in TURNS:
        list(chat.say(turn))
    want = pruned.trace(chat.tokens[: chat.seen])[:, 0].numpy()
    got = chat.trace()
    assert (want < kvprune.NEVER).any()
    assert (got.drop_step[:, : chat.seen] == want).all()
    assert got.ids == tuple(chat.tokens)


@pytest.mark.parametrize("way", ["close", "stop", "broken"])
def test_an_interrupted_answer(model, tokenizer, way):
    chat = Chat(model, tokenizer, max_new_tokens=15)
    list(chat.say(TURNS[0]))
    answer = chat.say(TURNS[1])
    pieces = [next(answer) for _ in range(3)]
    if way == "close":
        answer.close()
    elif way == "stop":
        chat.stop()
        pieces += list(answer)
    else:
        # in the middle of the model: some layers have read the token, others not
        def interrupt(*_):
            raise KeyboardInterrupt

        hook = chat.model.transformer.h[3].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(answer)
        hook.remove()
        assert chat.seen == 0
    assert chat.status().ended == "stopped"
    assert chat.messages[-1] == {"role": "assistant", "content": "".join(pieces)}
    assert len(written(chat)) == len(chat.template.tokens("".join(pieces)))
    list(chat.say(TURNS[2]))
    assert written(chat) == from_scratch(chat, 15)
    assert chat.seen >= len(chat.tokens) - 1
    assert "".join(pieces) in chat.template.text(chat.tokens)


def test_stopped_before_the_first_word(pruned, tokenizer, monkeypatch):
    monkeypatch.setattr(engine, "CHUNK", 4)
    chat = Chat(pruned, tokenizer, max_new_tokens=10)
    hook = chat.model.register_forward_pre_hook(lambda *_: chat.stop())
    assert list(chat.say(TURNS[0])) == []
    hook.remove()
    assert chat.seen == 4
    assert chat.messages[-1]["content"] == ""
    list(chat.say(TURNS[1]))
    assert written(chat) == from_scratch(chat, 10)


def test_a_template_that_does_not_extend(pruned, tokenizer):
    """Earlier answers are written differently: all is read again, with a message."""
    messages = []
    chat = Chat(pruned, tokenizer, max_new_tokens=10, tell=messages.append)
    chat.template.tokenizer.chat_template = TEMPLATE.replace(
        "{{ m.content }}", "{{ m.content | upper if m.role == 'assistant' else m.content }}"
    )
    try:
        list(chat.say(TURNS[0]))
        assert messages == []
        list(chat.say(TURNS[1]))
        assert len(messages) == 1
        assert "cache is rebuilt" in messages[0]
        assert written(chat) == from_scratch(chat, 10)
        assert chat.messages[1]["content"].upper() in chat.template.text(chat.tokens)
    finally:
        tokenizer.chat_template = TEMPLATE


def test_another_system_message_and_reset(pruned, tokenizer):
    messages = []
    chat = Chat(pruned, tokenizer, max_new_tokens=10, tell=messages.append)
    first = list(chat.say(TURNS[0]))
    chat.system = "Speak like a pirate."
    list(chat.say(TURNS[1]))
    assert len(messages) == 1
    assert chat.template.text(chat.tokens).startswith("system: Speak like a pirate.")
    assert written(chat) == from_scratch(chat, 10)
    chat.reset()
    assert (chat.seen, chat.messages, chat.tokens) == (0, [], [])
    chat.system = ""
    assert list(chat.say(TURNS[0])) == first


def test_limit_of_positions(pruned, tokenizer):
    messages = []
    chat = Chat(pruned, tokenizer, max_new_tokens=10, tell=messages.append)
    list(chat.say(TURNS[0]))
    before = (list(chat.messages), list(chat.tokens), chat.seen)
    with pytest.raises(PruneError, match=r"512 positions \(pruning frees memory, not positions\)"):
        list(chat.say("word " * 600))
    assert before == (chat.messages, chat.tokens, chat.seen)
    assert messages == []
    # so long that six tokens of room are left
    count = next(n for n in range(480) if _length(chat, "a " * n) == 512 - 6)
    list(chat.say("a " * count))
    assert len(messages) == 1
    assert "the answer ends after 6 tokens at the latest" in messages[0]
    assert chat.status().ended in ("length", "end")
    assert len(chat.tokens) <= 512
    with pytest.raises(PruneError, match="reset"):
        list(chat.say("More?"))


def _length(chat, text: str) -> int:
    prompt = chat.template.prompt([*chat.messages, {"role": "user", "content": text}])
    return len(chat.tokens) + len(chat.template.tokens(prompt[len(chat._text) :]))


def test_errors(pruned, dense, tokenizer):
    with pytest.raises(PruneError, match=r"has no chat template.*--template"):
        Chat(dense, load_tokenizer("tiny"))
    with pytest.raises(PruneError, match="pass the Pruned that attach"):
        Chat(pruned.model, tokenizer)
    with pytest.raises(PruneError, match="max_new_tokens=0"):
        Chat(dense, tokenizer, max_new_tokens=0)
    chat = Chat(dense, tokenizer)
    with pytest.raises(PruneError, match="empty"):
        list(chat.say("  "))
    with pytest.raises(PruneError, match="dense model forgets nothing"):
        chat.trace()
    with pytest.raises(PruneError, match="say something"):
        Chat(pruned, tokenizer).trace()
    answer = chat.say("One")
    next(answer)
    with pytest.raises(PruneError, match="not done"):
        list(chat.say("Two"))
    answer.close()
    dense.train()
    with pytest.raises(PruneError, match="training mode"):
        Chat(dense, tokenizer)
    dense.eval()
    tokenizer.chat_template = "{{ raise_exception('no system here') }}"
    with pytest.raises(PruneError, match="no system here"):
        list(chat.say("Hello"))
    tokenizer.chat_template = TEMPLATE


def test_sampling():
    logits = torch.tensor([0.1, 0.5, 0.25, 0.15]).log()

    def drawn(temperature, top_p, seed=0):
        sample = Sampler(temperature, top_p, seed, torch.device("cpu"))
        return [sample(logits) for _ in range(300)]

    assert set(drawn(0.0, 1.0)) == {1}
    assert set(drawn(1.0, 0.4)) == {1}
    assert set(drawn(1.0, 0.7)) == {1, 2}
    assert set(drawn(1.0, 1.0)) == {0, 1, 2, 3}
    assert drawn(1.0, 1.0) == drawn(1.0, 1.0) != drawn(1.0, 1.0, seed=1)
    assert drawn(1.0, 1.0).count(1) == pytest.approx(150, abs=30)
    assert drawn(0.5, 1.0).count(1) > drawn(1.0, 1.0).count(1) + 20
    for bad in ({"temperature": -1, "top_p": 1}, {"temperature": 1, "top_p": 0}):
        with pytest.raises(PruneError, match="must be"):
            Sampler(**bad, seed=0, device=torch.device("cpu"))


def test_an_incomplete_character_is_held_back(tokenizer):
    template = Template(tokenizer)
    ids = template.tokens("süß 🙂!")
    shown, pieces = 0, []
    for i in range(1, len(ids) + 1):
        piece = template.piece(ids[:i], shown)
        pieces.append(piece)
        shown += len(piece)
    assert "".join(pieces) == "süß 🙂!"
    assert "" in pieces
    assert template.piece(ids[:1], 0, last=True) == template.text(ids[:1])


def test_the_example_runs(monkeypatch, pruned, tokenizer, capsys):
    """examples/chat.py, with the small model in place of the one that it names."""
    asked = []
    monkeypatch.setattr("kvprune.load", lambda name: asked.append(name) or pruned)
    monkeypatch.setattr("kvprune.adapters.pretrained.load_tokenizer", lambda name: tokenizer)
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "chat.py"))
    assert asked == ["smollm2-135m"]
    assert capsys.readouterr().out.count("of the bytes]") == 2
