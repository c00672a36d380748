"""A pipeline of another family boots warm and shares its graphs; scripts/families does the same with many more."""

import re

import families
import family_models
import pytest
from booting import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# Its denoiser is a UNet, guidance doubles its batch, and its graphs are few.
QUICK = "StableDiffusionXLPipeline"


@pytest.fixture(scope="module")
def boots(boot, tmp_path_factory):
    place = tmp_path_factory.mktemp("family")
    family_models.save(families.FAMILIES[QUICK].build, place / "model")
    return [boot(place / "store", **families.order(QUICK, place / "model")) for _ in range(2)]


def row(name: str) -> list[str]:
    """The cells of a pipeline's row in docs/families.md, after its name."""
    text = (ROOT / "docs" / "families.md").read_text()
    found = re.search(rf"^\| {name} \|(.*)\|$", text, flags=re.MULTILINE)
    assert found, f"docs/families.md has no row for {name}"
    return [cell.strip() for cell in found[1].split("|")]


def test_the_second_boot_is_warm_and_no_request_needs_another_graph(boots):
    cold, warm = boots
    assert (cold.report["outcome"], warm.report["outcome"]) == ("cold", "warm")
    assert (warm.counts["fx_misses"], warm.counts["kernels_built"]) == (0, 0)
    assert [item["graphs_again"] for item in warm.report["requests"]] == [0, 0, 0, 0]
    # Other prompts, sizes and numbers of outputs than the planned ones among them.
    assert (warm.after["asked"], warm.after["graphs"], warm.after["reasons"]) == (7, 0, [])
    assert warm.after["difference"] < 1e-3


def test_the_documented_row_is_what_the_boot_says(boots):
    [region] = boots[1].report["regions"]
    regions, graphs, found = row(QUICK)[:3]
    assert (regions, graphs) == (f"{region['name']} x{region['modules']}", str(region["graphs"]))
    assert found == f"{boots[1].counts['fx_hits']}, 0, 0"


@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_family_has_a_row_without_an_empty_cell(name):
    assert all(row(name))
