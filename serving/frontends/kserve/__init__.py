"""The edge of KServe's protocol, with Triton's tensor names; what a step is, it does not know."""
