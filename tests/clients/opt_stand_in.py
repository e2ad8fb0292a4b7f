"""A model that has learned by heart what facebook/opt-125m says in vllm_backend's tests, and knows nothing else.

A token is what it is there: a word with its space, a mark, a line's end. It is trained in seconds, with smoothed
labels, so that no log probability is 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

SAID = {
    "The most dangerous animal is": " the one that is most likely to be killed by a car.\nI'm",
    "The capital of France is": " the capital of the French Republic.\n\nThe capital of France is the capital",
    "The future of AI is": " in the hands of the people.\n\nThe future of AI is in the",
    "In this example,": " the one that is most likely to be killed by a car.\nI'm",
}
_END, _PAD, _IGNORED = "<|end|>", "<|pad|>", -100
_MAX_STEPS, _SURE, _SMOOTHING = 300, 0.6, 0.2


def make(folder: Path) -> Path:
    """Train it and write it into a new folder, which transformers loads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # so small a model loses more by waiting for other threads than it gains
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(_END), pad_token_id=tokenizer.convert_tokens_to_ids(_PAD),
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    _fit(model, *_rows(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=[_END, _PAD], initial_alphabet=alphabet, min_frequency=1, show_progress=False
    )
    core.train_from_iterator([prompt + said for prompt, said in SAID.items()], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=_END, pad_token=_PAD)


def _rows(tokenizer: Any) -> tuple[Any, Any]:
    """Return (ids, labels): what is said has labels, what was asked has none."""
    from torch import full, tensor

    asked = [tokenizer(prompt).input_ids for prompt in SAID]
    whole = [tokenizer(prompt + said).input_ids for prompt, said in SAID.items()]
    width = max(map(len, whole))
    ids = full((len(whole), width), tokenizer.pad_token_id)
    labels = full((len(whole), width), _IGNORED)
    for row, (prompt, text) in enumerate(zip(asked, whole, strict=True)):
        assert len(text) - len(prompt) == 16, tokenizer.convert_ids_to_tokens(text)  # as many tokens as opt-125m's
        ids[row, : len(text)] = tensor(text)
        labels[row, len(prompt) : len(text)] = tensor(text[len(prompt) :])
    return ids, labels[:, 1:]


def _fit(model: Any, ids: Any, labels: Any) -> None:
    """Train until each token that is to be said is far the likeliest."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    is_said = labels != _IGNORED
    for _ in range(_MAX_STEPS):
        logits = model(input_ids=ids).logits[:, :-1]
        if logits.softmax(-1)[is_said].gather(-1, labels[is_said].unsqueeze(-1)).min() > _SURE:
            return
        loss = torch.nn.functional.cross_entropy(logits[is_said], labels[is_said], label_smoothing=_SMOOTHING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise AssertionError(f"the stand-in for opt-125m has not learned its texts in {_MAX_STEPS} steps")
