"""What blocks do once nothing is left to compile, with Inductor's real graphs: guards are spared, answers stay."""

import json
import os
import subprocess
import sys

import pytest
from booting import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

BLOCKS = """
import copy, json
import torch
from torch import nn
from warmstart import guards, inductor, regions

guards.LIBRARIES += ("__main__",)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, more):
        y = self.linear(x) + more
        return {"a": y[:, 1:], "b": (y * 2, None, more)}


class InPlace(Plain):
    def forward(self, x, more):
        x.add_(more.sum())
        return self.linear(x)


class Returns(Plain):
    def forward(self, x, more):
        return x, x[:, :2], self.linear(more), x.view(-1)


class Buffer(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x, more):
        self.seen.add_(1)
        return self.linear(x) + self.seen


def tensors(value):
    if torch.is_tensor(value):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else []
    return [tensor for item in items for tensor in tensors(item)]


def asked(kind, dynamic):
    torch.manual_seed(0)
    module = kind().eval()
    twin = copy.deepcopy(module)
    region = regions.Region("t", kind.__name__, [module])
    regions.compile_in_place([region], regions.CompileOptions("default", dynamic, True, 16))
    call = module._compiled_call_impl
    through = []
    compiled = call._compiled
    call._compiled = lambda *args, **kwargs: through.append(1) or compiled(*args, **kwargs)
    worst = 0.0
    for run in range(3):
        inductor.run_for(inductor.Run())
        through.clear()
        with inductor.compiling(inductor.Missing.COMPILED):
            for size in (4, 6, 4, 6, 4, 6, 4, 6):
                given = [torch.randn(size, 8), torch.randn(size, 10)[:, 2:]]
                theirs = [tensor.clone() for tensor in given]
                got, want = module(*given), twin(*theirs)
                pairs = zip([*tensors(got), *given, *module.buffers()], [*tensors(want), *theirs, *twin.buffers()],
                            strict=True)
                worst = max(worst, *(float((a - b).abs().max()) for a, b in pairs))
    kept = [known.direct for found in call._guards._known.values() for known in found]
    return worst, len(through), sorted({ours(direct) for direct in kept}), region.counts.graphs


def ours(direct):
    return "" if direct is None else direct.graph.__qualname__.split(".")[-1]


print(json.dumps({f"{kind.__name__} {dynamic}": asked(kind, dynamic)
                  for kind in (Plain, InPlace, Returns, Buffer) for dynamic in (False, True)}))
"""


def run(script: str, live) -> dict:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(live), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_blocks_of_many_kinds_answer_as_uncompiled_ones_do(tmp_path):
    answer = run(BLOCKS, tmp_path)
    for kind in ("Plain", "InPlace", "Returns", "Buffer"):
        # What hands on an argument or a view of it needs AOTAutograd's functions; the others only Inductor's graph.
        called = "<lambda>" if kind == "Returns" else "call"
        for dynamic, graphs in ((False, 2), (True, 1)):
            difference, evaluated, direct, made = answer[f"{kind} {dynamic}"]
            assert difference < 1e-5, (kind, dynamic)
            # Of eight calls in a run, one for each graph.
            assert (evaluated, direct, made) == (graphs, [called], graphs), (kind, dynamic)


DENOISER = """
import json
import torch
from diffusers import FluxTransformer2DModel
from warmstart import inductor, regions

torch.manual_seed(0)
model = FluxTransformer2DModel(
    patch_size=1, in_channels=16, num_layers=2, num_single_layers=3, attention_head_dim=32, num_attention_heads=2,
    joint_attention_dim=64, pooled_projection_dim=32, guidance_embeds=True, axes_dims_rope=(8, 12, 12),
).eval()
inputs = dict(
    hidden_states=torch.randn(1, 16, 16), encoder_hidden_states=torch.randn(1, 8, 64),
    pooled_projections=torch.randn(1, 32), timestep=torch.tensor([0.5]), guidance=torch.tensor([3.5]),
    img_ids=torch.randn(16, 3), txt_ids=torch.zeros(8, 3), return_dict=False,
)
found = regions.find("transformer", model, strategy="regional").regions
through = []
heavier = found[0].modules[0].norm.linear.weight.detach() * 1.5
regions.compile_in_place(found, regions.CompileOptions("default", False, True, 16))
blocks = [module for region in found for module in region.modules]
for block in blocks:
    call = block._compiled_call_impl
    call._compiled = lambda *args, _own=call._compiled, **kwargs: through.append(1) or _own(*args, **kwargs)


def step():
    through.clear()
    return model(**inputs)[0], len(through)


def eager():
    for region in found:
        region.eager = True
    answer = model(**inputs)[0]
    for region in found:
        region.eager = False
    return answer


with inductor.compiling(inductor.Missing.COMPILED):
    for _ in range(3):
        inductor.run_for(inductor.Run())
        first, *others = [step() for _ in range(4)]
    evaluated = [first[1], *(count for _, count in others)]
    same = all(torch.equal(answer, first[0]) for answer, _ in others)
    wrong = [float((first[0] - eager()).abs().max())]
    changed = []
    for change in (
        lambda: setattr(blocks[0].norm.linear, "weight", torch.nn.Parameter(heavier)),
        lambda: blocks[1].proj_out.weight.data.mul_(1.5),
        lambda: setattr(blocks[-1], "norm1_context", blocks[-2].norm1_context),
        lambda: setattr(blocks[-1].ff.net[2], "bias", None),
    ):
        before = step()[0]
        change()
        after, count = step()
        changed.append([not torch.equal(before, after), count])
        wrong.append(float((after - eager()).abs().max()))
print(json.dumps({"evaluated": evaluated, "same": same, "wrong": max(wrong), "changed": changed,
                  "graphs": [region.counts.graphs for region in found]}))
"""


def test_a_denoiser_evaluates_the_guards_of_one_block_of_each_class_in_each_run(tmp_path):
    answer = run(DENOISER, tmp_path)
    assert answer["evaluated"] == [2, 0, 0, 0]
    assert answer["same"]
    assert answer["wrong"] < 1e-4
    # Of a parameter's values no guard knows. A block without a bias needs a graph of its own, and where torch compiles
    # something for a file, it changes the globals of that.
    assert answer["changed"][:3] == [[True, 1], [True, 0], [True, 1]]
    assert answer["changed"][3][0]
    assert sorted(answer["graphs"]) == [1, 2]
