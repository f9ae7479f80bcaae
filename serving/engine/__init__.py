"""The engine: the scheduler, the steps, the sampling of tokens, and the threads that run them."""
