"""The forms of a model (`--cache`): each with its module to trace, its session and its verification cases."""
