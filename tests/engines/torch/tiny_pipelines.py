"""Pipelines of diffusers with a few random weights, saved as folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[3]


def _tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(CHECKOUT / "models" / "tiny-video" / "tokenizer")


def _t5(width: int) -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(vocab_size=len(_tokenizer()), d_model=width, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    )


def make_ltx(folder: Path) -> Path:
    from diffusers import (
        AutoencoderKLLTXVideo,
        FlowMatchEulerDiscreteScheduler,
        LTXPipeline,
        LTXVideoTransformer3DModel,
    )

    one, no = (True, True, False, False), (False,) * 5
    vae = AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 5, spatio_temporal_scaling=one,
        decoder_spatio_temporal_scaling=one, decoder_inject_noise=no, upsample_residual=no[1:],
        upsample_factor=(1,) * 4, patch_size=1, patch_size_t=1,
    )  # fmt: skip
    transformer = LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16,
        num_layers=1, caption_channels=16,
    )  # fmt: skip
    LTXPipeline(
        tokenizer=_tokenizer(), text_encoder=_t5(16), scheduler=FlowMatchEulerDiscreteScheduler(),
        transformer=transformer, vae=vae,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def make_flux(folder: Path) -> Path:
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel

    tokenizer = _tokenizer()
    clip = CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=77, projection_dim=16, bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(8,), layers_per_block=1, latent_channels=4, norm_num_groups=2, use_quant_conv=False,
        use_post_quant_conv=False, shift_factor=0.0609, scaling_factor=1.5035,
    )  # fmt: skip
    transformer = FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip
    tokenizer.model_max_length = 77
    FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(), vae=vae, text_encoder=CLIPTextModel(clip), tokenizer=tokenizer,
        text_encoder_2=_t5(16), tokenizer_2=_tokenizer(), transformer=transformer,
    ).save_pretrained(folder)  # fmt: skip
    return folder
