"""Normalizers of users: one Python file each, registered by the entry point `sharp.normalizers`."""
