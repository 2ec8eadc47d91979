"""Completions of a batch: the same texts and shares as those of each prompt alone."""

import pytest
import torch

import kvprune
import model_folders
import zoo
from helpers import attach_uneven
from kvprune import PruneError
from kvprune.chat.completion import complete

PROMPTS = ["One", "Two, and then a good deal more of it", "Three and a half"]
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


@pytest.fixture
def tokenizer():
    return model_folders.byte_tokenizer()


@pytest.fixture
def model():
    return zoo.make("llama", vocab_size=257, max_position_embeddings=200)


def alone(pruned, tokenizer, **options):
    return [complete(pruned, tokenizer, [prompt], **options) for prompt in PROMPTS]


def read(tokenizer, prompt: str, answer) -> int:
    """Tokens that a cache has read: all but the last one written."""
    return len(tokenizer(prompt).input_ids) + answer.new_tokens - 1


def test_pads_do_not_count_as_dropped(model, tokenizer):
    pruned = attach_uneven(model)
    options = {"max_new_tokens": 20, "do_sample": False}
    batch = complete(pruned, tokenizer, PROMPTS, **options)
    singles = alone(pruned, tokenizer, **options)
    assert batch.texts == [text for single in singles for text in single.texts]
    tokens = [read(tokenizer, prompt, one) for prompt, one in zip(PROMPTS, singles, strict=True)]
    held = [one.kept_share * count for one, count in zip(singles, tokens, strict=True)]
    assert batch.kept_share == pytest.approx(sum(held) / sum(tokens))
    assert 0.05 < batch.kept_share < 0.9


def test_rows_that_end_early(model, tokenizer):
    """What fills them up while others go on is neither text, nor a new token, nor kept."""
    pruned = attach_uneven(model)
    options = {"max_new_tokens": 20, "do_sample": False}
    ids = tokenizer(PROMPTS[1], return_tensors="pt").input_ids
    written = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
    # the sixth token of the second row ends a text from now on
    model.generation_config.eos_token_id = [int(written[0, ids.shape[1] + 5])]
    singles = alone(pruned, tokenizer, **options)
    assert singles[1].new_tokens < 20
    assert max(one.new_tokens for one in singles) == 20
    batch = complete(pruned, tokenizer, PROMPTS, **options)
    assert batch.texts == [text for single in singles for text in single.texts]
    assert batch.new_tokens == sum(one.new_tokens for one in singles)
    tokens = [read(tokenizer, prompt, one) for prompt, one in zip(PROMPTS, singles, strict=True)]
    held = [one.kept_share * count for one, count in zip(singles, tokens, strict=True)]
    assert batch.kept_share == pytest.approx(sum(held) / sum(tokens))


def test_the_share_is_that_of_the_cache(model, tokenizer):
    """Counted by hand from what the cache of one row holds."""
    pruned = attach_uneven(model)
    got = complete(pruned, tokenizer, [PROMPTS[1]], max_new_tokens=20, do_sample=False)
    ids = tokenizer(PROMPTS[1], return_tensors="pt").input_ids
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False,
        pad_token_id=0, return_dict_in_generate=True,
    )  # fmt: skip
    cache = out.past_key_values
    assert got.kept_share == pytest.approx(float(cache.kept.float().mean()) / cache.seen)
    assert (got.cache_bytes, got.dense_bytes) == (cache.nbytes, cache.dense_nbytes)


@pytest.mark.parametrize("attached", [False, True])
def test_a_dense_model_keeps_everything(model, tokenizer, attached):
    given = kvprune.attach(model, kvprune.DenseConfig()) if attached else model
    result = complete(given, tokenizer, PROMPTS, max_new_tokens=9, do_sample=False)
    assert result.kept_share == 1.0
    # both rows and pads, as transformers stores them: float32 keys and values
    seen = len(tokenizer(PROMPTS[1]).input_ids) + 8
    config = model.config
    size = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert result.dense_bytes == 3 * seen * size
    if not attached:
        assert result.cache_bytes == result.dense_bytes


def test_a_message_is_answered_as_in_a_chat(model, tokenizer):
    from kvprune.chat import Chat

    tokenizer.chat_template = TEMPLATE
    chat = Chat(model, tokenizer, system="Be kind.", max_new_tokens=12)
    want = "".join(chat.say("Hello"))
    options = {"max_new_tokens": 12, "do_sample": False}
    assert complete(model, tokenizer, ["Hello"], system="Be kind.", **options).texts == [want]
    without = complete(model, tokenizer, ["Hello"], as_chat=True, **options).texts
    chat = Chat(model, tokenizer, max_new_tokens=12)
    assert without == ["".join(chat.say("Hello"))]
    assert without != complete(model, tokenizer, ["Hello"], **options).texts


def test_refused(model, tokenizer):
    with pytest.raises(PruneError, match="there is no prompt"):
        complete(model, tokenizer, [])
    with pytest.raises(PruneError, match="the prompt is empty"):
        complete(model, tokenizer, [" \n"])
    with pytest.raises(PruneError, match="prompt 2 of 3 is empty"):
        complete(model, tokenizer, ["a", "", "b"])
    with pytest.raises(PruneError, match="no chat template"):
        complete(model, tokenizer, ["a"], as_chat=True)
