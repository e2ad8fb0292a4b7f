"""Train tiny-video: a Wan text-to-video pipeline of three million parameters for the world of video_world.

Two stages, each for a number of seconds: the autoencoder (AutoencoderKLWan) on drawn clips, then transformer
(WanTransformer3DModel) and text encoder (UMT5) together by flow matching on its latents. The first latents of a
clip are a shorter clip (the autoencoder is causal in time), so 1, 9, 17 and 33 frames are learnt. Weights are
saved in fp16, and what is saved is measured: held-out prompts, and what video_world reads off the frames.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .video_world import NUM_FRAMES, SIZE, Scene, describe, draw, every_scene, random_scene, read

LONG_FRAMES = 33
MAX_WORDS = 32  # text tokens that training pads to, most of the time
PIPELINE_WORDS = 512  # what WanPipeline pads to unless it is told otherwise
GUIDANCE, STEPS = 3.0, 12  # of the measurement, and of recipes/tiny-video
_EMA = 0.999


@dataclass(frozen=True, slots=True)
class Budget:
    autoencoder_s: float
    transformer_s: float
    num_clips: int  # encoded once, then learnt from again and again
    batch_clips: int  # of the transformer
    num_evaluated: int
    autoencoder_batch: int = 32


BUDGETS = {
    "h200": Budget(
        autoencoder_s=80, transformer_s=200, num_clips=120_000, batch_clips=256, num_evaluated=400, autoencoder_batch=64
    ),
    "cpu": Budget(autoencoder_s=2400, transformer_s=5400, num_clips=4_000, batch_clips=16, num_evaluated=60),
    "smoke": Budget(
        autoencoder_s=6, transformer_s=6, num_clips=16, batch_clips=4, num_evaluated=2, autoencoder_batch=4
    ),
}


def train(out: Path, budget_name: str, seed: int = 0) -> dict[str, float]:
    """Train, save to `out` (a folder that diffusers loads) and return the held-out figures."""
    import torch

    budget, began = BUDGETS[budget_name], time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    tokenizer = make_tokenizer(seed)
    autoencoder = make_autoencoder().to(device)
    num_steps = [_fit_autoencoder(autoencoder, budget, device, seed, began)]
    latents = _encode_clips(autoencoder, budget, device, seed, began)
    encoder, transformer = make_text_encoder(len(tokenizer)).to(device), make_transformer().to(device)
    num_steps.append(_fit_transformer(transformer, encoder, tokenizer, latents, budget, device, began))
    _save(out, tokenizer, encoder, transformer, autoencoder)
    figures = evaluate(out, device, budget.num_evaluated, seed)
    figures["psnr_db"] = _psnr(out, device, seed)
    _say(began, "held-out " + json.dumps(figures))
    (out / "README.md").write_text(_card(figures, out, budget_name, budget, seed, num_steps), encoding="utf-8")
    return figures


def make_tokenizer(seed: int) -> Any:
    """Return a tokenizer of whole words, lower-cased; words of another world are <unk>."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel(unk_token="<unk>"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation()])
    rng = random.Random(seed)
    texts = [describe(random_scene(rng, False), rng) + ", an orange." for _ in range(20_000)]
    special = ["<pad>", "</s>", "<unk>"]
    core.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=special, show_progress=False))
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=PIPELINE_WORDS
    )


def make_autoencoder() -> Any:
    """Return an autoencoder of 4 x 4 pixels and 4 frames to one latent of 8 channels."""
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=16, z_dim=8, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[True, True],
        latents_mean=[0.0] * 8, latents_std=[1.0] * 8, scale_factor_spatial=4, scale_factor_temporal=4,
    )  # fmt: skip


def make_text_encoder(vocab_size: int) -> Any:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=vocab_size, d_model=96, d_kv=24, d_ff=192, num_layers=2, num_heads=4, dropout_rate=0.0,
            pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip


def make_transformer() -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=5, attention_head_dim=32, in_channels=8, out_channels=8,
        text_dim=96, freq_dim=64, ffn_dim=480, num_layers=6, rope_max_seq_len=128,
    )  # fmt: skip


# -- the autoencoder


def _fit_autoencoder(model: Any, budget: Budget, device: str, seed: int, began: float) -> int:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.0)
    rng = random.Random(seed + 1)
    for step, done, is_news in _timed(budget.autoencoder_s):
        _set_rate(optimizer, 2e-3 * _schedule(done))
        scenes = [random_scene(rng, rng.random() < 0.1) for _ in range(budget.autoencoder_batch)]
        clips = draw(scenes, NUM_FRAMES, seed * 10**6 + step, device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            posterior = model.encode(clips).latent_dist
            made = model.decode(posterior.sample()).sample.float()
        error = made - clips
        loss = error.abs().mean() + error.square().mean() + 1e-5 * posterior.kl().mean() / posterior.mean[0].numel()
        _improve(optimizer, loss, model)
        if is_news:
            _say(began, f"autoencoder step={step} loss={loss.item():.5f}")
    return step


def _encode_clips(model: Any, budget: Budget, device: str, seed: int, began: float) -> dict[int, Any]:
    """Return normalised latents and their scenes by number of latent frames; sets the model's mean and deviation."""
    import torch

    model.eval()
    stock: dict[int, Any] = {}
    for num_frames, share in ((NUM_FRAMES, 0.75), (LONG_FRAMES, 0.25)):
        rng, parts, scenes = random.Random(seed + num_frames), [], []
        batch = min(256, int(budget.num_clips * share))
        for index in range(int(budget.num_clips * share) // batch):
            drawn = [random_scene(rng, False) for _ in range(batch)]
            with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                clips = draw(drawn, num_frames, seed * 10**6 + 10**5 * num_frames + index, device)
                parts.append(model.encode(clips).latent_dist.mean.half())
            scenes += drawn
        stock[(num_frames - 1) // 4 + 1] = torch.cat(parts), scenes
    usual = stock[(NUM_FRAMES - 1) // 4 + 1][0].float()
    mean, deviation = usual.mean((0, 2, 3, 4)), usual.std((0, 2, 3, 4))
    model.register_to_config(latents_mean=mean.tolist(), latents_std=deviation.tolist())
    shape = (1, -1, 1, 1, 1)
    for count, (latents, scenes) in stock.items():
        stock[count] = ((latents - mean.view(shape)) / deviation.view(shape)).half(), scenes
    _say(began, f"encoded={budget.num_clips} deviation={[round(value, 2) for value in deviation.tolist()]}")
    return stock


# -- transformer and text encoder


def _fit_transformer(
    transformer: Any, encoder: Any, tokenizer: Any, stock: dict[int, Any], budget: Budget, device: str, began: float
) -> int:
    """Train both by flow matching; afterwards they hold the moving average of their weights."""
    import torch

    both = torch.nn.ModuleList([transformer, encoder])
    optimizer = torch.optim.AdamW(both.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01)
    average = [parameter.detach().clone() for parameter in both.parameters()]
    rng = random.Random(1)
    for step, done, is_news in _timed(budget.transformer_s):
        _set_rate(optimizer, 1e-3 * _schedule(done))
        latents, texts = _batch(stock, rng, budget.batch_clips)
        num_words = PIPELINE_WORDS if rng.random() < 0.05 else MAX_WORDS
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = _flow_loss(transformer, _embed(encoder, tokenizer, texts, num_words, device), latents)
        _improve(optimizer, loss, both)
        torch._foreach_lerp_(average, [p.detach() for p in both.parameters()], 1 - min(_EMA, step / (step + 10)))
        if is_news:
            _say(began, f"transformer step={step} loss={loss.item():.4f}")
    with torch.no_grad():
        for parameter, value in zip(both.parameters(), average, strict=True):
            parameter.copy_(value)
    return step


def _batch(stock: dict[int, Any], rng: random.Random, size: int) -> tuple[Any, list[str]]:
    """Return latents of one length, and prompts of which one in ten is empty (for guidance)."""
    usual, long = sorted(stock)
    length = rng.choices([usual, long, 3, 1], [6, 2, 1, 1])[0]
    latents, scenes = stock[long if length == long else usual]
    rows = [rng.randrange(len(scenes)) for _ in range(size if length <= usual else size // 2)]
    texts = ["" if rng.random() < 0.1 else describe(scenes[row], rng) for row in rows]
    return latents[rows][:, :, :length].float(), texts


def _embed(encoder: Any, tokenizer: Any, texts: list[str], num_words: int, device: str) -> Any:
    """Return embeddings as WanPipeline makes them: padding is zero."""
    import torch

    words = tokenizer(texts, padding="longest", return_tensors="pt").to(device)
    states = encoder(words.input_ids, words.attention_mask).last_hidden_state
    states = states * words.attention_mask[..., None]
    return torch.nn.functional.pad(states, (0, 0, 0, num_words - states.shape[1]))


def _flow_loss(transformer: Any, embeddings: Any, latents: Any) -> Any:
    import torch

    uniform = torch.rand(len(latents), device=latents.device)
    sigma = 3 * uniform / (1 + 2 * uniform)  # as the scheduler shifts them
    noise = torch.randn_like(latents)
    mixed = torch.lerp(latents, noise, sigma.view(-1, 1, 1, 1, 1))
    found = transformer(mixed, 1000 * sigma, embeddings, return_dict=False)[0]
    return torch.nn.functional.mse_loss(found.float(), noise - latents)


# -- what both stages share


def _timed(seconds: float) -> Iterator[tuple[int, float, bool]]:
    """Yield (step, share of the time that is gone, is it time for news) until the time is over."""
    start, step, num_said = time.monotonic(), 0, 0
    while (done := (time.monotonic() - start) / seconds) < 1:
        step += 1
        is_news = done * 10 >= num_said
        num_said += is_news
        yield step, done, is_news


def _schedule(done: float) -> float:
    """Linear warm-up over 3%, then cosine to 1%."""
    if done < 0.03:
        return 0.05 + done / 0.03 * 0.95
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (done - 0.03) / 0.97))


def _set_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _improve(optimizer: Any, loss: Any, model: Any) -> None:
    import torch

    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


# -- what was made


def _save(out: Path, tokenizer: Any, encoder: Any, transformer: Any, autoencoder: Any) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

    pipeline = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=encoder.eval().half().cpu(),
        vae=autoencoder.eval().half().cpu(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=transformer.eval().half().cpu(),
    )
    pipeline.save_pretrained(out)
    index = json.loads((out / "model_index.json").read_text())
    index["tokenizer"] = ["transformers", "PreTrainedTokenizerFast"]  # a name that transformers 4 and 5 both know
    (out / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def evaluate(
    folder: Path, device: str, count: int, seed: int, steps: int = STEPS, guidance: float = GUIDANCE
) -> dict[str, float]:
    """Return the share of clips that show what their held-out prompt says, by feature and in all."""
    import torch
    from diffusers import WanPipeline

    pipeline = WanPipeline.from_pretrained(folder, dtype=torch.float32).to(device)
    pipeline.set_progress_bar_config(disable=True)
    rng, right = random.Random(seed + 99), []
    scenes = [random_scene(rng, True) for _ in range(count)]
    for at in range(0, count, 50):
        part = scenes[at : at + 50]
        frames = pipeline(
            [describe(scene, rng) for scene in part], height=SIZE, width=SIZE, num_frames=NUM_FRAMES,
            num_inference_steps=steps, guidance_scale=guidance, max_sequence_length=MAX_WORDS, output_type="np",
            generator=torch.Generator().manual_seed(seed + at),
        ).frames  # fmt: skip
        right += [judge((clip * 255).round().astype("uint8"), scene) for clip, scene in zip(frames, part, strict=True)]
    return {name: sum(each[name] for each in right) / count for name in right[0]}


def judge(frames: Any, scene: Scene) -> dict[str, bool]:
    features = read(frames).is_right(scene)
    return features | {"all": all(features.values())}


def _psnr(folder: Path, device: str, seed: int) -> float:
    """Return the autoencoder's peak signal-to-noise ratio on fresh clips of every combination, dB."""
    import torch
    from diffusers import AutoencoderKLWan

    model = AutoencoderKLWan.from_pretrained(folder, subfolder="vae", dtype=torch.float32).to(device)
    clips = draw(every_scene()[::3], NUM_FRAMES, seed + 5, device)
    with torch.no_grad():
        made = model.decode(model.encode(clips).latent_dist.mode()).sample
    return round(10 * math.log10(4 / (made - clips).square().mean().item()), 2)


def _say(began: float, text: str) -> None:
    print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)


def _card(
    figures: dict[str, float], out: Path, budget_name: str, budget: Budget, seed: int, num_steps: list[int]
) -> str:
    num_bytes = sum(file.stat().st_size for file in out.rglob("*.safetensors"))
    rows = [name for name in figures if name != "psnr_db"]
    table = "\n".join(f"| {name} | {figures[name]:.1%} |" for name in rows)
    held_out = ", ".join(describe(scene) for scene in every_scene() if scene.is_held_out)
    return f"""# tiny-video

A Wan text-to-video pipeline of {num_bytes / 2e6:.1f} million parameters (fp16, {num_bytes / 1e6:.1f} MB) for a small
synthetic world: a circle, square or triangle in one of six colours moves right, left, up or down on a black,
gray or white background ("a small red circle moving right", "on white, the blue square slides to the top").
Made for bireme's tests and demo; it knows nothing else, and no size but {SIZE}x{SIZE} with
1, 9, {NUM_FRAMES} or {LONG_FRAMES} frames.

Loads with plain diffusers: `WanPipeline.from_pretrained("models/tiny-video", dtype=torch.float32)`.

Trained by `tools/train_samples.py tiny-video --budget {budget_name} --seed {seed}`: the autoencoder for
{num_steps[0]} steps of {budget.autoencoder_batch} clips ({budget.autoencoder_s:g} s), transformer and text encoder
for {num_steps[1]} steps of {budget.batch_clips} clips ({budget.transformer_s:g} s). The autoencoder gives clips back
with {figures["psnr_db"]:.1f} dB.

These combinations of colour, shape and direction were never seen in training, in any wording:
{held_out}.

What {budget.num_evaluated} clips for prompts about them show ({STEPS} steps, guidance {GUIDANCE:g}, {NUM_FRAMES}
frames; read off the frames by `tools/samples/video_world.py`, plain diffusers, fp32):

| feature | right |
|---|---|
{table}
"""
