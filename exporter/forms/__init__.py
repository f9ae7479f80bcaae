"""The forms of a model (`--cache`). Each form has a module to trace, a session and verification cases."""
