"""Bad input through the real entry point: one clear message, exit code 2, never a traceback.

Most cases run launch/train.py's main() in this process, since starting Python costs a second each.
"""

import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megarl.config import Experts, ModelShape, RecipeError, Rope, load_recipe, read_model_shape
from megarl.data import DataError, Problem, carry_addition, write_rows
from megarl.trainer import describe_models, describe_ranks, preflight
from tests.small_job import CONFIG, write_small_job

TRAIN = Path(__file__).resolve().parents[2] / "launch/train.py"
NOBODY = 65534


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_job(tmp_path_factory.mktemp("job"))


@pytest.fixture
def job(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the job that a test may spoil, as the working directory."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Ended(NamedTuple):
    code: int
    output: str
    message: str


Run = Callable[..., Ended]


@pytest.fixture
def run(job: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs launch/train.py as __main__ in the job's directory."""

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", [str(TRAIN), *arguments])
        code: Any = 0
        try:
            runpy.run_path(str(TRAIN), run_name="__main__")
        except SystemExit as end:
            code = end.code
        return Ended(code, *capfd.readouterr())

    return run


Spoil = Callable[[Path], object]


def write(name: str, content: str | bytes) -> Spoil:
    def spoil(job: Path) -> None:
        (job / name).parent.mkdir(exist_ok=True)
        (job / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return spoil


def remove(name: str) -> Spoil:
    return lambda job: (job / name).unlink()


def shorten(name: str, size: int) -> Spoil:
    return lambda job: os.truncate(job / name, size)


def edit(name: str, old: str, new: str) -> Spoil:
    def spoil(job: Path) -> None:
        text = (job / name).read_text()
        assert old in text
        (job / name).write_text(text.replace(old, new, 1))

    return spoil


def config(**changes: Any) -> Spoil:
    return write("model/config.json", json.dumps(CONFIG | changes))


def config_without(field: str) -> Spoil:
    return write("model/config.json", json.dumps({key: value for key, value in CONFIG.items() if key != field}))


def directory(name: str) -> Spoil:
    def spoil(job: Path) -> None:
        (job / name).unlink(missing_ok=True)
        (job / name).mkdir()

    return spoil


def shards(*names: str) -> Spoil:
    """An index that names these files, and nothing else."""
    index = {"weight_map": {f"weight {i}": name for i, name in enumerate(names)}}
    return write("model/model.safetensors.index.json", json.dumps(index))


def token(text: str, number: int) -> Spoil:
    """A tokenizer with one more token, whose id leaves a gap."""

    def spoil(job: Path) -> None:
        tokenizer = json.loads((job / "model/tokenizer.json").read_text())
        tokenizer["model"]["vocab"][text] = number
        (job / "model/tokenizer.json").write_text(json.dumps(tokenizer))

    return spoil


def conversation(*messages: tuple[str, str], template: str = carry_addition.CHAT_TEMPLATE) -> Spoil:
    """Demonstrations that are one conversation, and a chat template."""

    def spoil(job: Path) -> None:
        row = {"messages": [{"role": role, "content": content} for role, content in messages]}
        (job / "demonstrations.jsonl").write_text(json.dumps(row))
        (job / "model/chat_template.jinja").write_text(template)

    return spoil


def reward_model(padding: str) -> Spoil:
    """A recipe that trains one whose configuration calls this token padding."""

    def spoil(job: Path) -> None:
        ids = json.loads((job / "model/tokenizer.json").read_text())["model"]["vocab"]
        config(pad_token_id=ids[padding])(job)
        recipe = (job / "sft.yaml").read_text().replace("type: sft", "type: reward_model")
        (job / "reward_model.yaml").write_text(recipe.replace("sequences: 8", "pairs: 8"))

    return spoil


TALK = [("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4")]
UNSPOILT = config()
CUT_WEIGHTS = shorten("model/model.safetensors", 200)
# (how the job is spoilt, arguments after the recipe, what the message must contain)
RECIPE_FILES: list[tuple[Spoil, list[str]]] = [
    (remove("rl.yaml"), ["rl.yaml: cannot read the recipe: No such file"]),
    (directory("rl.yaml"), ["rl.yaml: cannot read the recipe: Is a directory"]),
    (write("rl.yaml", ""), ["rl.yaml: the recipe is empty; expected keys and values, such as type: sft"]),
    (write("rl.yaml", "- steps\n- 3"), ["expected keys and values, such as type: sft, and found a list"]),
    (write("rl.yaml", "hello"), ["expected keys and values", "found the value 'hello'"]),
    (write("rl.yaml", b"type: rl # caf\xe9"), ["not UTF-8 text (byte 15); save it as UTF-8"]),
    (write("rl.yaml", b"\x00\x01\x02"), ["rl.yaml: not YAML: character 1: special characters are not allowed"]),
    (write("rl.yaml", "batch:\n\tprompts: 3"), ["not YAML: line 2, column 1:", "indent with spaces, not tabs"]),
    (write("rl.yaml", "batch: {prompts: 3"), ["not YAML: line 1, column 19: expected ',' or '}'"]),
    (write("rl.yaml", "steps: 3\nseed: 1\nsteps: 4"), ["line 3", "the key 'steps' stands here and in line 1"]),
    (write("rl.yaml", "a: *b"), ["not YAML: line 1", "undefined alias 'b'"]),
    (write("rl.yaml", "a: !!python/name:os.system x"), ["not YAML: line 1", "python/name:os.system"]),
    (write("rl.yaml", "steps: " + "9" * 5000), ["not YAML: a number that is too long"]),
    (write("rl.yaml", "a: " + "[" * 1200), ["not YAML: too deeply nested"]),
    (
        edit("rl.yaml", "type: rl\n", ""),
        ["rl.yaml: type: this key is needed and missing; one of sft, reward_model, rl"],
    ),
    (edit("rl.yaml", "type: rl\n", "type: ppo\n"), ["rl.yaml: type: must be one of sft, reward_model, rl, got 'ppo'"]),
    (edit("rl.yaml", "steps: 4", "steps: ten"), ["rl.yaml: steps: must be an integer, got 'ten'"]),
    (edit("rl.yaml", "steps: 4", "7: 4"), ["steps: this key is needed and missing (Steps to train)", "7: keys"]),
]
OVERRIDES: list[tuple[str, list[str]]] = [
    ("steps", ["override 'steps': expected key.path=value, such as batch.prompts=16"]),
    ("=3", ["override '=3': expected key.path=value"]),
    ("batch..prompts=3", ["override 'batch..prompts=3': expected key.path=value"]),
    ("steps.more=3", ["override 'steps.more=3': steps is 4 and has no keys; set it as a whole"]),
    ("optimizer.betas=[0.9", ["the value is not YAML: line 1", "try quotes around it"]),
    ("stepz=3", ["override 'stepz=3': stepz: unknown key; did you mean steps?"]),
    ("steps=true", ["steps: must be an integer, got true"]),
    ("steps='3'", ["steps: must be an integer, got '3'"]),
    ("steps=2.5", ["steps: must be an integer, got 2.5"]),
    ("steps=", ["steps: must be an integer, got nothing"]),
    ("steps=0", ["steps: must be greater than 0, got 0"]),
    ("steps=99999999999", ["steps: must be less than or equal to 2147483647, got 99999999999"]),
    ("seed=-1", ["seed: must be greater than or equal to 0, got -1"]),
    ("checkpoint.every=-1", ["checkpoint.every: must be greater than or equal to 0, got -1"]),
    ("checkpoint.final=1", ["checkpoint.final: must be true or false, got 1"]),
    ("optimizer.learning_rate=.nan", ["optimizer.learning_rate: must be", "got nan"]),
    ("optimizer.learning_rate=1e999", ["optimizer.learning_rate: must be a finite number, got inf"]),
    ("optimizer.learning_rate=1e300", ["optimizer.learning_rate: must be less than or equal to 3000", "got 1e+300"]),
    ("optimizer.learning_rate=-1e-4", ["must be greater than 0, got -0.0001"]),
    ("optimizer.betas=[0.9, 1]", ["optimizer.betas.1: must be less than 1, got 1"]),
    ("optimizer.betas=0.9", ["optimizer.betas: must be a list, got 0.9"]),
    ("optimizer.schedule=cosine", ["keys (type, final_ratio) and type one of constant, cosine, got 'cosine'"]),
    ("optimizer.schedule.final_ratio=0", ["unknown key; another type of optimizer.schedule has it"]),
    ("optimizer.schedule={type: constant, final_ratio: 0}", ["unknown key; another type of optimizer.schedule"]),
    ("optimizer.warmup_steps=5", ["optimizer.warmup_steps: 5 is more than steps (4)", "make it smaller"]),
    ("runtime.deadline_s=1e300", ["runtime.deadline_s: must be less than or equal to 100000000, got 1e+300"]),
    (
        "batch=",
        ["must be a section with keys (prompts, group_size, sampling, max_tokens_per_rank), got nothing"],
    ),
    (
        "batch=[2, 4]",
        ["section with keys (prompts, group_size, sampling, max_tokens_per_rank), got [2, 4]"],
    ),
    ("batch.group_size=0", ["batch.group_size: must be greater than 0, got 0"]),
    ("batch.group_size=1", ["batch.group_size: 1 sample has nothing to be compared with, and the grpo advantage"]),
    ("model.dtype=fp16", ["model.dtype: must be 'float32' or 'bfloat16', got 'fp16'"]),
    ("model.path=~/model", ["model.path: must be written out: ~ and $VARIABLES are not replaced here, got '~/model'"]),
    ("model.path=$WORK/model", ["model.path: must be written out", "got '$WORK/model'"]),
    ("model.path=Qwen/Qwen3-0.6B", ["no directory Qwen/Qwen3-0.6B", "Hugging Face directory", "nothing is downloaded"]),
    ("model.path=train.jsonl", ["model.path: no directory train.jsonl"]),
    (f"model.path={'long' * 100}", ["longlong: File name too long"]),
    ("name=a/b", ["name: must match pattern", "got 'a/b'"]),
    ("name=12", ["name: must be text (in quotes, if it looks like something else), got 12"]),
    ("name=..", ["name: must match pattern", "got '..'"]),
    (
        "reward.sources.answer.type=exact",
        ["reward.sources.answer.type: must be one of exact_match, math_verify, own, model, engine, got 'exact'"],
    ),
    ("reward.sources.answer.pattern='('", ["reward.sources.answer.pattern: must be a regular expression", "got '('"]),
    (
        "reward.sources.answer.pattern=answer",
        ["reward.sources.answer.pattern: must have exactly one (group)", "has 0, got 'answer'"],
    ),
    ("reward.sources.answer.pattern=(a)|(b)", ["must have exactly one (group)", "has 2, got '(a)|(b)'"]),
    ("algorithm.loss.type=dapo", ["algorithm.loss.type: must be one of ppo, gspo, gmpo", "got 'dapo'"]),
    ("algorithm.type=grpo", ["algorithm.type: unknown key", "known here are advantage, loss"]),
    ("algorithm.minibatches=3", ["minibatches: 2 prompts x 4 samples = 8 sequences", "use fewer minibatches"]),
    ("layout.tensor=3", ["4 ranks cannot be divided into tensor 3", "attention heads (8)", "use one of 1, 2, 4, 8"]),
    ("layout.tensor=16", ["layout.tensor: 16 does not divide the model's attention heads (8); use one of 1, 2, 4, 8"]),
    ("layout.pipeline=4", ["layout.pipeline: 4 does not divide the model's 2 layers; use one of 1, 2"]),
    ("mode={max_lag: 1, interrupt: true, ask: 5}", ["mode.ask: 5 groups at once; use at least batch.prompts (2)"]),
    ("mode={max_lag: 1, interrupt: true, ask: 1}", ["mode.ask: 1 groups at once", "at most (max_lag + 1) x batch.pr"]),
    ("mode={max_lag: 65, interrupt: true}", ["mode.max_lag: must be less than or equal to 64, got 65"]),
    ("mode.interrupt=true", ["mode.interrupt: with max_lag 0 all responses are finished when the weights change"]),
    ("mode.ask=5", ["mode.ask: 5 groups at once; with max_lag 0 these are batch.prompts (2)", "or raise mode.max_lag"]),
    (
        "mode.max_lag=1",
        ["mode.interrupt: with placement colocated rollouts and training take turns", "or use placement disaggregated"],
    ),
    (
        "rollout.tensor_parallel=3",
        ["engines of 3 ranks must divide those that roll out evenly", "there are 4 ranks, 4 a node"],
    ),
    ("rollout.max_new_tokens=64", ["rollout.max_new_tokens: 64 leaves no room", "64 positions; make it smaller"]),
    ("rollout.max_new_tokens=55", ["train.jsonl: line ", "tokens, but the model's 64 positions less", "leave 9"]),
    ("rollout.server_args={port: 1}", ["rollout.server_args.port: megarl sets this one itself; leave it out"]),
    ("rollout.server_args=[port]", ["rollout.server_args: must be keys with values, got ['port']"]),
    ("data.train=absent.jsonl", ["data.train: absent.jsonl: no such file"]),
    ("data.test=model", ["data.test: model: is a directory; expected a file of JSON lines"]),
    ("data.train=demonstrations.jsonl", ["data.train: demonstrations.jsonl: line 1: no answer, which the rule answer"]),
    ("reward.sources={}", ["reward.sources: must have at least 1 item"]),
    ("reward.sources=exact_match", ["reward.sources: must be keys with values, got 'exact_match'"]),
    ("reward.sources={2nd: {type: exact_match}}", ["reward.sources.2nd: must match pattern"]),
    ("reward.sources={a: {pattern: x}}", ["reward.sources.a.type: this key is needed and missing; one of exact_match"]),
    ("reward.sources.answer.weight=1e300", ["reward.sources.answer.weight: must be less than or equal to 3000"]),
    (
        "reward.sources.mine={type: own, function: 'math:hypot', options: {x: 99999999999999999999}}",
        ["reward.sources.mine.options: must have whole numbers of 64 bits only"],
    ),
    ("reward.sources.answer.weight=0", ["reward.sources: all weights are 0"]),
    ("reward.sources.answer.datasets=[gsm8k]", ["reward.sources.answer.datasets: no row has the dataset 'gsm8k'"]),
    ("reward.sources.answer.datasets=[]", ["answer.datasets: must have at least 1 item, got []"]),
    ("reward.sources.answer.datasets=sums", ["reward.sources.answer.datasets: must be a list, got 'sums'"]),
    ("reward.sources.mine={type: own, function: f}", ["reward.sources.mine.function: must match pattern"]),
    ("reward.sources.mine={type: own, function: 'no_such:f'}", ["reward.sources.mine.function: 'no_such:f' cannot be"]),
    (
        "reward.sources.mine={type: own, function: 'math:cos'}",
        ["cannot be called as it will be: too many positional arguments"],
    ),
    (
        "algorithm.loss={type: own, function: 'math:hypot2'}",
        ["loss.function: 'math:hypot2' cannot be loaded"],
    ),
    (
        "algorithm.advantage={type: own, function: 'os.path:split', options: {k: 1}}",
        ["algorithm.advantage.function: 'os.path:split' cannot be called as it will be", "1 argument and by name k"],
    ),
    ("reward.sources.mine={type: own, function: 'os:name'}", ["mine.function: 'os:name' is not a function"]),
    ("reward.sources.rm={type: model, model: {path: model}}", ["rm.model.path: model has no layer that scores"]),
    (
        "reward.sources.rm={type: engine, model: {path: no}}",
        ["rm.model.path: no directory no; expected"],
    ),
    (
        "reward.sources.rm={type: engine, tensor_parallel: 3, server_args: {host: h}, model: {path: model}}",
        ["reward.sources.rm.tensor_parallel: engines of 3 ranks", "reward.sources.rm.server_args.host: megarl sets"],
    ),
    (
        "reward={sources: {a: {type: exact_match, weight: 0}, m: {type: model, model: {path: model}, weight: 0}}}",
        ["reward.sources: all weights are 0"],
    ),
    ("batch.sampling={type: informative, ask: 1}", ["batch.sampling.ask: 1 is less than batch.prompts (2)"]),
    ("data={train: train.jsonl}", ["data.test: this key is needed and missing (JSON lines"]),
    ("run_dir=train.jsonl", ["run_dir: train.jsonl cannot be made, since train.jsonl is no directory; give another"]),
    ("run_dir=train.jsonl/run", ["run_dir: train.jsonl/run cannot be made, since train.jsonl is no directory"]),
    ("run_dir=3", ["run_dir: must be a path, got 3"]),
]
MODELS: list[tuple[Spoil, list[str]]] = [
    (remove("model/config.json"), ["cannot read model/config.json: No such file", "is it a Hugging Face directory?"]),
    (directory("model/config.json"), ["cannot read model/config.json: Is a directory"]),
    (write("model/config.json", "{\n'a': 1}"), ["model/config.json: line 2 is not JSON"]),
    (write("model/config.json", b"\xff\xfe"), ["model/config.json: not JSON; expected the model's configuration"]),
    (write("model/config.json", "[" * 50000), ["model/config.json: not JSON"]),
    (write("model/config.json", "[1, 2]"), ["expected an object with the model's configuration, found [1, 2]"]),
    (config_without("vocab_size"), ["config.json: field 'vocab_size' is missing; expected a positive whole number"]),
    (config_without("rms_norm_eps"), ["config.json: field 'rms_norm_eps' is missing; expected a positive number"]),
    (config_without("architectures"), ["architectures is None; expected a list of one of LlamaForCausalLM, Qwen2"]),
    (config(architectures="Qwen3ForCausalLM"), ["architectures is 'Qwen3ForCausalLM'; expected a list of one of"]),
    (config(architectures=["Qwen4ForCausalLM"]), ["architecture Qwen4ForCausalLM is not supported; known"]),
    (config(num_attention_heads="8"), ["num_attention_heads is '8'; expected a positive whole number"]),
    (config(num_hidden_layers=2.0), ["num_hidden_layers is 2.0; expected a positive whole number"]),
    (config(num_key_value_heads=3), ["num_attention_heads 8 is not a multiple of num_key_value_heads 3"]),
    (config(head_dim=None, hidden_size=65), ["hidden_size 65 is not a multiple of num_attention_heads 8"]),
    (config(rms_norm_eps="1e-6"), ["rms_norm_eps is '1e-6'; expected a positive number"]),
    (config(rope_parameters={"rope_type": "dynamic"}), ["rope type 'dynamic' is not supported; only 'default', "]),
    (config(rope_parameters=[1]), ["rope_parameters is [1]; expected an object"]),
    (config(rope_scaling={"type": "ntk", "factor": 2}, rope_parameters=None), ["rope type 'ntk' is not"]),
    (config(hidden_act="gelu"), ["hidden_act is 'gelu', which is not supported; only 'silu' is"]),
    (config(attention_bias=True), ["attention_bias is true, which is not supported; only false is"]),
    (config(tie_word_embeddings="yes"), ["tie_word_embeddings is 'yes'; expected true or false"]),
    (config(quantization_config={"quant_method": "fp8"}), ["quantized to FP8", "convert_checkpoint.py export"]),
    (config(vocab_size=100), ["the tokenizer has ", "config.json's vocab_size is only 100", "must be of one model"]),
    (token("<far>", 700), ["token ids up to 700", "vocab_size is only 512", "must be of one model"]),
    (remove("model/model.safetensors"), ["model/model.safetensors is missing; expected *.safetensors weights"]),
    (CUT_WEIGHTS, ["model/model.safetensors is cut off or damaged", "copy or convert it again"]),
    (write("model/model.safetensors", ""), ["model/model.safetensors is cut off or damaged"]),
    (shards(), ["model/model.safetensors.index.json is damaged"]),
    (shards("model-1.safetensors"), ["model/model-1.safetensors is missing"]),
    (write("model/model.safetensors.index.json", "[]"), ["index.json is damaged; expected an object with a weight"]),
    (remove("model/tokenizer.json"), ["model.path: model: no tokenizer.json; expected a Hugging Face directory"]),
    (write("model/tokenizer.json", "{}"), ["model.path: model: tokenizer.json cannot be loaded"]),
    (remove("model/chat_template.jinja"), ["the tokenizer has no chat template; add chat_template.jinja"]),
    (write("model/chat_template.jinja", "{% for x %}"), ["model.path: model: the chat template cannot be applied"]),
    (write("model/chat_template.jinja", "{# empty #}"), ["model: the chat template makes nothing of a message"]),
    (write("model/chat_template.jinja", "{{ 1 / 0 }}"), ["model.path: model: the chat template cannot be applied"]),
    (write("train.jsonl", ""), ["data.train: train.jsonl: no rows; expected JSON lines with prompt"]),
    (write("test.jsonl", '{"prompt": "1", "answer": "1"}\n{"prompt"'), ["data.test: test.jsonl: line 2: not JSON"]),
    (write("run/metrics.jsonl", ""), ["run_dir: run holds a run; --resume continues it, or give another run_dir"]),
]


def check_message(message: str, contained: list[str]) -> None:
    for part in contained:
        assert part in message
    assert "Traceback" not in message
    assert 0 < len(message.strip().splitlines()) <= 4
    assert all(len(line) < 700 for line in message.splitlines())


CASES = [
    *(("rl.yaml", spoil, [], contained) for spoil, contained in RECIPE_FILES + MODELS),
    *(("rl.yaml", UNSPOILT, [override], contained) for override, contained in OVERRIDES),
    ("rl.yaml", UNSPOILT, ["--resume"], ["--resume: run holds no run; leave --resume out, or give the run's run_dir"]),
    (
        "rl.yaml",
        UNSPOILT,
        ["mode={max_lag: 1, interrupt: true}", "batch.sampling.type=informative"],
        ["batch.sampling: a step that looks for informative groups asks for them itself; use type all"],
    ),
    ("sft.yaml", UNSPOILT, ["batch.sequences=3"], ["3 sequences are less than the 4 data-parallel ranks"]),
    ("sft.yaml", UNSPOILT, ["rollout.max_new_tokens=1"], ["rollout: unknown key; a recipe of type rl has it"]),
    ("sft.yaml", UNSPOILT, ["data.train=train.jsonl"], ["line 1: no response: expected the keys prompt, response"]),
    (
        "sft.yaml",
        config(max_position_embeddings=40),
        [],
        ["demonstrations.jsonl: line ", "tokens, more than the model's 40"],
    ),
    ("sft.yaml", UNSPOILT, ["data.roles=[]"], ["data.roles: must have at least 1 item"]),
    ("sft.yaml", UNSPOILT, ["data.roles=assistant"], ["data.roles: must be a list, got 'assistant'"]),
    ("sft.yaml", UNSPOILT, ["data.roles=[1]"], ["data.roles.0: must be text"]),
    ("sft.yaml", UNSPOILT, ["data.roles=['']"], ["data.roles.0: must have at least 1 character, got ''"]),
    (
        "sft.yaml",
        UNSPOILT,
        ["data.roles=[tool]"],
        ["data.train: demonstrations.jsonl: line 1: nothing to learn: expected"],
    ),
    (
        "sft.yaml",
        UNSPOILT,
        ["data.roles=[user, assistant]"],
        ["demonstrations.jsonl: line 1: message 1 (user) is learned"],
    ),
    ("sft.yaml", conversation(), [], ["data.train: demonstrations.jsonl: line 1: 'messages' is empty"]),
    ("sft.yaml", conversation(("user", "1"), ("bot", "1")), [], ["line 1: nothing to learn: ", "found user, bot"]),
    ("sft.yaml", conversation(("user", "1"), ("assistant", "")), [], ["line 1: message 2: 'content' is empty"]),
    (
        "sft.yaml",
        conversation(("user", "1"), ("assistant", "1" * 64)),
        [],
        ["line 1: ", "tokens, more than the model's 64"],
    ),
    (
        "sft.yaml",
        conversation(*TALK, template="a{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}"),
        [],
        ["demonstrations.jsonl: line 1: the chat template refuses messages of the roles user, assistant, user: no"],
    ),
    (
        "sft.yaml",
        conversation(*TALK, template="{{ messages | length }}"),
        [],
        ["line 1: the chat template does not keep what precedes message 3 as it was: it writes '3'"],
    ),
    ("sft.yaml", write("demonstrations.jsonl", "\n"), [], ["data.train: demonstrations.jsonl: no rows; expected"]),
    (
        "reward_model.yaml",
        reward_model("<|im_end|>"),
        ["data={train: none.jsonl, test: none.jsonl}"],
        ["model.path: model: its padding is the eos token, with which answers end"],
    ),
]


@pytest.mark.parametrize(("recipe", "spoil", "arguments", "contained"), CASES, ids=[case[3][0][:50] for case in CASES])
def test_bad_input_is_explained(
    job: Path, run: Run, recipe: str, spoil: Spoil, arguments: list[str], contained: list[str]
) -> None:
    spoil(job)
    ended = run(recipe, *arguments, "--check", "--ranks", "4")
    assert (ended.code, ended.output) == (2, "")
    check_message(ended.message, contained)
    assert not (job / "run/logs").exists()


@pytest.mark.parametrize(
    ("arguments", "contained"),
    [
        ([], "the following arguments are required: recipe"),
        (["rl.yaml", "--check", "--ranks", "0"], "--ranks: expected a positive whole number, got '0'"),
        (["rl.yaml", "--check", "--ranks", "two"], "--ranks: expected a positive whole number, got 'two'"),
        (["rl.yaml", "--ranks", "2"], "--ranks starts none and needs --dry-run or --check"),
        (["rl.yaml", "--cheque"], "unrecognized arguments: --cheque"),
    ],
)
def test_a_bad_command_line_is_explained(run: Run, arguments: list[str], contained: str) -> None:
    ended = run(*arguments)
    assert ended.code == 2
    assert ended.message.startswith("usage: train.py")
    assert contained in ended.message


@pytest.mark.parametrize(
    "arguments", [["rl.yaml"], ["rl.yaml", "evaluation.problems=1000"], ["sft.yaml", "--ranks", "8", "seed=3"]]
)
def test_good_input_passes_and_leaves_nothing_behind(job: Path, run: Run, arguments: list[str]) -> None:
    before = sorted(job.iterdir())
    assert run(*arguments, "--check") == Ended(0, "run\n", "")
    assert sorted(job.iterdir()) == before


def test_a_special_token_may_lie_beyond_the_vocabulary(job: Path, run: Run) -> None:
    """Gemma 3 has one for images; a prompt that used it would be refused by the model engine."""
    tokenizer = json.loads((job / "model/tokenizer.json").read_text())
    image = {name: False for name in ("single_word", "lstrip", "rstrip", "normalized")}
    tokenizer["added_tokens"].append({"id": 512, "content": "<image>", "special": True, **image})
    (job / "model/tokenizer.json").write_text(json.dumps(tokenizer))
    assert run("rl.yaml", "--check").code == 0


def routed(job: Path, train: str, test: str) -> None:
    """Data of these datasets."""
    for name, dataset in (("train", train), ("test", test)):
        write_rows(job / f"{name}.jsonl", [Problem("1+1=", "2", dataset)])


def test_a_rule_may_score_rows_of_the_test_file_alone(job: Path, run: Run) -> None:
    routed(job, "sums", "exam")
    assert run("rl.yaml", "reward.sources.other={type: math_verify, datasets: [exam]}", "--check").code == 0
    assert run("rl.yaml", "reward.sources.other={type: math_verify, datasets: [exam, x]}", "--check").message == (
        "reward.sources.other.datasets: no row has the dataset 'x'; there are 'exam', 'sums'\n"
    )


@pytest.mark.parametrize(
    ("train", "test", "datasets", "message"),
    [
        ("", "sums", "[sums]", "data.train: train.jsonl: line 1 (no dataset): no source of reward.sources scores"),
        (
            "sums",
            "exam",
            "[sums]",
            "test.jsonl: line 1 (dataset 'exam'): no source of reward.sources scores it; name 'e",
        ),
        ("", "", "['', sums]", "answer.datasets: no row has the dataset 'sums'; there are rows without one"),
        ("sums", "sums", "['', sums]", "answer.datasets: no row is without a dataset; there are 'sums'"),
    ],
)
def test_rows_and_sources_must_meet(job: Path, run: Run, train: str, test: str, datasets: str, message: str) -> None:
    routed(job, train, test)
    ended = run("rl.yaml", f"reward.sources.answer.datasets={datasets}", "--check")
    check_message(ended.message, [message])


def test_prompts_that_are_never_asked_may_be_long(job: Path, run: Run) -> None:
    with (job / "test.jsonl").open("a") as file:
        file.write('{"prompt": "%s", "answer": "1"}\n' % ("1" * 200))
    codes = [run("rl.yaml", f"evaluation.problems={asked}", "--check").code for asked in (0, 5, 6)]
    assert codes == [0, 0, 2]


@pytest.fixture
def public_job(prepared: Path) -> Iterator[Path]:
    """A copy of the job that every user may read, which pytest's own directories are not."""
    with tempfile.TemporaryDirectory() as there:
        job = Path(shutil.copytree(prepared, there, dirs_exist_ok=True))
        for path in [job, *job.rglob("*")]:
            path.chmod(0o755)
        yield job


def complaint_to_nobody(job: Path, run_dir: str = f"{tempfile.gettempdir()}/never_made") -> str:
    """What preflight says to a user whom permissions bind, which root is not."""
    files = [f"data={{train: {job}/train.jsonl, test: {job}/test.jsonl}}", f"model.path={job}/model"]
    recipe = load_recipe(job / "rl.yaml", [*files, f"run_dir={run_dir}"])
    mine = os.geteuid()
    if mine == 0:
        os.seteuid(NOBODY)
    try:
        with pytest.raises((RecipeError, DataError)) as caught:
            preflight(recipe, world=1, ranks_per_node=1, resume=False)
    finally:
        os.seteuid(mine)
    return str(caught.value)


def test_a_run_directory_that_may_not_be_written(public_job: Path) -> None:
    kept = public_job / "kept"
    kept.mkdir(mode=0o555)
    message = complaint_to_nobody(public_job, f"{kept}/runs/one")
    check_message(message, [f"run_dir: {kept}/runs/one cannot be written, since {kept} is not writable for you"])


@pytest.mark.parametrize("name", ["model/config.json", "model/model.safetensors", "train.jsonl"])
def test_a_file_that_may_not_be_read(public_job: Path, name: str) -> None:
    (public_job / name).chmod(0)
    check_message(complaint_to_nobody(public_job), [f"{public_job}/{name}", "Permission denied"])


def test_a_model_directory_that_may_not_be_entered(public_job: Path) -> None:
    (public_job / "model").chmod(0)
    check_message(complaint_to_nobody(public_job), [f"{public_job}/model", "Permission denied"])
    (public_job / "model").chmod(0o755)


# --- real processes


def run_process(job: Path, *arguments: str) -> Ended:
    command = [sys.executable, str(TRAIN), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=job, timeout=120, check=False)
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("spoil", "arguments", "contained"),
    [
        (UNSPOILT, ["rl.yaml", "steps=ten", "--check"], ["override 'steps=ten': steps: must be an integer, got 'ten'"]),
        (directory("rl.yaml"), ["rl.yaml", "--check"], ["rl.yaml: cannot read the recipe: Is a directory"]),
        (write("test.jsonl", "x"), ["rl.yaml", "--dry-run"], ["data.test: test.jsonl: line 1: not JSON"]),
        # no --check: what a rank itself says, before and after it has joined the others
        (UNSPOILT, ["rl.yaml", "batch.prompt=3"], ["batch.prompt: unknown key; did you mean batch.prompts?"]),
        (CUT_WEIGHTS, ["sft.yaml"], ["model/model.safetensors is cut off or damaged"]),
    ],
)
def test_a_real_process_explains_and_ends(job: Path, spoil: Spoil, arguments: list[str], contained: list[str]) -> None:
    spoil(job)
    ended = run_process(job, *arguments)
    assert (ended.code, ended.output) == (2, "")
    check_message(ended.message, contained)
    assert not (job / "run").exists()


def test_a_dry_run_shows_where_the_experts_are(tmp_path: Path) -> None:
    experts = Experts(8, 2, 16, layers=(2, 3))
    shape = ModelShape("qwen3_moe", 4, 64, 8, 4, 16, 128, 512, 64, 1e-6, Rope(1e4), True, experts=experts)
    recipe = load_recipe(write_small_job(tmp_path) / "sft.yaml", ["layout={tensor: 2, pipeline: 2, expert: 4}"])
    assert list(describe_ranks(recipe, shape, world=8))[2:6] == [
        "rank 2: tensor 0/2, pipeline 0/2, expert 2/4, data 1/2; layers 0-1, vocabulary rows 0-255",
        "rank 3: tensor 1/2, pipeline 0/2, expert 3/4, data 1/2; layers 0-1, vocabulary rows 256-511",
        "rank 4: tensor 0/2, pipeline 1/2, expert 0/4, data 0/2; layers 2-3, experts 0-1, vocabulary rows 0-255",
        "rank 5: tensor 1/2, pipeline 1/2, expert 1/4, data 0/2; layers 2-3, experts 2-3, vocabulary rows 256-511",
    ]


@pytest.mark.parametrize(
    ("kind", "engines"),
    [
        (
            "disaggregated",
            ["", "", "engine 0 on ranks 2-3", "", "engine 1 on ranks 4-5", "reward engine served on rank 5"],
        ),
        (
            "hybrid",
            [
                "engine 0 on ranks 0-1",
                "",
                "engine 1 on ranks 2-3",
                "",
                "engine 2 on ranks 4-5",
                "reward engine served on rank 5",
            ],
        ),
    ],
)
def test_a_dry_run_shows_who_trains_and_who_rolls_out(job: Path, kind: str, engines: list[str]) -> None:
    overrides = [
        "layout.tensor=2",
        "rollout.tensor_parallel=2",
        f"placement={{type: {kind}, train_ranks: 2}}",
        "reward.sources.served={type: engine, model: {path: scorer}}",
    ]
    recipe = load_recipe(job / "rl.yaml", overrides)
    shape = read_model_shape(recipe.model.path)
    said = [line.split("; starts ") for line in describe_ranks(recipe, shape, world=6)]
    assert [head.removesuffix("; coordinator") for head, *_ in said] == [
        "rank 0: tensor 0/2, pipeline 0/1, data 0/1; layers 0-1, vocabulary rows 0-255",
        "rank 1: tensor 1/2, pipeline 0/1, data 0/1; layers 0-1, vocabulary rows 256-511",
        *(f"rank {rank}: does not train" for rank in range(2, 6)),
    ]
    assert ["".join(starts).removesuffix("; coordinator") for _, *starts in said] == engines


def test_a_dry_run_names_all_models(job: Path) -> None:
    (job / "scorer").mkdir()
    scores = {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1, "pad_token_id": 0}
    (job / "scorer/config.json").write_text(json.dumps(CONFIG | scores | {"num_hidden_layers": 1}))
    overrides = [
        "algorithm={advantage: {type: gae}, kl: {coefficient: 0.1}}",
        "critic={type: critic, model: {path: scorer}, optimizer: {learning_rate: 1e-4}}",
        "reward.sources.taste={type: model, model: {path: scorer}}",
        "reward.sources.served={type: engine, model: {path: scorer}}",
    ]
    recipe = load_recipe(job / "rl.yaml", overrides)
    assert list(describe_models(recipe, read_model_shape(recipe.model.path), world=4)) == [
        "model: qwen3, 0.13M parameters, 2 layers",
        "reference: model, qwen3, 0.13M parameters, 2 layers, frozen, in the model's layout",
        "critic: scorer, qwen3, 0.08M parameters, 1 layer, trained in the model's layout",
        "reward.sources.taste: scorer, qwen3, 0.08M parameters, 1 layer, frozen, in the model's layout",
        "reward.sources.served: scorer, qwen3, 0.08M parameters, 1 layer, on an engine of its own",
        "rollouts: 4 engines of 1 rank each, in float32, policy context, weights by direct",
        "placement: colocated, of 4 ranks 4 train, 4 roll out; engines wait while the model trains",
        "mode: synchronous, at most 2 groups at once",
    ]


@pytest.mark.parametrize(
    ("interrupt", "placed", "then"),
    [
        (
            "true",
            "disaggregated, of 4 ranks 3 train, 1 roll out; engines may go on while the model trains",
            "go on with new weights",
        ),
        (
            "false",
            "disaggregated, of 4 ranks 3 train, 1 roll out; engines may go on while the model trains",
            "are finished before new weights, and training waits",
        ),
        (
            "true",
            "hybrid, of 4 ranks 3 train, 4 roll out; engines on ranks that train wait meanwhile",
            "go on with new weights",
        ),
    ],
)
def test_a_dry_run_says_what_placement_and_mode_do(job: Path, interrupt: str, placed: str, then: str) -> None:
    overrides = [
        f"placement={{type: {placed.split(',')[0]}, train_ranks: 3}}",
        f"mode={{max_lag: 2, interrupt: {interrupt}}}",
        "algorithm.correction.type=importance",
    ]
    recipe = load_recipe(job / "rl.yaml", overrides)
    assert list(describe_models(recipe, read_model_shape(recipe.model.path), world=4))[-2:] == [
        f"placement: {placed}",
        f"mode: tokens lag by 2 versions at most, at most 6 groups at once; responses under way {then};"
        " algorithm.correction importance",
    ]


def test_a_run_directory_that_turns_out_unwritable(job: Path) -> None:
    """The kernel refuses new directories there even to root, and no check could know."""
    ended = run_process(job, "sft.yaml", "run_dir=/proc/megarl/run")
    assert (ended.code, ended.output) == (2, "")
    check_message(ended.message, ["run_dir: /proc/megarl/run cannot be written (No such file", "give another run_dir"])


def test_a_dry_run_prints_the_recipe_and_each_ranks_part(job: Path, run: Run) -> None:
    overrides = ["layout={tensor: 2, pipeline: 2}", "rollout.tensor_parallel=2", "name=shown"]
    ended = run("rl.yaml", *overrides, "--dry-run", "--ranks", "4")
    assert (ended.code, ended.message) == (0, "")
    (job / "resolved.yaml").write_text(ended.output)
    assert load_recipe(job / "resolved.yaml", []) == load_recipe(job / "rl.yaml", overrides)
    assert [line for line in ended.output.splitlines() if line.startswith("#")] == [
        "# model: qwen3, 0.13M parameters, 2 layers",
        "# rollouts: 2 engines of 2 ranks each, in float32, policy context, weights by direct",
        "# placement: colocated, of 4 ranks 4 train, 4 roll out; engines wait while the model trains",
        "# mode: synchronous, at most 2 groups at once",
        "# run directory: run",
        "# what each rank would do; everything is counted from 0:",
        "# rank 0: tensor 0/2, pipeline 0/2, data 0/1; layer 0, vocabulary rows 0-255;"
        " starts engine 0 on ranks 0-1; coordinator",
        "# rank 1: tensor 1/2, pipeline 0/2, data 0/1; layer 0, vocabulary rows 256-511",
        "# rank 2: tensor 0/2, pipeline 1/2, data 0/1; layer 1, vocabulary rows 0-255; starts engine 1 on ranks 2-3",
        "# rank 3: tensor 1/2, pipeline 1/2, data 0/1; layer 1, vocabulary rows 256-511",
    ]
