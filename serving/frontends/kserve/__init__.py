"""KServe's protocol with Triton's tensor names: its messages, whatever carries them."""
