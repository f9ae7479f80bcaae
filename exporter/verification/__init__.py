"""Verification: the written model against PyTorch."""
