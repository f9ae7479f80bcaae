"""Modules that every part of Sharp needs: the `sharp` command, errors, the manifest, checks of files from others."""
