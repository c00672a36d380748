"""What the benchmark boots, and one boot of it in this process; knows the library and torch, and compares nothing.

    python scripts/_workloads.py '{"build": DIRECTORY, "workload": "reference"}'
    python scripts/_workloads.py '{"mode": "eager", "workload": "reference", "model": DIRECTORY, ...}'

The modes `eager` and `whole-*` are plain torch and diffusers, as one writes them without warmstart: load, tell the
denoiser to compile, run each planned request once. Only the loading and the call of the pipeline are shared.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from _machine import own_cpu_s, peak_bytes

ROOT = Path(__file__).resolve().parent.parent
REFERENCE, FLUX, PROJECT = "reference", "flux", "project"
BUILT = (REFERENCE, FLUX)
"""Workloads that the benchmark makes itself, with random weights."""


def main() -> None:
    """Do what the order on the command line says; answers go through a socket, since the boot prints."""
    order = json.loads(sys.argv[1])
    sys.path.insert(0, str(ROOT))
    if "build" in order:
        build(order["workload"], Path(order["build"]))
        return
    with socket.socket(fileno=order["turns"]) as turns, turns.makefile("rw") as pipe:
        answer_in_turns(order, pipe)


TRANSFORMERS: dict[str, dict[str, Any]] = {
    REFERENCE: {"in_channels": 16, "num_layers": 8, "num_single_layers": 16, "attention_head_dim": 32,
                "num_attention_heads": 4, "axes_dims_rope": (8, 12, 12)},
    FLUX: {"in_channels": 64, "num_layers": 5, "num_single_layers": 10, "attention_head_dim": 128,
           "num_attention_heads": 24, "axes_dims_rope": (16, 56, 56)},
}  # fmt: skip
VAE_LEVELS = {REFERENCE: 1, FLUX: 4}


def build(workload: str, directory: Path) -> None:
    """Write a FluxPipeline with random weights, in diffusers layout.

    `reference` is 256 picture tokens (32x32 pixels: the VAE does not reduce) and 32 text tokens in float32. `flux` has
    blocks of FLUX.1's size, 5 double and 10 single ones of 57, which is 6 GB in bfloat16: 4096 picture tokens
    (1024x1024 pixels) and 512 text tokens. Text encoders and VAE are as small as they can be: what is measured is the
    transformer. Tokenizers and scheduler are the default model's.
    """
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
    from transformers import AutoTokenizer, CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    torch.manual_seed(0)
    weights = ROOT / "weights"
    clip = json.loads((weights / "text_encoder/config.json").read_text())
    t5 = json.loads((weights / "text_encoder_2/config.json").read_text())
    with default_dtype(torch.bfloat16 if workload == FLUX else torch.float32):
        pipeline = FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(weights / "scheduler"),
            vae=vae(workload),
            text_encoder=CLIPTextModel(
                CLIPTextConfig(**clip | {"hidden_size": 32, "projection_dim": 32, "num_hidden_layers": 1})
            ),
            tokenizer=AutoTokenizer.from_pretrained(weights / "tokenizer"),
            text_encoder_2=T5EncoderModel(T5Config(**t5 | {"num_layers": 1})),
            tokenizer_2=AutoTokenizer.from_pretrained(weights / "tokenizer_2"),
            transformer=transformer(workload, t5["d_model"]),
        )
    pipeline.save_pretrained(directory)


def transformer(workload: str, text_width: int) -> Any:
    """Return the denoiser, whose text tokens are `text_width` wide."""
    import torch
    from diffusers import FluxTransformer2DModel

    # Billions of random numbers take a GPU no time.
    with torch.device("cuda" if workload == FLUX and torch.cuda.is_available() else "cpu"):
        return FluxTransformer2DModel(
            patch_size=1, joint_attention_dim=text_width, pooled_projection_dim=32, guidance_embeds=True,
            **TRANSFORMERS[workload],
        )  # fmt: skip


def vae(workload: str) -> Any:
    """Return an autoencoder that halves the picture once for each level but the first."""
    from diffusers import AutoencoderKL

    levels = VAE_LEVELS[workload]
    return AutoencoderKL(
        block_out_channels=(8,) * levels, layers_per_block=1,
        latent_channels=TRANSFORMERS[workload]["in_channels"] // 4, norm_num_groups=4, sample_size=32,
        down_block_types=("DownEncoderBlock2D",) * levels, up_block_types=("UpDecoderBlock2D",) * levels,
        mid_block_add_attention=False, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.0,
        scaling_factor=1.0,
    )  # fmt: skip


@contextlib.contextmanager
def default_dtype(dtype: Any) -> Iterator[None]:
    """Have new parameters made in this precision: ones of twice the size might not fit."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def plan_of(workload: str) -> tuple[list[Any], Sequence[str]]:
    """Return the planned requests, and the files that are part of the version."""
    if workload == PROJECT:
        import predict

        return predict.plan(), [predict.__file__]
    import warmstart

    pixels, tokens = (1024, 512) if workload == FLUX else (32, 32)
    inputs = {
        "prompt": "a handwritten seven",
        "width": pixels,
        "height": pixels,
        "num_inference_steps": 4,
        "guidance_scale": 3.5,
        "max_sequence_length": tokens,
    }
    return [warmstart.Request(f"{pixels}x{pixels}", inputs)], [__file__]


def answer_in_turns(order: dict[str, Any], pipe: IO[str]) -> None:
    """Boot, say what it took, and answer as many requests as each line of `pipe` says, until one says 0.

    `boot_s` is from the start of the interpreter (`order["started"]`, a reading of the monotonic clock, which is the
    same in all processes) to the moment at which any planned request can be answered.
    """
    plan, sources = plan_of(order["workload"])
    ours = order["mode"].startswith("regional")
    run, answer = with_warmstart(plan, sources) if ours else without(plan, order["model"], order["mode"] != "eager")
    answer["boot_s"] = time.monotonic() - order["started"]
    answer["phases"] = {"start": answer["boot_s"] - sum(answer["phases"].values())} | answer["phases"]
    tell(pipe, answer | {"first_s": timed(lambda: run(plan[0]))} | used())
    while requests := int(pipe.readline() or 0):
        tell(pipe, [timed(lambda: run(plan[0])) for _ in range(requests)])
    tell(pipe, used())


def tell(pipe: IO[str], answer: object) -> None:
    """Write one line of JSON."""
    pipe.write(json.dumps(answer) + "\n")
    pipe.flush()


def with_warmstart(plan: list[Any], sources: Sequence[str]) -> tuple[Callable[[Any], object], dict[str, Any]]:
    """Boot as a Predictor's setup() does, with the settings in the environment."""
    import warmstart

    served = warmstart.boot(plan, sources=sources)
    report = json.loads(served.report.json())
    told = {name: report[name] for name in ("outcome", "reason", "phases", "counts")}
    return served, told | {
        "restore_s": report["background"]["restore"],
        "persist_s": report["background"]["persist"],
        "bundle_bytes": report["restored"].get("bytes") or sum(saved["bytes"] for saved in report["persisted"]),
    }


def without(plan: list[Any], model: str, compiled: bool) -> tuple[Callable[[Any], object], dict[str, Any]]:
    """Boot with torch and diffusers alone."""
    from warmstart import inductor
    from warmstart.report import Stopwatch
    from warmstart.settings import Settings

    clock = Stopwatch()
    settings = Settings.from_environment()
    with clock.phase("imports"):
        import torch

        from warmstart import identity
        from warmstart.models.diffusers import DiffusersModel
    torch.set_num_threads(settings.threads)
    device = identity.device(settings)
    with clock.phase("weights"):
        dtype = identity.dtype(settings, device)
        pipeline = DiffusersModel(model, revision=settings.model_revision, device=device, dtype=dtype)
    if compiled:
        for name in pipeline.default_parts():
            # As many graphs as the plan needs: torch's own limit of 8 would end the boot.
            dynamic = len(plan) > 1
            pipeline.parts()[name].compile(fullgraph=True, dynamic=dynamic, recompile_limit=inductor.MAX_GRAPHS)

    def run(request: Any) -> object:
        with torch.inference_mode():
            return pipeline.run(request)

    with clock.phase("warm-up"):
        for request in plan:
            run(request)
    clock.total_s()
    counts = vars(inductor.counts()) if compiled else {}
    return run, {"outcome": "", "reason": "", "phases": clock.seconds, "counts": counts}


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call, whose pictures end in the CPU's memory, so that no device is still at work."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def used() -> dict[str, Any]:
    """Return what the process has used: memory in bytes and CPU time, compilers included."""
    import torch

    answer: dict[str, Any] = {"cpu_s": own_cpu_s(), "peak_bytes": peak_bytes()}
    if torch.cuda.is_available():
        answer |= {"gpu_peak_bytes": torch.cuda.max_memory_allocated(), "gpu_free_bytes": torch.cuda.mem_get_info()[0]}
    return answer


if __name__ == "__main__":
    main()
