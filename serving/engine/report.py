"""What the engine did since its last report, as plain numbers for the metrics."""

from dataclasses import dataclass

from sharp.serving.attention import AttentionRows


@dataclass(frozen=True)
class EngineReport:
    """The state now and what happened since the last report; all times in seconds."""

    running: int
    waiting: int
    cache_usage: float
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    prefix_cache_queries: int  # prompt tokens that were looked up in the prefix cache
    prefix_cache_hits: int  # those that it had
    finished: tuple[tuple[str, float], ...]  # (finish reason, request duration)
    queue_seconds: tuple[float, ...]
    first_token_seconds: tuple[float, ...]
    inter_token_seconds: tuple[float, ...]
    step_seconds: tuple[float, ...]
    attention: tuple[AttentionRows, ...]
