"""A conversation as text and tokens: the model's chat template, and streamed decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvprune.errors import PruneError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BROKEN = "�"  # how an incomplete character decodes

Message = dict[str, str]


class Template:
    """The chat template of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        if not tokenizer.chat_template:
            name = tokenizer.name_or_path or "this tokenizer"
            raise PruneError(
                f"{name} has no chat template, so the format of its turns is unknown; "
                f"choose a chat model (often named -instruct or -chat), set "
                f"tokenizer.chat_template (--template FILE), or use kvprune generate"
            )
        self.tokenizer = tokenizer

    def prompt(self, messages: Sequence[Message], answer: bool = True, go_on: bool = False) -> str:
        """The text of the conversation up to the start of the answer.

        answer=False: to the end of its last message; `go_on`: that message is not over yet.
        """
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=answer,
                continue_final_message=go_on,
            )
        except TemplateError as error:
            raise PruneError(
                f"the model's chat template refuses this conversation: {error}; some models accept "
                f"no system message"
            ) from error
        return str(text)

    def tokens(self, text: str) -> list[int]:
        """Tokens of a text in which the template has already written the special tokens."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return list(ids)

    def text(self, tokens: Sequence[int], special: bool = False) -> str:
        """Tokens as text; `special`: including special tokens."""
        return str(
            self.tokenizer.decode(
                list(tokens),
                skip_special_tokens=not special,
                clean_up_tokenization_spaces=False,
            )
        )

    def piece(self, tokens: Sequence[int], shown: int, last: bool = False) -> str:
        """The text after its first `shown` characters; empty while a character is incomplete.

        All tokens are decoded again: the text of one may depend on those before it.
        """
        text = self.text(tokens)
        return text[shown:] if last or not text.endswith(BROKEN) else ""


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that end an answer: a model may have several, and its tokenizer a different one."""
    own = getattr(model.generation_config, "eos_token_id", None)
    several = own if isinstance(own, list) else [own]
    return {token for token in (*several, tokenizer.eos_token_id) if token is not None}
