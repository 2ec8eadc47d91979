"""A prefix that was read once and saved: what follows it is as if all had been read at once."""

import pytest
import torch
from tokenizers.processors import TemplateProcessing

import model_folders
import zoo
from helpers import attach_uneven
from kvprune import BudgetError, PrunedCache, PruneError, Snapshot
from kvprune.chat import Chat
from kvprune.chat.completion import complete, save_prefix

PREFIX = "There was a long story that everybody knew by heart, and it went on. "
PROMPTS = ["One", "Two, and then some more", "Three"]
OPTIONS = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture
def tokenizer():
    return model_folders.byte_tokenizer()


def model(kind="llama"):
    return zoo.make(kind, vocab_size=257, max_position_embeddings=200).eval()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("kind", ["pruned", "dense"])
def test_prompts_after_a_prefix(tokenizer, tmp_path, family, kind):
    host = model(family)
    given = host if kind == "dense" else attach_uneven(host)
    file = tmp_path / "prefix"
    snapshot = save_prefix(given, tokenizer, PREFIX, file)
    assert snapshot.tokens == len(PREFIX)
    whole = complete(given, tokenizer, [PREFIX + p for p in PROMPTS], **OPTIONS)
    after = complete(given, tokenizer, PROMPTS, prefix=file, **OPTIONS)
    assert after.texts == whole.texts
    assert after.new_tokens == whole.new_tokens
    assert after.kept_share == pytest.approx(whole.kept_share)
    assert (after.kept_share < 1) == (kind != "dense")
    for prompt, text in zip(PROMPTS, whole.texts, strict=True):
        alone = complete(given, tokenizer, [prompt], prefix=file, **OPTIONS)
        assert alone.texts == [text]
    without = complete(given, tokenizer, PROMPTS, **OPTIONS)
    assert without.texts != whole.texts


def test_int8_equals_a_cache_that_was_never_saved(tokenizer, tmp_path):
    """Not a text read at once: there the prompt sees its own tokens before they are rounded."""
    pruned, file = attach_uneven(model()), tmp_path / "prefix"
    save_prefix(pruned, tokenizer, PREFIX, file, kv="int8")
    ids = tokenizer(PREFIX + PROMPTS[1], return_tensors="pt").input_ids
    cache = PrunedCache(pruned, kv="int8")
    with torch.no_grad():
        pruned.model(ids[:, : len(PREFIX)], past_key_values=cache)
    out = pruned.model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, pad_token_id=0,
        eos_token_id=tokenizer.eos_token_id, **OPTIONS,
    )  # fmt: skip
    want = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    after = complete(pruned, tokenizer, [PROMPTS[1]], prefix=file, kv="int8", **OPTIONS)
    assert after.texts == [want]
    assert after.cache_bytes == cache.nbytes


def test_only_what_is_new_is_read(tokenizer, tmp_path):
    pruned = attach_uneven(model())
    save_prefix(pruned, tokenizer, PREFIX, tmp_path / "prefix")
    read = []
    hook = pruned.model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    complete(pruned, tokenizer, [PROMPTS[1]], prefix=tmp_path / "prefix", **OPTIONS)
    hook.remove()
    assert read[0] == len(PROMPTS[1])
    assert set(read[1:]) == {1}


def test_a_first_token_is_written_once(tokenizer, tmp_path):
    """By tokenizers that begin every text with one, as Llama's does."""
    first = ("<end>", tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<end> $A", special_tokens=[first]
    )
    pruned, file = attach_uneven(model()), tmp_path / "prefix"
    assert save_prefix(pruned, tokenizer, PREFIX, file).tokens == len(PREFIX) + 1
    whole = complete(pruned, tokenizer, [PREFIX + "One"], **OPTIONS)
    after = complete(pruned, tokenizer, ["One"], prefix=file, **OPTIONS)
    assert (after.texts, after.dense_bytes) == (whole.texts, whole.dense_bytes)
    save_prefix(pruned, tokenizer, "One", tmp_path / "both", prefix=file)
    assert Snapshot.load(tmp_path / "both").tokens == len(PREFIX) + 4


def test_a_prefix_after_a_prefix(tokenizer, tmp_path):
    pruned = attach_uneven(model())
    save_prefix(pruned, tokenizer, PREFIX[:30], tmp_path / "first")
    save_prefix(pruned, tokenizer, PREFIX[30:], tmp_path / "both", prefix=tmp_path / "first")
    save_prefix(pruned, tokenizer, PREFIX, tmp_path / "whole")
    both, whole = (Snapshot.load(tmp_path / name) for name in ("both", "whole"))
    assert both.notes == whole.notes
    got, want = (
        [state["token"].sort().values.tolist() for state in snapshot.layers]
        for snapshot in (both, whole)
    )
    assert got == want
    texts = [
        complete(pruned, tokenizer, ["And"], prefix=tmp_path / name, **OPTIONS).texts
        for name in ("both", "whole")
    ]
    assert texts[0] == texts[1]


def test_sliding_windows_refuse_pads_in_the_middle(tokenizer, tmp_path):
    pruned = attach_uneven(model("gemma2"))
    file = tmp_path / "prefix"
    save_prefix(pruned, tokenizer, PREFIX, file)
    whole = complete(pruned, tokenizer, [PREFIX + "One"], **OPTIONS)
    assert complete(pruned, tokenizer, ["One"], prefix=file, **OPTIONS).texts == whole.texts
    with pytest.raises(PruneError, match=r"sliding windows.*one by one"):
        complete(pruned, tokenizer, PROMPTS, prefix=file, **OPTIONS)


def test_refused(tokenizer, tmp_path):
    host = model()
    pruned, file = attach_uneven(host), tmp_path / "prefix"
    save_prefix(pruned, tokenizer, PREFIX, file)
    with pytest.raises(PruneError, match="kvprune chat --resume"):
        complete(pruned, tokenizer, ["One"], prefix=file, as_chat=True)
    with pytest.raises(PruneError, match=r"kv \(float32, here int8\)"):
        complete(pruned, tokenizer, ["One"], prefix=file, kv="int8")
    with pytest.raises(PruneError, match="this is a dense one"):
        complete(model(), tokenizer, ["One"], prefix=file)
    with pytest.raises(PruneError, match="200 positions"):
        complete(pruned, tokenizer, ["One"], prefix=file, max_new_tokens=190)
    with pytest.raises(PruneError, match="200 positions; shorten it"):
        save_prefix(pruned, tokenizer, PREFIX * 3, tmp_path / "long")
    with pytest.raises(PruneError, match="the prompt is empty"):
        save_prefix(pruned, tokenizer, " ", tmp_path / "blank")
    with pytest.raises(BudgetError, match="of the 5,000 that its budget allows"):
        save_prefix(pruned, tokenizer, PREFIX, tmp_path / "large", budget=5000)
    with pytest.raises(BudgetError):
        complete(pruned, tokenizer, [PREFIX], budget="5KB", **OPTIONS)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    chat = Chat(pruned, tokenizer, max_new_tokens=3)
    list(chat.say("Hello"))
    chat.save(tmp_path / "chat")
    with pytest.raises(PruneError, match="holds a chat, not a prefix; use kvprune chat --resume"):
        complete(pruned, tokenizer, ["One"], prefix=tmp_path / "chat")
    assert {path.name for path in tmp_path.iterdir()} == {"prefix", "chat"}
