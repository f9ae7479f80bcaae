"""`sharp doctor`: a description of this machine, and a check of the op on every available backend."""
