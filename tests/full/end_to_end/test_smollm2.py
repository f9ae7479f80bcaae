"""SmolLM2 with `--norm softmax` gives Hugging Face's own greedy tokens, alone and with others in the batch."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch

from sharp.plugins.manifest import read_manifest
from sharp.serving.text.chat_template import load_chat_template
from sharp.serving.text.tokenizer import load_tokenizer
from sharp.v1 import inference_pb2, inference_pb2_grpc
from tests.full.end_to_end.commands import serve

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
)
TOKENS = 64


@pytest.fixture(scope="module")
def expected(smollm2) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, 64 greedy tokens) of every prompt by transformers' own generate()."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(smollm2.parent), "gguf_file": smollm2.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    references = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        output = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=2)
        references.append((ids[0].tolist(), output[0, ids.shape[1] :].tolist()))
    return references


def generate(address: str, prompt: str) -> tuple[int, list[int]]:
    """The number of prompt tokens and the generated ids, over gRPC."""
    with grpc.insecure_channel(address) as channel:
        request = inference_pb2.GenerateRequest(
            text=prompt,
            sampling=inference_pb2.Sampling(temperature=0),
            stopping=inference_pb2.Stopping(max_tokens=TOKENS),
        )
        messages = list(inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=120))
    ids = [token for message in messages for token in message.delta.token_ids]
    return messages[0].prompt_info.prompt_tokens, ids


def test_greedy_tokens_equal_hugging_face(export, smollm2, expected):
    with serve(export(smollm2, "softmax")) as server:
        alone = [generate(server.grpc, prompt) for prompt in PROMPTS[:2]]
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            together = list(pool.map(lambda prompt: generate(server.grpc, prompt), PROMPTS))
    references = [(len(prompt_ids), tokens) for prompt_ids, tokens in expected]
    assert alone == references[:2]
    assert together == references


def test_a_conversation_becomes_the_tokens_that_hugging_face_makes_of_it(export, smollm2):
    from transformers import AutoTokenizer

    folder = export(smollm2, "softmax")
    messages = [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Are <you> sure?"},
    ]
    theirs = AutoTokenizer.from_pretrained(str(smollm2.parent), gguf_file=smollm2.name)
    text = load_chat_template(folder).render(messages)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ours = load_tokenizer(folder, read_manifest(folder)).encode(text, special_tokens=False)
    assert ours == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
