"""Chat with a pruned model, and print how much of the context its cache still holds."""

import kvprune
from kvprune.chat import Chat

pruned = kvprune.load("smollm2-135m")
chat = Chat(pruned, pruned.tokenizer, max_new_tokens=100)
for question in ("Why is the sky blue?", "And why is it red in the evening?"):
    print("".join(chat.say(question)))
    share = chat.bytes / chat.dense_bytes
    print(f"[kept {chat.kept:.0f} of {chat.seen} tokens, {share:.0%} of the bytes]")
