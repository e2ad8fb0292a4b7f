"""Train tiny-video: a Wan text-to-video pipeline of under four million parameters for the world of video_world.

Two stages, each for a number of seconds: the autoencoder (AutoencoderKLWan) on drawn clips, then transformer
(WanTransformer3DModel) and text encoder (UMT5) together by flow matching on its latents. What is in the folder
already is trained on from there. The first latents of a clip are a shorter clip (the autoencoder is causal in time),
so 1, 9, 17 and 33 frames are learnt. Weights are saved in fp16, and what is saved is measured: held-out prompts, and
what video_world reads off the frames.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .video_world import NUM_FRAMES, SIZE, Scene, describe, draw, draw_crowd, every_scene, random_scene, read

LONG_FRAMES = 33
MAX_WORDS = 32  # text tokens that training pads to, most of the time
PIPELINE_WORDS = 512  # what WanPipeline pads to unless it is told otherwise
GUIDANCE, STEPS = 3.0, 12  # of the measurement, and of recipes/tiny-video
_EMA = 0.999
_WORDINGS = 4  # of each clip


@dataclass(frozen=True, slots=True)
class Budget:
    autoencoder_s: float
    transformer_s: float
    num_clips: int  # encoded once, then learnt from again and again
    batch_clips: int  # of the transformer
    num_evaluated: int
    autoencoder_batch: int


BUDGETS = {
    "h200": Budget(150, 185, num_clips=24_000, batch_clips=512, num_evaluated=400, autoencoder_batch=16),
    "cpu": Budget(2400, 5400, num_clips=8_000, batch_clips=32, num_evaluated=60, autoencoder_batch=8),
    "smoke": Budget(4, 4, num_clips=16, batch_clips=4, num_evaluated=2, autoencoder_batch=2),
}


def train(out: Path, budget_name: str, seed: int = 0) -> dict[str, float]:
    """Train, save to `out` (a folder that diffusers loads) and return the held-out figures."""
    import torch

    budget, began = BUDGETS[budget_name], time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    train_autoencoder(out, budget, device, seed, began)
    train_transformer(out, budget, device, seed, began)
    figures = evaluate(out, device, budget.num_evaluated, seed)
    figures["psnr_db"] = _psnr(out, device, seed)
    _say(began, "held-out " + json.dumps(figures))
    (out / "README.md").write_text(_card(figures, out, budget, seed), encoding="utf-8")
    return figures


def train_autoencoder(out: Path, budget: Budget, device: str, seed: int, began: float) -> None:
    """Save it to `out`/vae, with the mean and deviation of its latents."""
    import torch
    from diffusers import AutoencoderKLWan

    model = make_autoencoder()
    if (out / "vae").exists():
        model = AutoencoderKLWan.from_pretrained(out, subfolder="vae", dtype=torch.float32)
    model.to(device).train()
    num_steps = _fit_autoencoder(model, budget, device, seed, began)
    _normalise(model.eval(), device, seed)
    model.half().save_pretrained(out / "vae")
    note = {"steps": num_steps, "batch": budget.autoencoder_batch, "seconds": budget.autoencoder_s, "device": device}
    _note(out, autoencoder=note)


def train_transformer(out: Path, budget: Budget, device: str, seed: int, began: float) -> None:
    """Save the whole pipeline to `out`, where the autoencoder is."""
    import torch
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import UMT5EncoderModel

    autoencoder = AutoencoderKLWan.from_pretrained(out, subfolder="vae", dtype=torch.float32).to(device).eval()
    tokenizer = make_tokenizer(seed)
    encoder, transformer = make_text_encoder(len(tokenizer)), make_transformer()
    if (out / "transformer").exists():
        encoder = UMT5EncoderModel.from_pretrained(out, subfolder="text_encoder", dtype=torch.float32)
        transformer = WanTransformer3DModel.from_pretrained(out, subfolder="transformer", dtype=torch.float32)
    encoder.to(device).train(), transformer.to(device).train()
    stock = _encode_clips(autoencoder, budget, device, seed)
    _say(began, f"encoded={budget.num_clips}")
    num_steps = _fit_transformer(transformer, encoder, tokenizer, stock, budget, device, began)
    _save(out, tokenizer, encoder, transformer, autoencoder)
    note = {"steps": num_steps, "batch": budget.batch_clips, "seconds": budget.transformer_s, "device": device}
    _note(out, transformer=note)


def _note(out: Path, **stage: dict[str, Any]) -> None:
    """Keep how a stage was trained, for the card; a stage that was trained on has several entries."""
    file = out / "training.json"
    notes = json.loads(file.read_text()) if file.exists() else {}
    for name, note in stage.items():
        notes.setdefault(name, []).append(note)
    file.write_text(json.dumps(notes, indent=2) + "\n")


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
    """Return an autoencoder of 8 x 8 pixels and 4 frames to one latent of 16 channels; 2 x 2 pixels are one patch."""
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=16, decoder_base_dim=24, z_dim=16, dim_mult=[1, 2, 2], num_res_blocks=1,
        temperal_downsample=[True, True],
        in_channels=12, out_channels=12, patch_size=2, latents_mean=[0.0] * 16, latents_std=[1.0] * 16,
        scale_factor_spatial=8, scale_factor_temporal=4,
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
        patch_size=(1, 2, 2), num_attention_heads=5, attention_head_dim=32, in_channels=16, out_channels=16,
        text_dim=96, freq_dim=64, ffn_dim=480, num_layers=6, rope_max_seq_len=128,
    )  # fmt: skip


# -- the autoencoder


def _fit_autoencoder(model: Any, budget: Budget, device: str, seed: int, began: float) -> int:
    optimizer = _optimizer(model, 2e-3, 0.0, device)
    improve = _TrainingStep(lambda clips: _rebuild_loss(model, clips), model, optimizer)
    rng = random.Random(seed + 1)
    for step, done, is_news in _timed(budget.autoencoder_s):
        _set_rate(optimizer, 2e-3 * _schedule(done))
        loss = improve(_practice(rng, done, budget.autoencoder_batch, seed * 10**6 + step, device))
        if is_news:
            _say(began, f"autoencoder step={step} loss={loss.item():.5f}")
            if not math.isfinite(loss.item()):
                raise RuntimeError(f"autoencoder: the loss is {loss.item()} at step {step}; lower the learning rate")
    return step


def _practice(rng: random.Random, done: float, count: int, seed: int, device: str) -> Any:
    """Return clips to give back: crowds of shapes for most of the time, later what will be asked for."""
    if rng.random() < (0.95 if done < 0.6 else 0.3):
        return draw_crowd(count, 5, SIZE // 2, seed, device)
    scenes = [random_scene(rng, rng.random() < 0.1) for _ in range(max(1, count // 4))]
    return draw(scenes, rng.choices([5, 9, NUM_FRAMES], [7, 2, 1])[0], seed, device)


def _rebuild_loss(model: Any, clips: Any) -> Any:
    """Errors on the shape count five times: it covers little of the picture."""
    posterior = model.encode(clips).latent_dist
    error = model.decode(posterior.sample()).sample - clips
    is_shape = (clips - clips[..., :1, :1]).abs().amax(1, keepdim=True) > 0.1
    rebuilt = ((error.abs() + error.square()) * (1 + 4 * is_shape)).mean()
    return rebuilt + 5e-5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()


def _normalise(model: Any, device: str, seed: int) -> None:
    """Set the mean and deviation of its latents, by which pipelines scale them."""
    import torch

    rng = random.Random(seed + 2)
    with torch.no_grad():
        clips = draw([random_scene(rng, False) for _ in range(64)], NUM_FRAMES, seed + 2, device)
        latents = model.encode(clips).latent_dist.mode()
    mean, deviation = latents.mean((0, 2, 3, 4)), latents.std((0, 2, 3, 4))
    model.register_to_config(latents_mean=mean.tolist(), latents_std=deviation.tolist())


def _encode_clips(model: Any, budget: Budget, device: str, seed: int) -> dict[int, Any]:
    """Return scaled latents (fp16) and their scenes by number of latent frames."""
    import torch

    mean, deviation = (
        torch.tensor(value, device=device).view(1, -1, 1, 1, 1)
        for value in (model.config.latents_mean, model.config.latents_std)
    )
    stock: dict[int, Any] = {}
    for num_frames, share in ((NUM_FRAMES, 0.75), (LONG_FRAMES, 0.25)):
        rng, parts, scenes = random.Random(seed + num_frames), [], []
        count = int(budget.num_clips * share)
        for at in range(0, count, 512):
            drawn = [random_scene(rng, False) for _ in range(min(512, count - at))]
            with torch.no_grad():
                clips = draw(drawn, num_frames, seed * 10**6 + 10**5 * num_frames + at, device)
                parts.append(((model.encode(clips).latent_dist.mode() - mean) / deviation).half())
            scenes += drawn
        stock[(num_frames - 1) // 4 + 1] = torch.cat(parts), scenes
    return stock


# -- transformer and text encoder


def _fit_transformer(
    transformer: Any, encoder: Any, tokenizer: Any, stock: dict[int, Any], budget: Budget, device: str, began: float
) -> int:
    """Train both by flow matching; afterwards they hold the moving average of their weights."""
    import torch

    both = torch.nn.ModuleList([transformer, encoder])
    optimizer = _optimizer(both, 1e-3, 0.01, device)
    tokens = _Tokens(tokenizer, stock, device)
    improve, improve_padded = (
        _TrainingStep(partial(_flow_loss, transformer, encoder, num_words), both, optimizer)
        for num_words in (MAX_WORDS, PIPELINE_WORDS)
    )
    average = [parameter.detach().clone() for parameter in both.parameters()]
    rng = random.Random(1)
    for step, done, is_news in _timed(budget.transformer_s):
        _set_rate(optimizer, 1e-3 * _schedule(done))
        latents, words, mask = _batch(stock, tokens, rng, budget.batch_clips)
        loss = (improve_padded.run if rng.random() < 0.02 else improve)(latents, words, mask)
        torch._foreach_lerp_(average, [p.detach() for p in both.parameters()], 1 - min(_EMA, step / (step + 10)))
        if is_news:
            _say(began, f"transformer step={step} loss={loss.item():.4f}")
    with torch.no_grad():
        for parameter, value in zip(both.parameters(), average, strict=True):
            parameter.copy_(value)
    return step


class _Tokens:
    """Prompts of all clips, `_WORDINGS` for each, tokenised once."""

    def __init__(self, tokenizer: Any, stock: dict[int, Any], device: str) -> None:
        rng = random.Random(3)
        self._rows = {}
        for length, (_, scenes) in stock.items():
            texts = [describe(scene, rng) for scene in scenes for _ in range(_WORDINGS)]
            found = tokenizer(texts, padding="max_length", max_length=MAX_WORDS, return_tensors="pt").to(device)
            self._rows[length] = found.input_ids, found.attention_mask
        self._empty = tokenizer([""], padding="max_length", max_length=MAX_WORDS, return_tensors="pt").to(device)

    def take(self, length: int, rows: Any) -> tuple[Any, Any]:
        """Return ids and mask of any wording of these clips; one in ten is empty (for guidance)."""
        import torch

        words, mask = self._rows[length]
        chosen = rows * _WORDINGS + torch.randint(_WORDINGS, rows.shape, device=rows.device)
        is_empty = torch.rand(len(rows), 1, device=rows.device) < 0.1
        return (
            torch.where(is_empty, self._empty.input_ids, words[chosen]),
            torch.where(is_empty, self._empty.attention_mask, mask[chosen]),
        )


def _batch(stock: dict[int, Any], tokens: _Tokens, rng: random.Random, size: int) -> tuple[Any, Any, Any]:
    """Return latents of one length, and the ids and masks of their prompts."""
    import torch

    usual, long = sorted(stock)
    length = rng.choices([usual, long, 3, 1], [6, 2, 1, 1])[0]
    kind = long if length == long else usual
    latents = stock[kind][0]
    rows = torch.randint(len(latents), (size if length <= usual else size // 2,), device=latents.device)
    return latents[rows][:, :, :length].float(), *tokens.take(kind, rows)


def _embed(encoder: Any, words: Any, mask: Any, num_words: int) -> Any:
    """Return embeddings as WanPipeline makes them: padding is zero."""
    import torch

    states = encoder(words, mask).last_hidden_state * mask[..., None]
    return torch.nn.functional.pad(states, (0, 0, 0, num_words - states.shape[1]))


def _flow_loss(transformer: Any, encoder: Any, num_words: int, latents: Any, words: Any, mask: Any) -> Any:
    import torch

    embeddings = _embed(encoder, words, mask, num_words)
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


def _optimizer(model: Any, rate: float, decay: float, device: str) -> Any:
    import torch

    on_gpu = device == "cuda"
    start = torch.tensor(rate, device=device) if on_gpu else rate  # a tensor: graphs read the rate of each step
    return torch.optim.AdamW(
        model.parameters(), lr=start, betas=(0.9, 0.99), weight_decay=decay, fused=on_gpu, capturable=on_gpu
    )


def _set_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], float):
            group["lr"] = rate
        else:
            group["lr"].fill_(rate)


class _TrainingStep:
    """Forward, backward, update; on a GPU a CUDA graph for each shape: small kernels would wait for their launches."""

    def __init__(self, loss_of: Callable[..., Any], model: Any, optimizer: Any) -> None:
        self._loss_of, self._model, self._optimizer = loss_of, model, optimizer
        self._graphs: dict[Any, tuple[Any, Any, Any]] = {}  # shapes -> graph, inputs, loss

    def __call__(self, *batch: Any) -> Any:
        """Return the loss, before the next call changes it."""
        if batch[0].device.type != "cuda":
            return self.run(*batch)
        shapes = tuple(tensor.shape for tensor in batch)
        if shapes not in self._graphs:
            self._graphs[shapes] = self._capture([tensor.clone() for tensor in batch])
        graph, inputs, loss = self._graphs[shapes]
        for static, tensor in zip(inputs, batch, strict=True):
            static.copy_(tensor)
        graph.replay()
        return loss

    def run(self, *batch: Any) -> Any:
        """The same without a graph."""
        loss = self._loss_of(*batch)
        _improve(self._optimizer, loss, self._model)
        return loss.detach()

    def _capture(self, inputs: list[Any]) -> tuple[Any, Any, Any]:
        import torch

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.run(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self._optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            loss = self.run(*inputs)
        return graph, inputs, loss


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


def _card(figures: dict[str, float], out: Path, budget: Budget, seed: int) -> str:
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

Trained by `models/train.py tiny-video --seed {seed}`: {_history(out)}.
The autoencoder gives clips back with {figures["psnr_db"]:.1f} dB.

These combinations of colour, shape and direction were never seen in training, in any wording:
{held_out}.

What {budget.num_evaluated} clips for prompts about them show ({STEPS} steps, guidance {GUIDANCE:g}, {NUM_FRAMES}
frames; read off the frames by `models/training/video_world.py`, plain diffusers, fp32):

| feature | right |
|---|---|
{table}
"""


def _history(out: Path) -> str:
    notes = json.loads((out / "training.json").read_text())
    return ";\n".join(
        f"{stage} {note['steps']} steps of {note['batch']} clips ({note['seconds']:g} s on {note['device']})"
        for stage, parts in notes.items()
        for note in parts
    )
