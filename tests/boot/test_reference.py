"""The reference transformer: as many graphs as region classes, with the module's names, types and weights unchanged."""

import json
import os
import subprocess
import sys

import pytest
from booting import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SCRIPT = """
import json, sys
import torch
from diffusers import FluxTransformer2DModel
from warmstart import inductor, regions

torch.manual_seed(0)
model = FluxTransformer2DModel(
    patch_size=1, in_channels=16, num_layers=8, num_single_layers=16, attention_head_dim=32, num_attention_heads=4,
    joint_attention_dim=64, pooled_projection_dim=32, guidance_embeds=True, axes_dims_rope=(8, 12, 12),
).eval()
names, classes = list(model.state_dict()), [type(module) for module in model.modules()]
inputs = dict(
    hidden_states=torch.randn(1, 256, 16), encoder_hidden_states=torch.randn(1, 32, 64),
    pooled_projections=torch.randn(1, 32), timestep=torch.tensor([0.5]), guidance=torch.tensor([3.5]),
    img_ids=torch.randn(256, 3), txt_ids=torch.zeros(32, 3), return_dict=False,
)
with inductor.compiling(inductor.Missing.COMPILED):
    expected = model(**inputs)[0]
found = regions.find("transformer", model, strategy="regional").regions
regions.compile_in_place(found, regions.CompileOptions("default", False, True, 16))
with inductor.compiling(inductor.Missing.COMPILED):
    got = model(**inputs)[0]
print(json.dumps({
    "regions": {region.name: [len(region.modules), region.calls, region.counts.graphs] for region in found},
    "same": names == list(model.state_dict()) and classes == [type(module) for module in model.modules()],
    "difference": float((got - expected).abs().max() / expected.abs().max()),
}))
"""


def test_one_graph_per_region_class(tmp_path):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["regions"] == {
        "transformer.FluxSingleTransformerBlock": [16, 16, 1],
        "transformer.FluxTransformerBlock": [8, 8, 1],
    }
    assert answer["same"]
    assert answer["difference"] < 1e-4
