"""Every metric of a server: the family's type, unit and labels. A counter's samples end with _total."""

MODEL, LAYER, HEAD = ("model",), ("model", "layer"), ("model", "layer", "head")

FAMILIES = {
    "sharp_requests_running": ("gauge", "", MODEL),
    "sharp_requests_waiting": ("gauge", "", MODEL),
    "sharp_requests": ("counter", "", ("model", "finish_reason")),
    "sharp_prompt_tokens": ("counter", "tokens", MODEL),
    "sharp_generated_tokens": ("counter", "tokens", MODEL),
    "sharp_preemptions": ("counter", "", MODEL),
    "sharp_prefix_cache_queries": ("counter", "", MODEL),
    "sharp_prefix_cache_hits": ("counter", "", MODEL),
    "sharp_kv_cache_usage_ratio": ("gauge", "ratio", MODEL),
    "sharp_engine_step_running_seconds": ("gauge", "seconds", MODEL),
    "sharp_time_to_first_token_seconds": ("histogram", "seconds", MODEL),
    "sharp_inter_token_latency_seconds": ("histogram", "seconds", MODEL),
    "sharp_request_duration_seconds": ("histogram", "seconds", MODEL),
    "sharp_request_queue_seconds": ("histogram", "seconds", MODEL),
    "sharp_step_duration_seconds": ("histogram", "seconds", MODEL),
    "sharp_attention_entropy_nats": ("histogram", "nats", HEAD),
    "sharp_attention_normalized_entropy": ("gauge", "", HEAD),
    "sharp_attention_support_ratio": ("gauge", "ratio", HEAD),
    "sharp_attention_inverse_temperature": ("gauge", "", HEAD),
    "sharp_attention_logit_spread": ("gauge", "", HEAD),
    "sharp_attention_series_limited": ("gauge", "", MODEL),
    "sharp_attention_left_out_tokens": ("counter", "tokens", MODEL),
    "sharp_attention_smoothed_normalized_entropy": ("gauge", "", HEAD),
    "sharp_attention_dispersion_context_tokens": ("gauge", "tokens", HEAD),
    "sharp_attention_drift_psi": ("gauge", "", HEAD),
    "sharp_attention_dispersed_heads": ("gauge", "", LAYER),
    "sharp_attention_context_normalized_entropy": ("summary", "", ("model", "layer", "context")),
}
