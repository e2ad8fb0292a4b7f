"""tiny-chat's EAGLE-3 head, as it is kept beside the model, drafts on held-out tasks what the model says."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from bireme.engines.torch.forward.decoder_ops import PlainOps  # noqa: E402
from bireme.engines.torch.forward.eagle_head import EagleHead  # noqa: E402
from bireme.engines.torch.weights.eagle_checkpoint import read_eagle  # noqa: E402
from models.training.train_eagle import BASE, NUM_DRAFTS, answered, asked, measure, tap  # noqa: E402
from tests.engines.torch.eagle_heads import paged  # noqa: E402

FOLDER = Path(BASE) / "eagle3"


@pytest.fixture(scope="module")
def opened():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval()
    head = EagleHead.of(read_eagle(FOLDER, base.config), torch.float32)
    talks = asked(AutoTokenizer.from_pretrained(BASE), 7, 8, held_out=True)
    return base, head, answered(base, head, AutoTokenizer.from_pretrained(BASE), talks, 8)


@torch.inference_mode()
def num_steps(base, head, talk):
    """Draft and verify the answer step by step, over blocks of KV as an engine has them; return how many it took."""
    ids, end = torch.tensor(talk.ids), len(talk.ids) - 1
    hidden = head.fuse(tap(base, ids[None], head.shape.taps, (torch.tensor([0]), torch.tensor([0])))[0][0])
    embeddings, attend_of = base.model.embed_tokens(ids), paged(head, PlainOps, len(ids) // 16 + 1, 16)
    at, steps = talk.num_prompt, 0  # the last token that is known
    head(embeddings[1:at], hidden[: at - 1], torch.arange(at - 1), attend_of(0, at - 1))
    kept = at - 1  # places whose keys and values come of the model's rows
    while at < end:
        rows = slice(kept, at)
        made, logits = head(embeddings[kept + 1 : at + 1], hidden[rows], torch.arange(kept, at), attend_of(kept, at))
        kept, drafts = at, [head.likeliest(logits[-1:])]
        for place in range(at, min(at + NUM_DRAFTS, end) - 1):
            follower = base.model.embed_tokens(drafts[-1])
            made, logits = head(follower, made[-1:], torch.tensor([place]), attend_of(place, place + 1))
            drafts.append(head.likeliest(logits))
        right = [int(draft) == token for draft, token in zip(drafts, talk.ids[at + 1 :], strict=False)]
        at += min((*right, False).index(False) + 1, end - at)
        steps += 1
    return steps


def test_a_step_verifies_more_than_a_token_and_a_half_of_held_out_answers(opened):
    base, head, batches = opened
    talks = [talk for rows in batches for talk in rows.talks]
    tokens = sum(len(talk.ids) - talk.num_prompt - 1 for talk in talks)
    tokens_a_step = tokens / sum(num_steps(base, head, talk) for talk in talks)
    assert tokens_a_step >= 1.6
    assert measure(head, base, batches)[1]["all"] == pytest.approx(tokens_a_step, rel=0.03)  # the card's way
    assert (FOLDER / "model.safetensors").stat().st_size <= 1 << 20
