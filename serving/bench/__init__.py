"""Load on a server: throughput and latencies."""
