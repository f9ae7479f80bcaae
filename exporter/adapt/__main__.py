"""The program that `torchrun --module sharp.exporter.adapt` runs: `sharp adapt` on several devices."""

from sharp.exporter.adapt.cli import adapt

if __name__ == "__main__":
    adapt(prog_name="sharp adapt")
