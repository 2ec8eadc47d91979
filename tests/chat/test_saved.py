"""A conversation that was saved and loaded goes on as one that was never stopped."""

import json

import pytest
import torch
from safetensors.torch import load_file
from test_chat import TEMPLATE, TURNS

import kvprune
from helpers import uneven_gates
from kvprune import BudgetError, PruneError, Snapshot, tiny
from kvprune.adapters.pretrained import load_tokenizer
from kvprune.chat import Chat, engine

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 3}


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def attached():
    pruned = kvprune.attach(tiny.load_model(), kvprune.PruningConfig(rank=8))
    uneven_gates(pruned, spread=3.0)
    return pruned


@pytest.fixture(scope="module")
def pruned():
    return attached()


@pytest.fixture(scope="module")
def dense():
    return tiny.load_model()


def state(chat):
    """All that the next answer depends on, besides the cache."""
    return chat.messages, chat.tokens, chat._text, chat.seen, chat.system, chat.kept, chat.bytes


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["pruned", "int8", "dense"])
def test_resumed_equals_never_stopped(request, tokenizer, tmp_path, kind, sampling):
    model = request.getfixturevalue("dense" if kind == "dense" else "pruned")
    storage = {"kv": "int8"} if kind == "int8" else {}
    options = {"system": "Be brief.", "max_new_tokens": 12, **sampling}
    whole = Chat(model, tokenizer, **options, **storage)
    talk = Chat(model, tokenizer, **options, **storage)
    for number, turn in enumerate(TURNS):
        list(whole.say(turn))
        list(talk.say(turn))
        assert talk.tokens == whole.tokens
        file = talk.save(tmp_path / f"{number}.safetensors")
        # all settings are the file's; one that was talking before forgets what it said
        talk = Chat(model, tokenizer, max_new_tokens=4, temperature=3.0, seed=number, **storage)
        if number:
            list(talk.say("Something else."))
        talk.load(file)
        assert state(talk)[:-1] == state(whole)[:-1]
    list(whole.say("Go on."))
    list(talk.say("Go on."))
    assert talk.tokens == whole.tokens
    assert len(set(talk.tokens)) > 20
    if kind != "dense":
        assert (talk.trace().drop_step == whole.trace().drop_step).all()
        assert talk.kept < talk.seen


@pytest.mark.parametrize("moment", ["in the answer", "in the message", "broken"])
def test_tokens_that_are_not_read_yet_go_along(pruned, tokenizer, tmp_path, monkeypatch, moment):
    monkeypatch.setattr(engine, "CHUNK", 4)
    options = {"max_new_tokens": 12, **SAMPLED}
    whole, talk = (Chat(pruned, tokenizer, **options) for _ in range(2))
    for chat in (whole, talk):
        list(chat.say(TURNS[0]))
        hook = None
        if moment == "in the message":
            hook = chat.model.register_forward_pre_hook(lambda *_, chat=chat: chat.stop())
        answer = chat.say(TURNS[1])
        if moment == "in the message":
            assert list(answer) == []
        else:
            next(answer)
            next(answer)
        if moment == "broken":
            hook = chat.model.transformer.h[3].register_forward_pre_hook(_interrupt)
            with pytest.raises(KeyboardInterrupt):
                list(answer)
        answer.close()
        if hook is not None:
            hook.remove()
    assert talk.seen < len(talk.tokens)
    assert (talk.seen == 0) == (moment == "broken")
    file = talk.save(tmp_path / "chat")
    resumed = Chat(pruned, tokenizer)
    resumed.load(file)
    assert resumed.seen == talk.seen
    for chat in (whole, resumed):
        list(chat.say(TURNS[2]))
    assert resumed.tokens == whole.tokens


def _interrupt(*_):
    raise KeyboardInterrupt


def test_what_is_refused_changes_nothing(pruned, dense, tokenizer, tmp_path):
    chat = Chat(pruned, tokenizer, max_new_tokens=8)
    list(chat.say(TURNS[0]))
    file = chat.save(tmp_path / "chat")

    def refuses(says, talk, path=file):
        before = *state(talk), talk.sampler, talk._cache
        with pytest.raises(PruneError, match=says):
            talk.load(path)
        assert (*state(talk), talk.sampler, talk._cache) == before

    def talking(model, **options):
        talk = Chat(model, tokenizer, max_new_tokens=4, **options)
        list(talk.say(TURNS[2]))
        return talk

    refuses("there is no snapshot", talking(pruned), tmp_path / "nothing")
    refuses("of a pruned model, but this is a dense one", talking(dense))
    refuses(r"kv \(float32, here int8\)", talking(pruned, kv="int8"))
    pruned.adjust(threshold=0.5)
    refuses(r"threshold \(0.0, here 0.5\)", talking(pruned))
    pruned.adjust(threshold=0.0, protect_first=1)
    refuses(r"protect_first \(0, here 1\)", talking(pruned))
    pruned.adjust(protect_first=0)
    other = attached()
    with torch.no_grad():
        other.interactions[0].key.weight.mul_(2)
    refuses("adapter", talking(other))
    with torch.no_grad():
        other.interactions[0].key.weight.div_(2)
        other.model.get_input_embeddings().weight.mul_(2)
    refuses("model", talking(other))
    of_dense = talking(dense)
    dense_file = of_dense.save(tmp_path / "dense")
    refuses("of a dense model, but this is a pruned one", talking(pruned), dense_file)
    small = Chat(pruned, tokenizer, budget=chat.bytes // 2)
    refuses("more bytes do not fit", small)
    # and it goes on
    list(of_dense.say(TURNS[0]))


def saved_with(snapshot, file, **notes):
    """The file with other notes."""
    changed = {**snapshot.notes, **notes}
    parts = snapshot.tokens, snapshot.layers, snapshot.others, snapshot.fingerprint
    return Snapshot(*parts, changed).save(file)


@pytest.mark.parametrize(
    ("notes", "says"),
    [
        ({"kind": "prefix"}, "holds a prefix, not a chat; use kvprune generate --prefix"),
        ({"kind": None}, "holds a snapshot, not a chat"),
        ({"messages": "hi"}, "no valid messages"),
        ({"messages": [{"role": "user"}]}, "no valid messages"),
        ({"tokens": [1.5] * 100}, "no valid tokens"),
        ({"tokens": [1]}, "no valid tokens"),
        ({"text": None}, "no valid text"),
        ({"sampler": {}}, "sampling is damaged"),
        ({"sampler": {"temperature": 1, "top_p": 1, "device": "cpu", "random": "00"}}, "damaged"),
        ({"sampler": {"temperature": 1, "top_p": 1, "device": "cuda", "random": ""}}, "use --dev"),
    ],
)
def test_damaged_notes(pruned, tokenizer, tmp_path, notes, says):
    chat = Chat(pruned, tokenizer, max_new_tokens=3)
    list(chat.say("Hello"))
    snapshot = Snapshot.load(chat.save(tmp_path / "chat"))
    file = saved_with(snapshot, tmp_path / "changed", **notes)
    before = state(chat)
    with pytest.raises(PruneError, match=says):
        chat.load(file)
    assert state(chat) == before


def test_damaged_files(pruned, tokenizer, tmp_path):
    chat = Chat(pruned, tokenizer, max_new_tokens=3)
    list(chat.say("Hello"))
    file = chat.save(tmp_path / "chat")
    data = file.read_bytes()
    newer = data.replace(b"kvprune snapshot 1", b"kvprune snapshot 2")
    for damaged, says in [(data[:-9], "damaged"), (b"hi", "damaged"), (newer, "format")]:
        file.write_bytes(damaged)
        before = state(chat)
        with pytest.raises(PruneError, match=says):
            chat.load(file)
        assert state(chat) == before
    file.write_bytes(data)
    snapshot = Snapshot.load(file)
    fewer = Snapshot(
        snapshot.tokens, snapshot.layers[:-1], (), snapshot.fingerprint, snapshot.notes
    )
    with pytest.raises(PruneError, match="the snapshot is damaged"):
        chat.load(fewer.save(tmp_path / "fewer"))
    assert state(chat) == before


def test_one_file_without_code(pruned, tokenizer, tmp_path):
    """Tensors and JSON: any reader of safetensors opens it."""
    chat = Chat(pruned, tokenizer, max_new_tokens=3)
    list(chat.say("Hello"))
    file = chat.save(tmp_path / "chat")
    assert [path.name for path in tmp_path.iterdir()] == ["chat"]
    held = load_file(file)
    assert held["layers.0.token"].tolist() == chat._cache.store(0).table.row(0)["token"].tolist()
    size = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + size])
    notes = json.loads(header["__metadata__"]["about"])["notes"]
    assert notes["messages"] == chat.messages


def test_nothing_to_save_and_no_place_for_it(pruned, tokenizer, tmp_path):
    chat = Chat(pruned, tokenizer, max_new_tokens=3)
    with pytest.raises(PruneError, match="say something first"):
        chat.save(tmp_path / "chat")
    answer = chat.say("Hello")
    next(answer)
    for action in (chat.save, chat.load):
        with pytest.raises(PruneError, match="not done"):
            action(tmp_path / "chat")
    answer.close()
    with pytest.raises(PruneError, match="there is no folder"):
        chat.save(tmp_path / "new" / "chat")
    assert list(tmp_path.iterdir()) == []


def test_a_budget_ends_the_answer_and_not_the_conversation(pruned, tokenizer):
    free = Chat(pruned, tokenizer, max_new_tokens=40)
    list(free.say(TURNS[0]))
    chat = Chat(pruned, tokenizer, max_new_tokens=40, budget=int(free.bytes * 0.9))
    with pytest.raises(BudgetError, match="bytes do not fit") as raised:
        list(chat.say(TURNS[0]))
    assert raised.value.rows == ()
    count = chat.status().tokens
    assert 0 < count < free.status().tokens
    assert chat.tokens == free.tokens[: len(chat.tokens)]
    assert chat.messages[-1]["content"] == chat.template.text(chat.tokens[-count:])
    # what was read is still there
    assert chat.seen == len(chat.tokens) - 1
    assert chat.bytes <= free.bytes * 0.9
    before = list(chat.messages), list(chat.tokens), chat._text
    # a message that does not fit was never said, however much of it was read
    with pytest.raises(BudgetError):
        list(chat.say("word " * 300))
    assert (chat.messages, chat.tokens, chat._text) == before
    assert chat.seen <= len(chat.tokens)
    # with room again it goes on
    chat._caches, chat._cache = free._caches, None
    list(chat.say(TURNS[1]))
    other = Chat(pruned, tokenizer, max_new_tokens=40)
    other.messages, other.tokens, other._text = before
    list(other.say(TURNS[1]))
    assert chat.tokens == other.tokens


def test_a_message_of_which_a_part_was_read_leaves_no_trace(pruned, tokenizer, monkeypatch):
    """A budget that refuses a later chunk in its first layer, before anything has changed."""
    monkeypatch.setattr(engine, "CHUNK", 4)
    chat, other = (Chat(pruned, tokenizer, max_new_tokens=8) for _ in range(2))
    for talk in (chat, other):
        list(talk.say(TURNS[0]))
    before, end = state(chat), chat.seen + 8

    def refuse(module, args):
        if chat.seen >= end:
            raise BudgetError(1, 2, 3)

    hook = chat.model.register_forward_pre_hook(refuse)
    with pytest.raises(BudgetError):
        list(chat.say("And then I said a good deal more."))
    hook.remove()
    assert state(chat)[:3] == before[:3]
    for talk in (chat, other):
        list(talk.say(TURNS[1]))
    assert chat.tokens == other.tokens
    assert chat.kept == other.kept


def test_a_dense_model_has_no_budget(dense, tokenizer):
    with pytest.raises(PruneError, match="the model is dense: there is no budget"):
        Chat(dense, tokenizer, budget="1MB")
    with pytest.raises(PruneError, match="the model is dense: there is no kv"):
        Chat(dense, tokenizer, kv="int8")
