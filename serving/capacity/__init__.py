"""`sharp plan`: what a load takes in memory, servers and money."""
