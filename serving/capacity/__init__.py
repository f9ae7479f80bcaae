"""`sharp plan`: the memory, servers and money that a load needs."""
