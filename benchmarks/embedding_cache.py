"""What the encoder's cache saves: time to first token of a picture's first request against its second.

For each picture three chats, streamed, one after the other:
    first     nobody has seen the picture
    encoded   the same again with another cache_salt: the embeddings are known, the KV blocks are not
    known     the same again as it was: embeddings and KV blocks are known
The ratios are of medians, first over each. By default the model has random weights in the shape of LLaVA with a
CLIP ViT-B/16 tower (224 pixels, 196 tokens a picture) and a language model of 4 layers; the cost of a token does
not depend on what it says.

    python benchmarks/embedding_cache.py
    python benchmarks/embedding_cache.py --recipe recipes/tiny-vlm-epd --pictures 30

The table comes first; the last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program: it runs from any folder

import numpy as np
from PIL import Image

from bireme.launch import free_ports, start_server
from bireme.metrics import Registry
from bireme.openai.text.served_model import ServedModel
from bireme.pipelines.chat_answer import ResponseMeta, WholeAnswer
from bireme.pipelines.chat_request import parse_chat
from bireme.recipe_files import load_recipe

CHECKOUT = Path(__file__).resolve().parents[1]
TOKENIZER = CHECKOUT / "models" / "tiny-vlm"
KINDS = ("first", "encoded", "known")
ENGINE = {
    "dtype": "float32",
    "max_batch_size": 4,
    "max_seq_len": 1024,
    "kv_cache_config": {"max_tokens": 32768},
    "cache_transceiver_config": {"backend": "DEFAULT"},
}


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="bireme-bench-") as folder:
        recipe = options.recipe or make_recipe(Path(folder))
        ports = free_ports()
        with start_server(recipe, ports=ports):
            times = asyncio.run(measure(recipe, ports.grpc, options.pictures))
    medians = {kind: statistics.median(times[kind]) for kind in KINDS}
    ratios = {f"first/{kind}": medians["first"] / medians[kind] for kind in KINDS[1:]}
    print(f"{'request':<10}{'median ms':>10}{'min':>9}{'max':>9}")
    for kind in KINDS:
        print(f"{kind:<10}{medians[kind]:>10.1f}{min(times[kind]):>9.1f}{max(times[kind]):>9.1f}")
    print("time to first token, " + ", ".join(f"{name} {value:.2f}" for name, value in ratios.items()))
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    document = {"benchmark": "embedding_cache", "pictures": options.pictures, "ttft_ms": medians, "ratios": ratios}
    print(json.dumps(document | machine))


async def measure(recipe: str, port: int, num_pictures: int) -> dict[str, list[float]]:
    """Return milliseconds to the first token, by kind."""
    model = ServedModel.connect(load_recipe(recipe), f"127.0.0.1:{port}", Registry("benchmark"))
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    try:
        for number in range(num_pictures + 1):
            url = picture_url(number)
            for kind in KINDS:
                took_ms = await first_token_ms(model, url, "another" if kind == "encoded" else "")
                if number:  # the first picture warms up
                    times[kind].append(took_ms)
    finally:
        await model.close()
    return times


async def first_token_ms(model: ServedModel, url: str, salt: str) -> float:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Describe the picture."}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "bireme": {"cache_salt": salt}}
    request = parse_chat(json.dumps(body), model.recipe)
    began = time.monotonic()
    await model.chat.run(request, WholeAnswer(ResponseMeta.of(model.name), 1, False), began)
    return (time.monotonic() - began) * 1e3


def picture_url(seed: int) -> str:
    noise = np.random.default_rng(seed).integers(0, 255, (224, 224, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def make_recipe(folder: Path) -> str:
    """Write the random model and an E/P/D recipe for it."""
    make_model(folder / "model")
    workers = {stage: {"engine_config": ENGINE} for stage in ("multimodal_encoder", "prefill", "decode")}
    tree = {"model": str(folder / "model"), "sampling": {"temperature": 0}, "workers": workers}
    (folder / "recipe").mkdir()
    (folder / "recipe" / "recipe.yaml").write_text(json.dumps(tree), encoding="utf-8")
    return str(folder / "recipe")


def make_model(folder: Path) -> None:
    from transformers import CLIPImageProcessor, CLIPVisionConfig, LlamaConfig, LlavaConfig
    from transformers import LlavaForConditionalGeneration as Model

    vision = CLIPVisionConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, image_size=224,
        patch_size=16,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=517, hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=1024, eos_token_id=2, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=3, tie_word_embeddings=False)
    Model(config).save_pretrained(folder)
    CLIPImageProcessor().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / name, folder)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", help="another model; default: random weights, encoder, prefill and decode apart")
    parser.add_argument("--pictures", type=int, default=12)
    return parser.parse_args()


if __name__ == "__main__":
    main()
