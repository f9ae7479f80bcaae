"""The encoder's engine: batches of texts, the order of requests, and failures."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharp.core.manifest import Manifest, Norm, SourceRecord
from sharp.serving.api.encoding import EncodeRequest, TextTokens
from sharp.serving.api.errors import AlreadyExistsError, DeviceLostError, EngineError, QueueFullError
from sharp.serving.api.events import ComputedRows, Failed, Finished, FinishReason
from sharp.serving.backends.rows import RowOutput
from sharp.serving.config import EngineConfig
from sharp.serving.encoder.engine import LEAST_TOKENS_SHARE, EncoderEngine, choose
from sharp.serving.engine.row_engine import RunningRequest, WaitingRow

BAD, LOST = 66, 77


class Backend:
    """A backend whose hidden state of a token is (its id, its type), and NaN at padding."""

    device, kernels = "cpu", True

    def __init__(self):
        self.batches = []

    def run(self, inputs, *, collect_stats):
        token_ids, mask = inputs["input_ids"], inputs["attention_mask"]
        self.batches.append(mask.sum(1).tolist())
        if (token_ids == BAD).any():
            raise RuntimeError("a kernel failed")
        if (token_ids == LOST).any():
            raise DeviceLostError("the GPU is lost")
        values = np.stack([token_ids, inputs["token_type_ids"]], -1).astype(np.float32)
        values[mask == 0] = np.nan
        stats = np.ones((1, *token_ids.shape, 2, 4), np.float32).swapaxes(2, 3) if collect_stats else None
        return RowOutput(values, stats)


MANIFEST = Manifest(
    sharp_version="0",
    name="encoder",
    kind="encoder",
    source=SourceRecord(name="made by a test", architecture="Identity", sha256=""),
    opset=23,
    layers=1,
    q_heads=2,
    kv_heads=2,
    head_dim=1,
    value_dim=1,
    vocab_size=100,
    max_context=600,
    trained_context=600,
    positions="none",
    norm=Norm(name="softmax", normalizer="softmax", trained=True),
)


def make_engine(pooling="mean", **config):
    return EncoderEngine(Backend(), MANIFEST, pooling, EngineConfig(**config))


def request(name, *texts, client=""):
    return EncodeRequest(name, tokens=tuple(TextTokens(ids) for ids in texts), client=client)


def run(engine):
    """Run the engine to the end, check its integrity after every step, and return all events by request."""
    events = {}
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
        engine.check_integrity()
    return events


def rows(events):
    return next(event.values for event in events if isinstance(event, ComputedRows))[:, 0].tolist()


def test_texts_of_several_requests_share_a_batch_and_each_gets_its_own_rows():
    engine = make_engine()
    engine.add(request("a", [1, 3], [9, 9, 9]))
    engine.add(request("b", [5]))
    events = run(engine)
    assert engine._backend.batches == [[1, 2, 3]]
    assert rows(events["a"]) == [2, 9]
    assert rows(events["b"]) == [5]
    finished = events["a"][-1]
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.usage.prompt_tokens, finished.last) == (FinishReason.STOP, 5, True)


@pytest.mark.parametrize(("pooling", "expected"), [("mean", [2, 4.5]), ("cls", [1, 4]), ("last", [3, 5])])
def test_padding_touches_no_pooling(pooling, expected):
    engine = make_engine(pooling)
    engine.add(request("a", [1, 2, 3], [4, 5]))
    assert rows(run(engine)["a"]) == expected


def test_a_small_request_does_not_wait_for_all_of_a_large_one():
    engine = make_engine(max_sequences=8)
    engine.add(request("large", *([1] * 100 for _ in range(200))))
    engine.step()
    engine.add(request("small", [5, 6]))
    steps = 0
    done = False
    while not done:
        steps += 1
        done = any(event.request_id == "small" for event in engine.step())
    assert steps <= 2


def test_an_aborted_request_computes_nothing_more():
    engine = make_engine(max_sequences=1)
    engine.add(request("a", [1], [2], [3]))
    engine.step()
    [finished] = engine.abort("a")
    assert finished.reason is FinishReason.CANCELLED
    assert not engine.has_work
    assert engine.abort("a") == []
    engine.check_integrity()
    assert len(engine._backend.batches) == 1


def test_a_batch_that_fails_loses_its_requests_and_no_other():
    engine = make_engine(max_sequences=1)
    engine.add(request("bad", [BAD]))
    engine.add(request("good", [1]))
    events = run(engine)
    [failed] = events["bad"]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, EngineError)
    assert rows(events["good"]) == [1]
    assert engine.failed_steps == 0  # 0 because the last step worked
    reasons = [ended.reason for ended in engine.report().finished]
    assert reasons == ["error", "stop"]


def test_a_lost_device_ends_the_engine():
    engine = make_engine()
    engine.add(request("a", [LOST]))
    with pytest.raises(DeviceLostError):
        engine.step()


def test_numbers_that_are_not_finite_fail_their_request_alone(monkeypatch):
    engine = make_engine()
    engine.add(request("a", [1]))
    engine.add(request("b", [2]))
    compute = engine._backend.run

    def overflowing(inputs, *, collect_stats):
        output = compute(inputs, collect_stats=collect_stats)
        output.values[inputs["input_ids"] == 1] = np.inf
        return output

    monkeypatch.setattr(engine._backend, "run", overflowing)
    events = run(engine)
    assert isinstance(events["a"][0], Failed)
    assert rows(events["b"]) == [2]


def test_what_waits_is_bounded_by_requests_and_by_tokens():
    engine = make_engine(max_waiting_requests=2, max_waiting_tokens=10)
    engine.add(request("a", [1] * 20))  # a request may wait whatever its size if no other request waits
    with pytest.raises(QueueFullError, match="20 prompt tokens wait already; the limit is 10"):
        engine.add(request("b", [1]))
    engine = make_engine(max_waiting_requests=2)
    engine.add(request("a", [1]))
    with pytest.raises(AlreadyExistsError):
        engine.add(request("a", [1]))
    engine.add(request("b", [1]))
    with pytest.raises(QueueFullError, match="2 sequences wait already"):
        engine.add(request("c", [1]))


@pytest.mark.parametrize("fair", [True, False])
def test_a_client_with_many_requests_delays_another_one_by_one_batch(fair):
    engine = make_engine(max_batch_tokens=10, max_sequences=1, fair_shares=fair)
    for number in range(30):
        engine.add(request(f"greedy {number}", [1] * 10, client="greedy"))
    engine.step()
    for number in range(10):
        engine.add(request(f"honest {number}", [2] * 10, client="honest"))
    ended = [name.split()[0] for name in run(engine)]
    alternating = ["greedy", "honest"] * 10 + ["greedy"] * 19
    assert ended == (alternating if fair else ["greedy"] * 29 + ["honest"] * 10)


def test_in_a_full_queue_the_client_that_waits_with_most_gives_way():
    engine = make_engine(max_waiting_requests=3, max_batch_tokens=1, max_sequences=1)
    for name in ("a", "b", "c"):
        engine.add(request(name, [1], client="greedy"))
    with pytest.raises(QueueFullError):
        engine.add(request("d", [1], client="greedy"))
    engine.add(request("e", [1], client="honest"))
    with pytest.raises(QueueFullError):  # two of one client and one of the other wait: to change that helps nobody
        engine.add(request("f", [1], client="honest"))
    events = run(engine)
    assert [type(event) for event in events["c"]] == [Failed]
    assert isinstance(events["c"][0].error, QueueFullError)
    assert {name for name, of in events.items() if isinstance(of[-1], Finished)} == {"a", "b", "e"}


def test_the_report_has_tokens_padding_batches_and_statistics():
    engine = make_engine(attention_interval=1)
    engine.add(request("a", [1, 2], [3]))
    assert engine.report().waiting == 1
    run(engine)
    report = engine.report()
    assert (report.running, report.waiting) == (0, 0)
    assert (report.prompt_tokens, report.padding_tokens, report.batch_texts) == (3, 1, (2,))
    assert len(report.step_seconds) == len(report.queue) == 1
    [attention] = report.attention
    assert attention.stats.shape == (1, 3, 2, 4)
    assert sorted(attention.visible[0].tolist()) == [1, 2, 2]  # every token sees its whole text


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 16), st.integers(1, 600))
def test_batches_fit_their_limits_and_have_the_first_that_waits(lengths, most_texts, most_tokens):
    owner = RunningRequest(request("a"), 0.0)
    waiting = [WaitingRow(owner, index, length) for index, length in enumerate(lengths)]
    batch = choose(waiting, most_tokens, most_texts)
    assert waiting[0] in batch
    assert len(set(batch)) == len(batch) <= most_texts
    padded = len(batch) * max(text.tokens for text in batch)
    assert len(batch) == 1 or padded <= most_tokens
    assert len(batch) == 1 or padded <= 128 or sum(text.tokens for text in batch) >= LEAST_TOKENS_SHARE * padded
