"""`sharp doctor`: what this machine has, and whether the op is right on every backend that is there."""
