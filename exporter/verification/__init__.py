"""The verification of a written model, which compares it with PyTorch."""
