"""The status page at `/`, and the state of the server that it shows, as JSON."""

import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharp.serving.api.attention import json_numbers
from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.frontends.running import RunningModel
from sharp.serving.observability.metrics import Metrics
from sharp.serving.observability.metrics.attention import AttentionModel
from sharp.serving.observability.metrics.dispersion import LEAST_CONTEXT
from sharp.serving.text.chat_template import ChatTemplate


def _page() -> str:
    """Return the page with its style and scripts in it."""

    def read(name: str) -> str:
        """Return the text of a file of the page."""
        return (Path(__file__).with_name("page") / name).read_text(encoding="utf-8")

    scripts = "\n".join(map(read, ("heads.js", "attention.js", "playground.js", "live.js")))
    return read("page.html").replace("/* page.css */\n", read("page.css")).replace("/* scripts */\n", scripts)


PAGE = _page()
# The page is one file: nothing is loaded from elsewhere, and no text of a server can become a script in it.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
}
COUNTED = (
    "sharp_requests_running",
    "sharp_requests_waiting",
    "sharp_kv_cache_usage_ratio",
    "sharp_engine_step_running_seconds",
    "sharp_prompt_tokens_total",
    "sharp_generated_tokens_total",
    "sharp_preemptions_total",
    "sharp_time_to_first_token_seconds_sum",
    "sharp_time_to_first_token_seconds_count",
    "sharp_inter_token_latency_seconds_sum",
    "sharp_inter_token_latency_seconds_count",
)
DIGITS = 4


class LiveState:
    """The numbers that the status page polls: the model, counters and gauges of `/metrics`, and attention per head.

    Attention is per head even if the setting `attention_metrics` is "layer".
    """

    def __init__(self, running: RunningModel, metrics: Metrics) -> None:
        self._model = running.model
        generator = running.model.abilities.generator
        self._generates = generator is not None and running.model.tokenizer is not None
        self._recommended = {} if generator is None else generator.sampling
        default = SamplingParams()
        self._sampling = {"temperature": default.temperature, "top_p": default.top_p, **self._recommended}
        self._chat = isinstance(running.template, ChatTemplate)
        self._served_name = running.service.names[0]
        self._attention_refusal = running.attention.refusal
        self._counted = metrics.registry.restricted_registry(COUNTED)
        self._attention = running.metrics.attention

    def read(self) -> dict[str, Any]:
        """Return the numbers now, as a JSON object with the entries that the page's script reads.

        `time` is in seconds of `time.monotonic`, so only differences of two readings have a meaning.
        """
        manifest = self._model.manifest
        numbers = {
            sample.name.removeprefix("sharp_"): sample.value
            for family in self._counted.collect()
            for sample in family.samples
            if sample.labels["model"] == manifest.name and sample.name in COUNTED
        }
        return {
            "time": time.monotonic(),
            "model": {
                "name": manifest.name,
                "norm": manifest.norm.name,
                "layers": manifest.layers,
                "heads": manifest.q_heads,
                "served_name": self._served_name,
                "generates": self._generates,
                "chat": self._chat,
                "attention_refusal": self._attention_refusal,
                "sampling": self._sampling,
                "sampling_source": manifest.sampling_source if self._recommended else None,
            },
            "numbers": numbers,
            "attention": None if self._attention is None else _attention(self._attention),
        }


def _attention(model: AttentionModel) -> dict[str, Any]:
    """Return the state of a model's attention for the status page as JSON values, entropies in nats."""
    snapshot = model.heads.snapshot()  # without a flush, because a delay of a second does no harm here
    recent = snapshot.recent
    state: dict[str, Any] = {
        "tokens": 0 if recent is None else recent.tokens,
        "window": model.config.attention_window,
        "threshold": model.config.dispersion_threshold,
        "dispersion_tokens": model.config.dispersion_tokens,
        "least_context": LEAST_CONTEXT,
        "smoothed": _rounded(snapshot.smoothed),
        "crossing": _rounded(snapshot.crossing),
        "dispersed": snapshot.dispersed.tolist(),
        "drift": None if snapshot.drift is None else _rounded(snapshot.drift),
    }
    if recent is not None:
        state |= {
            "entropy_nats": _rounded(recent.entropy),
            "normalized_entropy": _rounded(recent.normalized_entropy),
            "support_ratio": _rounded(recent.support_ratio),
            "inverse_temperature": _rounded(recent.inverse_temperature),
            "logit_spread": _rounded(recent.logit_spread),
        }
        if recent.sink_mass is not None:
            state["sink_mass"] = _rounded(recent.sink_mass)
    return state


def _rounded(values: NDArray[np.float64]) -> list[Any]:
    """Return an array as nested lists of numbers rounded to `DIGITS`."""
    return json_numbers(values.round(DIGITS))
