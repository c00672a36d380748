"""Pipelines and language models of many families, built from their real classes with small random weights. Nothing is
downloaded.

Words are those of the default model's tokenizers, or single letters.
"""

from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, CLIPTextConfig, T5Config

WEIGHTS = Path(__file__).resolve().parent.parent / "weights"
WIDTH = 32
"""Width of transformers and text encoders, in two heads."""


def save(build: str, folder: Path) -> None:
    """Writes the model that the function of that name builds, in the layout of its library."""
    torch.manual_seed(0)
    made = globals()[build]()
    made.save_pretrained(folder, safe_serialization=True)
    if isinstance(made, transformers.PreTrainedModel):
        AutoTokenizer.from_pretrained(WEIGHTS.with_name("weights-text")).save_pretrained(folder)


# --- Components ------------------------------------------------------------------------------------------------------


def flow() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0)


def steps() -> Any:
    return diffusers.EulerDiscreteScheduler(beta_schedule="scaled_linear")


def words(folder: str) -> Any:
    """A tokenizer of the default model: `tokenizer` is CLIP's, `tokenizer_2` T5's."""
    return AutoTokenizer.from_pretrained(WEIGHTS / folder)


def letters(kind: Any, *special: str, **options: Any) -> Any:
    """A byte-level tokenizer of a class, without a merge, so that a token is a letter."""
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    return kind(vocab={token: index for index, token in enumerate(tokens)}, merges=[], **options)


def clip(projection: bool = False) -> Any:
    tokenizer = words("tokenizer")
    config = CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=WIDTH, projection_dim=WIDTH,
        num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return (transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel)(config)


def t5(kind: str = "T5EncoderModel") -> Any:
    config = T5Config if kind == "T5EncoderModel" else transformers.UMT5Config
    size = len(words("tokenizer_2"))
    return getattr(transformers, kind)(
        config(vocab_size=size, d_model=WIDTH, d_kv=16, d_ff=WIDTH, num_layers=2, num_heads=2, dropout_rate=0.0)
    )


def vae(channels: int = 4) -> Any:
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16), layers_per_block=1, latent_channels=channels, norm_num_groups=4, sample_size=32,
        shift_factor=0.0,
    )  # fmt: skip


def causal_vae(kind: Any) -> Any:
    channels = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    return kind(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        **channels,
    )


# --- Families --------------------------------------------------------------------------------------------------------


def flux(kind: Any = diffusers.FluxPipeline) -> Any:
    more: dict[str, Any] = {}
    config = {
        "patch_size": 1, "in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
        "num_attention_heads": 2, "joint_attention_dim": WIDTH, "pooled_projection_dim": WIDTH,
        "guidance_embeds": True, "axes_dims_rope": (4, 6, 6),
    }  # fmt: skip
    if kind is diffusers.FluxControlNetPipeline:
        more["controlnet"] = diffusers.FluxControlNetModel(**config)
    return kind(
        scheduler=flow(), vae=vae(), text_encoder=clip(), tokenizer=words("tokenizer"), text_encoder_2=t5(),
        tokenizer_2=words("tokenizer_2"), transformer=diffusers.FluxTransformer2DModel(**config), **more,
    )  # fmt: skip


def flux_image() -> Any:
    return flux(diffusers.FluxImg2ImgPipeline)


def flux_control() -> Any:
    return flux(diffusers.FluxControlNetPipeline)


def sd3() -> Any:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=1, in_channels=4, out_channels=4, num_layers=3, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=2 * WIDTH, caption_projection_dim=WIDTH,
        pooled_projection_dim=2 * WIDTH, pos_embed_max_size=32, qk_norm="rms_norm",
    )  # fmt: skip
    # The two CLIPs side by side are as wide as T5.
    size = len(words("tokenizer_2"))
    config = T5Config(vocab_size=size, d_model=2 * WIDTH, d_kv=16, d_ff=WIDTH, num_layers=2)
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer, scheduler=flow(), vae=vae(), text_encoder=clip(True), tokenizer=words("tokenizer"),
        text_encoder_2=clip(True), tokenizer_2=words("tokenizer"),
        text_encoder_3=transformers.T5EncoderModel(config), tokenizer_3=words("tokenizer_2"),
    )  # fmt: skip


def unet(**more: Any) -> dict[str, Any]:
    return {
        "in_channels": 4, "block_out_channels": (16, 32), "layers_per_block": 1,
        "norm_num_groups": 4, "attention_head_dim": (1, 2), "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "cross_attention_dim": WIDTH, **more,
    }  # fmt: skip


UP = {"sample_size": 16, "out_channels": 4, "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}


def sd(kind: Any = diffusers.StableDiffusionPipeline) -> Any:
    more: dict[str, Any] = {"requires_safety_checker": False}
    if kind is diffusers.StableDiffusionControlNetPipeline:
        # Two widths, as pictures are twice as large as latents here.
        more["controlnet"] = diffusers.ControlNetModel(**unet(), conditioning_embedding_out_channels=(8, 8))
    return kind(
        vae=vae(), text_encoder=clip(), tokenizer=words("tokenizer"), scheduler=steps(), safety_checker=None,
        unet=diffusers.UNet2DConditionModel(**unet(**UP)), feature_extractor=None, **more,
    )  # fmt: skip


def sd_image() -> Any:
    return sd(diffusers.StableDiffusionImg2ImgPipeline)


def sd_control() -> Any:
    return sd(diffusers.StableDiffusionControlNetPipeline)


def sdxl() -> Any:
    added = {
        "addition_embed_type": "text_time", "addition_time_embed_dim": 8, "transformer_layers_per_block": (1, 2),
        "projection_class_embeddings_input_dim": 6 * 8 + WIDTH, "use_linear_projection": True,
    }  # fmt: skip
    return diffusers.StableDiffusionXLPipeline(
        vae=vae(), text_encoder=clip(), text_encoder_2=clip(True), tokenizer=words("tokenizer"),
        tokenizer_2=words("tokenizer"), scheduler=steps(), add_watermarker=False,
        unet=diffusers.UNet2DConditionModel(**unet(**UP, **added) | {"cross_attention_dim": 2 * WIDTH}),
    )  # fmt: skip


def pixart() -> Any:
    transformer = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, num_layers=2, cross_attention_dim=WIDTH, sample_size=16,
        caption_channels=WIDTH, use_additional_conditions=False, norm_num_groups=4,
    )  # fmt: skip
    return diffusers.PixArtSigmaPipeline(
        tokenizer=words("tokenizer_2"), text_encoder=t5(), vae=vae(), transformer=transformer, scheduler=steps()
    )


def sana() -> Any:
    transformer = diffusers.SanaTransformer2DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2,
        num_cross_attention_heads=2, cross_attention_head_dim=16, cross_attention_dim=WIDTH, caption_channels=WIDTH,
        sample_size=32,
    )  # fmt: skip
    autoencoder = diffusers.AutoencoderDC(
        latent_channels=4, attention_head_dim=4, encoder_block_types="ResBlock", decoder_block_types="ResBlock",
        encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1), encoder_qkv_multiscales=((), ()), decoder_qkv_multiscales=((), ()),
    )  # fmt: skip
    tokenizer = letters(transformers.GemmaTokenizer, "<pad>", "<eos>", "<bos>", "<unk>")
    config = transformers.Gemma2Config(
        vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    return diffusers.SanaPipeline(
        tokenizer=tokenizer, text_encoder=transformers.Gemma2Model(config), vae=autoencoder, transformer=transformer,
        scheduler=flow(),
    )  # fmt: skip


def ltx() -> Any:
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=WIDTH,
        num_layers=2, caption_channels=WIDTH,
    )  # fmt: skip
    autoencoder = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), patch_size=4,
        layers_per_block=(1, 1, 1), decoder_layers_per_block=(1, 1, 1), spatio_temporal_scaling=(True, False),
        decoder_spatio_temporal_scaling=(True, False), decoder_inject_noise=(False, False, False),
        down_block_types=("LTXVideoDownBlock3D",) * 2, downsample_type=("conv", "conv"),
        upsample_residual=(False, False), upsample_factor=(1, 1),
    )  # fmt: skip
    return diffusers.LTXPipeline(
        scheduler=flow(), vae=autoencoder, text_encoder=t5(), tokenizer=words("tokenizer_2"), transformer=transformer
    )


def wan() -> Any:
    config = {
        "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "text_dim": WIDTH,
        "freq_dim": 16, "ffn_dim": WIDTH, "num_layers": 2,
    }  # fmt: skip
    return diffusers.WanPipeline(
        tokenizer=words("tokenizer_2"), text_encoder=t5("UMT5EncoderModel"), scheduler=flow(),
        vae=causal_vae(diffusers.AutoencoderKLWan), transformer=diffusers.WanTransformer3DModel(**config),
        transformer_2=diffusers.WanTransformer3DModel(**config), boundary_ratio=0.8,
    )  # fmt: skip


def qwen() -> Any:
    tokenizer = letters(transformers.Qwen2Tokenizer, "<|endoftext|>")
    text = {
        "vocab_size": len(tokenizer), "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": WIDTH}
    encoder = transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    )
    transformer = diffusers.QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=WIDTH, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    return diffusers.QwenImagePipeline(
        scheduler=flow(), vae=causal_vae(diffusers.AutoencoderKLQwenImage), text_encoder=encoder, tokenizer=tokenizer,
        transformer=transformer,
    )  # fmt: skip


def zimage() -> Any:
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer = letters(transformers.Qwen2Tokenizer, "<|endoftext|>", chat_template=template)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=4, dim=WIDTH, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=WIDTH,
        axes_dims=[4, 6, 6], axes_lens=[256, 32, 32],
    )  # fmt: skip
    return diffusers.ZImagePipeline(
        scheduler=flow(), vae=vae(), text_encoder=transformers.Qwen3Model(config), tokenizer=tokenizer,
        transformer=transformer,
    )  # fmt: skip


# --- Language models -------------------------------------------------------------------------------------------------


def decoder(config: Any, **more: Any) -> Any:
    """A causal language model of two layers, whose tokenizer is the default one's."""
    sizes = {
        "vocab_size": 1024, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
    }  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config(**sizes | more))


def llama() -> Any:
    return decoder(transformers.LlamaConfig)


def qwen3() -> Any:
    return decoder(transformers.Qwen3Config)


def gemma3() -> Any:
    """One layer sees 16 tokens back, the other all."""
    kinds = ["sliding_attention", "full_attention"]
    return decoder(transformers.Gemma3TextConfig, sliding_window=16, layer_types=kinds)


def mixtral() -> Any:
    return decoder(transformers.MixtralConfig, num_local_experts=4, num_experts_per_tok=2)
